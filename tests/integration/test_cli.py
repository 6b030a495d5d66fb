"""The command line against a real daemon: what ``serve`` is given, ``stat`` and ``doctor`` see."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import radixkv

POOL = "name=small,layers=1,kv_heads=1,head_dim=8,dtype=float32,page_size=4,pages=8"


class Machine:
    """Runs commands with an endpoint of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/radixkv.sock"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("RADIXKV_")}
        self.environment["RADIXKV_ENDPOINT"] = self.endpoint

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "radixkv", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = self.command(*arguments)
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)

    @contextmanager
    def start(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on; it is killed if it still does so at the end of the block."""
        command, pipe = self.command(*arguments), subprocess.PIPE
        with subprocess.Popen(command, env=self.environment, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def serve(self, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
        """A daemon and its ready line. At the end it drains, with exit code 0 and nothing more to say."""
        with self.start("serve", *arguments) as daemon:
            assert daemon.stdout is not None
            yield daemon, json.loads(daemon.stdout.readline())
            daemon.terminate()
            rest, _ = daemon.communicate(timeout=30)
            assert rest == ""
            assert daemon.returncode == 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    tmp_path.chmod(0o700)
    return Machine(tmp_path)


@pytest.fixture
def ready(machine: Machine) -> Iterator[dict[str, Any]]:
    """The ready line of a daemon with one small pool."""
    with machine.serve("--pool", POOL) as (_, line):
        yield line


def test_the_ready_line_says_where_the_daemon_is(machine: Machine, ready: dict[str, Any]) -> None:
    assert ready["event"] == "ready"
    assert ready["endpoint"] == machine.endpoint
    assert ready["attach"] == machine.endpoint.removeprefix("ipc://") + ".attach"
    assert Path(f"/proc/{ready['pid']}").exists()
    assert list(ready["pools"]) == ["small"]
    assert {"boot_id", "cache_id"} <= ready.keys()


def test_stat_shows_the_daemon(machine: Machine, ready: dict[str, Any]) -> None:
    done = machine.run("stat", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["boot_id"] == ready["boot_id"]
    assert found["cache_id"] == ready["cache_id"]
    assert found["pools"]["small"]["total_pages"] == 8
    assert found["pools"]["small"]["pages"]["free"] == 8
    assert found["uptime_s"] >= 0
    assert {"version", "sessions", "queued"} <= found.keys()
    assert {"requests", "asked_tokens", "hit_tokens", "evicted_pages"} <= found["counters"].keys()
    assert {"host_pages", "evictable_pages", "sequences", "nodes"} <= found["pools"]["small"].keys()
    table = machine.run("stat", "--endpoint", machine.endpoint)
    assert table.returncode == 0, table.stderr
    assert "pool small: 8 pages" in table.stdout


def test_stat_watches_until_the_daemon_is_gone(machine: Machine) -> None:
    with (
        machine.serve("--pool", POOL) as (daemon, _),
        machine.start("stat", "--json", "--watch", "--every", "0.05") as watch,
    ):
        assert watch.stdout is not None
        looks = [json.loads(watch.stdout.readline()) for _ in range(3)]
        daemon.terminate()
        _, said = watch.communicate(timeout=60)
        assert watch.returncode == 1
    assert "no daemon at" in said or "starts or ends" in said
    assert looks[0]["uptime_s"] < looks[2]["uptime_s"]


def test_a_daemon_that_is_full_or_drains_is_seen(machine: Machine) -> None:
    with machine.serve("--pool", POOL, "--limits.sessions", "1", "--drain-s", "60") as (daemon, line):
        client = radixkv.connect(line["endpoint"])
        pool = client.pool("small")
        held = pool.reserve([1, 2])
        full = machine.run("stat", "--json")
        assert json.loads(full.stdout)["sessions"] == 1, full.stderr
        daemon.terminate()
        with pytest.raises(radixkv.Draining):
            while True:
                pool.reserve([3]).free()
        assert ", 1 session, 0 queued, draining" in machine.run("stat").stdout
        doctor = json.loads(machine.run("doctor", "--json").stdout)
        assert {check["name"]: check for check in doctor["checks"]}["daemon"]["status"] == "ok"
        held.free()
        assert daemon.wait(30) == 0
        client.close()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def doctor_on_the_daemon(machine: Machine) -> dict[str, str]:
    found: dict[str, str] = next(
        check for check in json.loads(machine.run("doctor", "--json").stdout)["checks"] if check["name"] == "daemon"
    )
    return found


def test_a_daemon_that_is_stopped_is_not_to_be_started(machine: Machine, ready: dict[str, Any]) -> None:
    """`radixkv serve` would end with 3."""
    with stopped(ready["pid"]):
        for command in ("stat", "drain"):
            done = machine.run(command)
            assert (done.returncode, done.stdout) == (1, "")
            assert f"a daemon is at {machine.endpoint} and does not answer" in done.stderr
            assert "start one" not in done.stderr and "radixkv serve" not in done.stderr
        found = doctor_on_the_daemon(machine)
        assert found["status"] == "fail" and "does not answer" in found["detail"]
        assert "serve" not in found["detail"] + found["fix"]
        assert machine.run("serve", "--pool", POOL).returncode == 3
    assert machine.run("stat").returncode == 0


def test_a_daemon_whose_socket_was_removed_is_still_there(machine: Machine, ready: dict[str, Any]) -> None:
    Path(machine.endpoint.removeprefix("ipc://")).unlink()
    done = machine.run("stat")
    assert done.returncode == 1 and "a daemon has " in done.stderr and "start one" not in done.stderr
    found = doctor_on_the_daemon(machine)
    assert found["status"] == "fail" and "radixkv.sock.lock" in found["detail"]
    assert machine.run("serve", "--pool", POOL).returncode == 3


def test_doctor_sees_the_daemon(machine: Machine, ready: dict[str, Any]) -> None:
    done = machine.run("doctor", "--json")
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["daemon"]["status"] == "ok"
    assert "a daemon runs and has its pages" in found["memory"]["detail"]
    told = machine.run("doctor", "--pool", "name=other,pages=2").stdout
    assert "not checked: a daemon already runs here" in told


def test_a_second_daemon_is_refused_with_3(machine: Machine, ready: dict[str, Any]) -> None:
    done = machine.run("serve", "--pool", POOL)
    assert done.returncode == 3
    assert done.stdout == ""
    assert machine.run("stat").returncode == 0


def test_memory_that_is_not_there_is_refused_with_4(machine: Machine) -> None:
    done = machine.run("serve", "--pool", "name=huge,device_bytes=100TiB")
    assert done.returncode == 4
    assert done.stdout == ""
    assert "available" in done.stderr


def test_a_configuration_file_is_served(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "radixkv.toml"
    path.write_text('[[pool]]\nname = "a"\npages = 2\n[[pool]]\nname = "b"\npages = 3\n')
    with machine.serve("--config", str(path)):
        pools = json.loads(machine.run("stat", "--json").stdout)["pools"]
    assert {name: pool["total_pages"] for name, pool in pools.items()} == {"a": 2, "b": 3}


def test_stat_without_a_daemon_says_how_to_start_one(machine: Machine) -> None:
    done = machine.run("stat", "--json")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("radixkv serve") == 1
    assert "[Errno" not in done.stderr
    assert done.stderr.count("\n") == 1
