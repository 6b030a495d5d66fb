"""From the ready line to the exit code: real processes, started by command line, ended in every way."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from radixkv.commands import Bye, Commit, Failure, Heartbeat, Reserve, Reserved, Step, Stepped
from radixkv.errors import Draining, Unavailable
from radixkv.ipc.attach import Attachment
from tests.integration.raw import tokens

POOL = "name=default,layers=1,kv_heads=1,head_dim=8,dtype=float32,page_size=4,pages=8"
END_S = 20.0


class Served:
    """``radixkv serve`` as a supervisor sees it."""

    def __init__(self, command: list[str], **popen) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.ready = json.loads(line) if line else None

    def end(self) -> tuple[int, str, str]:
        """Exit code, the rest of stdout, stderr."""
        rest, log = self.process.communicate(timeout=END_S)
        return self.process.returncode, rest, log


@pytest.fixture
def serve(tmp_path: Path, serve_command):
    started: list[Served] = []

    def of(command: list[str], **popen) -> Served:
        started.append(Served(command, **popen))
        return started[-1]

    def start(*flags: str, directory: Path = tmp_path, **popen) -> Served:
        return of(serve_command(directory, "--pool", POOL, *flags), **popen)

    start.of = of
    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
        served.process.communicate()


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_ready_line_and_the_files(serve, tmp_path: Path, raw_worker) -> None:
    served = serve()
    ready = served.ready
    assert ready == {
        "event": "ready",
        "endpoint": f"ipc://{tmp_path}/r.sock",
        "attach": f"{tmp_path}/r.sock.attach",
        "pid": served.process.pid,
        "boot_id": ready["boot_id"],
        "cache_id": ready["cache_id"],
        "pools": ["default"],
    }
    assert re.fullmatch("[0-9a-f]{32}", ready["boot_id"]) and re.fullmatch("[0-9a-f]{32}", ready["cache_id"])
    assert files(tmp_path) == ["r.sock", "r.sock.attach", "r.sock.lock"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    worker = raw_worker(ready["endpoint"])
    assert worker.welcome.boot_id == ready["boot_id"]
    served.process.terminate()
    code, rest, log = served.end()
    assert (code, rest) == (0, "")
    assert "draining" in log and "stopped" in log
    assert files(tmp_path) == []


def test_the_daemon_imports_no_torch_and_maps_no_arena(serve) -> None:
    served = serve("--pool", "name=big,page_size=16,device_bytes=268435456")
    maps = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "torch" not in maps and "libcuda" not in maps
    assert "memfd:radixkv-table" in maps and "memfd:radixkv-arena" not in maps
    status = dict(line.split(":", 1) for line in Path(f"/proc/{served.process.pid}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 80 * 1024


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_lets_what_runs_come_to_its_end(
    serve, tmp_path: Path, raw_worker, number: signal.Signals
) -> None:
    served = serve()
    worker = raw_worker(served.ready["endpoint"])
    assert isinstance(worker.reserve(1, tokens(8), headroom=24), Reserved)
    waiting = worker.send(Reserve("default", 2, b"ns", tokens(4), 0, "copy", 60.0))
    served.process.send_signal(number)
    identity, reply = worker.receive()
    assert identity == waiting and isinstance(reply, Failure) and reply.code == "draining"
    assert worker.reserve(3, tokens(4)).code == "draining"
    newcomer = Attachment(worker.endpoint, END_S)
    with pytest.raises(Draining):
        newcomer.hello()
    newcomer.close()
    assert worker.ask(Step(commit=[Commit(1, 8)])) == Stepped(commit=[None])
    assert served.process.poll() is None
    assert worker.free(1) == Stepped(free=[None])
    assert served.end()[0] == 0
    assert files(tmp_path) == []


def test_draining_has_an_end(serve, tmp_path: Path, raw_worker) -> None:
    served = serve("--drain-s", "0.2")
    worker = raw_worker(served.ready["endpoint"])
    worker.reserve(1, tokens(8))
    begin = time.monotonic()
    served.process.terminate()
    code, _, _ = served.end()
    assert code == 0
    assert 0.2 <= time.monotonic() - begin < 5.0
    assert files(tmp_path) == []


def test_a_second_signal_ends_at_once(serve, tmp_path: Path, raw_worker) -> None:
    served = serve("--drain-s", "600")
    worker = raw_worker(served.ready["endpoint"])
    worker.reserve(1, tokens(8))
    served.process.terminate()
    while not isinstance(worker.reserve(2, tokens(1)), Failure):
        worker.free(2)
    served.process.send_signal(signal.SIGINT)
    code, _, log = served.end()
    assert code == 0
    assert "stopping without waiting" in log
    assert files(tmp_path) == []


def test_an_idle_worker_does_not_hold_the_daemon_up(serve, raw_worker) -> None:
    served = serve("--drain-s", "600")
    worker = raw_worker(served.ready["endpoint"])
    assert worker.ask(Heartbeat())
    served.process.terminate()
    assert served.end()[0] == 0
    with pytest.raises(Unavailable):
        worker.attachment.map_pool("default")


def test_an_endpoint_serves_one_daemon(serve, tmp_path: Path, raw_worker) -> None:
    first = serve()
    worker = raw_worker(first.ready["endpoint"])
    second = serve()
    assert second.ready is None
    code, rest, log = second.end()
    assert (code, rest) == (3, "")
    assert "endpoint in use" in log
    assert files(tmp_path) == ["r.sock", "r.sock.attach", "r.sock.lock"]
    assert worker.ask(Heartbeat())
    assert raw_worker(first.ready["endpoint"]).welcome.boot_id == first.ready["boot_id"]


def test_what_a_killed_daemon_left_is_replaced(serve, tmp_path: Path, raw_worker) -> None:
    boots = set()
    for _ in range(3):
        served = serve()
        boots.add(served.ready["boot_id"])
        worker = raw_worker(served.ready["endpoint"])
        assert isinstance(worker.reserve(1, tokens(8)), Reserved)
        served.process.kill()
        assert served.end()[0] == -signal.SIGKILL
        assert files(tmp_path) == ["r.sock", "r.sock.attach", "r.sock.lock"]
    assert len(boots) == 3
    served = serve()
    assert raw_worker(served.ready["endpoint"]).pages() == {"free": 8}


def test_memory_that_is_not_there_is_refused_with_the_numbers(serve, tmp_path: Path) -> None:
    begin = time.monotonic()
    served = serve("--pool", "name=huge,device_bytes=4398046511104")
    code, rest, log = served.end()
    assert (code, rest, served.ready) == (4, "", None)
    assert time.monotonic() - begin < 10.0
    needed, available = (int(re.search(rf"{name}=(\d+)", log)[1]) for name in ("needed_bytes", "available_bytes"))
    assert needed > 4_398_000_000_000 > available > 0
    assert "fewer pages" in log
    assert files(tmp_path) == []


@pytest.mark.parametrize("limit", [4096, 2_000_000], ids=["table", "arena"])
def test_a_file_size_limit_is_refused_by_its_name(serve, tmp_path: Path, limit: int) -> None:
    """There is memory enough: fewer pages would help as well, but a shell's `ulimit -f` is what is wrong."""
    pool = f"name=limited,layers=1,kv_heads=1,head_dim=8,page_size=4,pages={1 if limit == 4096 else 10_000}"
    served = serve("--pool", pool, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    code, rest, log = served.end()
    assert (code, rest, served.ready) == (4, "", None)
    assert f"the file size limit of {limit} bytes" in log and "ulimit -f unlimited" in log
    assert f"available_bytes={limit}" in log
    assert files(tmp_path) == []


def test_a_path_that_is_too_long_is_refused_with_the_reason(serve, tmp_path: Path) -> None:
    served = serve(directory=tmp_path / ("x" * 120))
    code, rest, log = served.end()
    assert (code, rest) == (2, "")
    assert "107 bytes" in log
    assert files(tmp_path) == []


def test_a_directory_others_can_write_is_refused(serve, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    served = serve()
    assert served.end()[0] == 2
    assert files(tmp_path) == []


def test_the_default_place_is_private(serve, tmp_path: Path) -> None:
    served = serve.of(
        [sys.executable, "-m", "radixkv", "serve", "--pool", POOL],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "RADIXKV_ENDPOINT": ""},
        umask=0,
    )
    assert served.ready["endpoint"] == f"ipc://{tmp_path}/radixkv/radixkv.sock"
    assert (tmp_path / "radixkv").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "radixkv").iterdir()} == {0o600}
    served.process.terminate()
    assert served.end()[0] == 0


def test_it_can_serve_more_workers_than_the_soft_limit_of_files_allows(serve, raw_worker) -> None:
    served = serve(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 4096)))
    workers = [raw_worker(served.ready["endpoint"]) for _ in range(30)]
    assert len({worker.welcome.session for worker in workers}) == 30
    assert workers[0].stats()["sessions"] == 30
    assert all(worker.ask(Bye()) for worker in workers)


BROKEN = """
import sys
from radixkv.engine import invariants
from radixkv.errors import BrokenInvariant
from radixkv.config import Config, KVSpec, PoolConfig, ServerConfig
from radixkv.engine.engine import Engine
from radixkv.daemon import serve

def check(engine):
    if engine.live_sequences() and sys.argv[2] == "invariant":
        raise BrokenInvariant("I1", "planted")

real_step = Engine.step

def step(self, command, now):
    if "seq=77" in repr(command) and sys.argv[2] == "exception":
        raise KeyError("planted")
    return real_step(self, command, now)

invariants.check = check
Engine.step = step
pool = PoolConfig("default", KVSpec(1, 1, 8, "float32", 4), 8)
sys.exit(serve(Config(ServerConfig(endpoint="ipc://" + sys.argv[1]), pools=(pool,)), paranoid=True))
"""


@pytest.mark.parametrize("planted", ["invariant", "exception"])
def test_a_bug_marks_the_table_tells_the_last_commands_and_ends(
    serve, tmp_path: Path, raw_worker, planted: str
) -> None:
    served = serve.of([sys.executable, "-c", BROKEN, f"{tmp_path}/r.sock", planted])
    worker = raw_worker(served.ready["endpoint"])
    table = worker.table()
    assert worker.ask(Heartbeat())
    assert not table.tainted
    worker.send(Reserve("default", 77, b"ns", tokens(4)))
    code, rest, log = served.end()
    assert (code, rest) == (70, "")
    assert table.tainted
    assert "planted" in log and "this is a bug" in log
    commands = [json.loads(line)["command"] for line in log.splitlines() if line.startswith("{")]
    assert any(command.startswith("OpenSession(") for command in commands)
    assert "Heartbeat()" in commands[-2] and "seq=77" in commands[-1]
    assert worker.dealer.poll(100) == 0, "no reply leaves after that"
    assert files(tmp_path) == []
    table.close()
