"""Fixtures for tests that need a real daemon: a process of its own, with tiny pools, gone when the module is done."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from radixkv.config import Config, EventsConfig, KVSpec, Limits, PoolConfig, ServerConfig

START_S = 30.0
TINY = {"layers": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32", "page_size": 4, "pages": 16}
"""A pool that is easy to count in: 16 pages of 4 tokens."""
DEVICE = os.environ.get("RADIXKV_TEST_DEVICE", "cpu")
"""Where the pools of daemons that tests start are; tests/cuda runs tests again with another one."""

_SERVE = """
import json, sys
from radixkv.config import Config, EventsConfig, KVSpec, Limits, PoolConfig, ServerConfig
from radixkv.daemon import serve
given = json.loads(sys.argv[1])
pools = tuple(PoolConfig(**{**pool, "spec": KVSpec(**pool["spec"])}) for pool in given["pools"])
events = EventsConfig(**given["events"])
config = Config(ServerConfig(**given["server"]), Limits(**given["limits"]), pools, events)
sys.exit(serve(config, paranoid=given["paranoid"]))
"""
_KEEP = """
import sys
from radixkv.ipc.endpoint import resolve
from radixkv.keeper import keep
sys.exit(keep(resolve(sys.argv[1]), sys.argv[2:]))
"""
_DIE_WITH_PARENT = """
import ctypes
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)  # a test run that is killed leaves no daemon behind
"""


class Daemon:
    """A running daemon. ``ready`` is its first line on stdout."""

    def __init__(self, config: Config, directory: Path, paranoid: bool = True) -> None:
        self.config = config
        self.directory = directory
        self._log = (directory / "stderr").open("a+b")
        command = self._command(json.dumps({**asdict(config), "paranoid": paranoid}))
        self.process = subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=self._log)
        self.ready = self._await_ready()

    def _command(self, given: str) -> list[str]:
        return [sys.executable, "-c", _DIE_WITH_PARENT + _SERVE, given]

    @property
    def endpoint(self) -> str:
        return self.ready["endpoint"]

    @property
    def pid(self) -> int:
        return self.process.pid

    def pause(self) -> None:
        """Stop the process; returns when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait()
        self._close()

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM; the exit code once it has drained."""
        self.process.terminate()
        code = self.process.wait(timeout)
        self._close()
        return code

    def stderr(self) -> str:
        return (self.directory / "stderr").read_text()

    def end(self) -> None:
        """At the end of a test module: a daemon that ended by itself found a bug."""
        code = self.process.poll()
        if code is None:
            self.kill()
        self._close()
        assert code in (None, 0, -signal.SIGKILL), f"the daemon ended with {code}:\n{self.stderr()}"

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    def _await_ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_S)
        line = self.process.stdout.readline() if readable else b""
        if not line:
            self.process.kill()
            code = self.process.wait()
            self._close()
            raise AssertionError(f"no ready line; exit {code}:\n{self.stderr()}")
        return json.loads(line)


class Supervised(Daemon):
    """A daemon with a keeper. ``process`` is the keeper, ``pid`` the daemon that got ready last."""

    def __init__(self, config: Config, directory: Path, paranoid: bool = True) -> None:
        self.boot_ids: list[str] = []
        super().__init__(config, directory, paranoid)

    def _command(self, given: str) -> list[str]:
        endpoint = self.config.server.endpoint
        return [sys.executable, "-c", _DIE_WITH_PARENT + _KEEP, endpoint, sys.executable, "-c", _SERVE, given]

    @property
    def pid(self) -> int:
        return self.ready["pid"]

    @property
    def keeper_pid(self) -> int:
        return self.process.pid

    def kill_daemon(self) -> None:
        """SIGKILL to the daemon; returns when it is dead, not when the next one is ready."""
        self._end_daemon(signal.SIGKILL)

    def _end_daemon(self, number: signal.Signals) -> None:
        pidfd = os.pidfd_open(self.pid)
        try:
            signal.pidfd_send_signal(pidfd, number)
            assert select.select([pidfd], [], [], START_S)[0]
        finally:
            os.close(pidfd)

    def wait_ready(self) -> dict[str, Any]:
        """The next daemon's ready line."""
        self.ready = self._await_ready()
        return self.ready

    def pause(self) -> None:
        """Stop the daemon's process; returns when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: process_state(self.pid) == "T", what="the daemon's stop")

    def kill(self) -> None:
        """The keeper first, so that it starts no other daemon."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            self.kill_daemon()
        self._close()

    def _await_ready(self) -> dict[str, Any]:
        ready = super()._await_ready()
        self.boot_ids.append(ready["boot_id"])
        return ready


def process_state(pid: int) -> str:
    """The letter that the kernel has for it: R, S, T (stopped), Z (dead, not reaped); "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


DaemonFactory = Callable[..., Daemon]


def pool_config(**fields: Any) -> PoolConfig:
    """A pool from flat fields, those of its spec among them; what is not given is TINY's."""
    given = {**TINY, "device": DEVICE, **fields}
    spec = {name: given.pop(name) for name in list(given) if name in KVSpec.__dataclass_fields__}
    return PoolConfig(spec=KVSpec(**spec), **given)


@pytest.fixture(scope="module")
def daemon_factory() -> Iterator[DaemonFactory]:
    """Starts daemons: ``daemon_factory(pools=[{"name": "default", "pages": 8}], lease_s=1.0)``.

    ``pools``: flat dicts over TINY. ``limits``, ``events``: dicts. ``endpoint``: that of an earlier one, to take its
    place. Other keywords are ``[server]`` settings. Invariants are checked after every step unless ``paranoid=False``.
    ``supervised=True``: with a keeper, see ``Supervised``.
    """
    started: list[Daemon] = []
    directories: list[Path] = []

    def start(
        pools: list[dict[str, Any]] | None = None,
        limits: dict[str, int] | None = None,
        paranoid: bool = True,
        supervised: bool = False,
        events: dict[str, Any] | None = None,
        **server: Any,
    ) -> Daemon:
        directory = Path(tempfile.mkdtemp(prefix="radixkv-"))
        directories.append(directory)
        server.setdefault("endpoint", f"ipc://{directory}/radixkv.sock")
        config = Config(
            ServerConfig(**server),
            Limits(**limits or {}),
            tuple(pool_config(**pool) for pool in pools or [{}]),
            EventsConfig(**events or {}),
        )
        daemon = (Supervised if supervised else Daemon)(config, directory, paranoid)
        started.append(daemon)
        return daemon

    yield start
    try:
        for daemon in started:
            daemon.end()
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)


def wait_until(holds: Callable[[], bool], timeout: float = 10.0, what: str = "the condition") -> None:
    """For what another process does on its own: look again until it holds. Fails after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < end, f"{what} did not come about within {timeout} s"
        time.sleep(0.005)


@pytest.fixture(name="wait_until", scope="session")
def _wait_until() -> Callable[..., None]:
    return wait_until
