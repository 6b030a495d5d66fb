"""connect, close, stats, and who may not."""

from __future__ import annotations

import gc
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv.commands import PROTOCOL_VERSION, Failure, Welcome
from radixkv.ipc import wire


def test_nobody_is_there(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(radixkv.Unavailable, match="start one with `radixkv serve`") as caught:
        radixkv.connect(f"ipc://{tmp_path}/nobody.sock", timeout=0.2)
    assert "[Errno" not in str(caught.value)
    assert 0.1 < time.monotonic() - started < 2


def test_it_says_for_how_long_it_was_tried(tmp_path: Path) -> None:
    """Which is less than the timeout, when another pause would be longer than that."""
    started = time.monotonic()
    with pytest.raises(radixkv.Unavailable) as caught:
        radixkv.connect(f"ipc://{tmp_path}/nobody.sock", timeout=0.5)
    waited = time.monotonic() - started
    said = re.search(r"\(tried for ([0-9.]+) s\)", str(caught.value))
    assert said is not None
    assert 0 < float(said[1]) <= waited + 0.001


def test_connect_waits_for_a_daemon_that_is_just_starting(daemon_factory: Any) -> None:
    first = daemon_factory()
    first.kill()
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(radixkv.connect(first.endpoint, timeout=60)))
    waiter.start()
    second = daemon_factory(endpoint=first.endpoint)
    waiter.join(60)
    with got[0] as client:
        assert client.stats().boot_id == second.ready["boot_id"]


def test_a_socket_where_nobody_listens(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_behind:
        left_behind.bind(f"{path}.attach")
    with pytest.raises(radixkv.Unavailable, match="start one with"):
        radixkv.connect(str(path), timeout=0.1)


def test_a_daemon_that_accepts_and_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(f"{path}.attach")
        silent.listen()
        started = time.monotonic()
        with pytest.raises(radixkv.Unavailable):
            radixkv.connect(str(path), timeout=0.2)
        assert time.monotonic() - started < 2


def answer_hello(path: Path, reply: Any) -> threading.Thread:
    """A daemon of one answer."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.attach")
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as peer:
            peer.recv(4096)
            peer.send(wire.encode_attach(reply))
            peer.recv(4096)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_another_protocol_version(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    welcome = Welcome(PROTOCOL_VERSION + 1, 1, 1, 0, b"t" * 16, "boot", "cache", ["default"], 5.0, 60.0)
    server = answer_hello(path, welcome)
    with pytest.raises(radixkv.VersionMismatch):
        radixkv.connect(str(path), timeout=5)
    server.join()


def test_another_users_daemon(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    server = answer_hello(path, Failure("permission_denied", "uid 7 may not use the daemon of uid 8"))
    with pytest.raises(radixkv.PermissionDenied) as caught:
        radixkv.connect(str(path), timeout=5)
    assert isinstance(caught.value, PermissionError)
    server.join()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_daemon_in_another_users_directory(daemon: Any) -> None:
    script = "import os, radixkv, sys; radixkv.connect; os.setuid(65534); radixkv.connect(sys.argv[1], timeout=5)"
    done = subprocess.run([sys.executable, "-c", script, daemon.endpoint], capture_output=True, text=True, check=False)
    assert "PermissionDenied" in done.stderr


def test_the_endpoint_of_the_environment(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_ENDPOINT", daemon.endpoint)
    with radixkv.connect() as client:
        assert client.stats().boot_id == daemon.ready["boot_id"]
    with radixkv.connect(daemon.endpoint.removeprefix("ipc://")) as client:
        assert client.stats().boot_id == daemon.ready["boot_id"]


def test_endpoints_that_are_none() -> None:
    for endpoint in ("tcp://127.0.0.1:5555", "relative/path"):
        with pytest.raises(radixkv.RadixKVError, match="endpoint"):
            radixkv.connect(endpoint)


@pytest.mark.parametrize("timeout", [-1, "5", None, float("nan")])
def test_timeouts_that_are_none(daemon: Any, timeout: Any) -> None:
    with pytest.raises(radixkv.BadRequest):
        radixkv.connect(daemon.endpoint, timeout=timeout)


def test_messages_and_prompts_that_are_too_large(daemon_factory: Any) -> None:
    daemon = daemon_factory(limits={"message_bytes": 8192, "tokens": 1000})
    with radixkv.connect(daemon.endpoint, timeout=30) as client:
        pool = client.pool("default")
        for tokens in (1001, 5000, 1_000_000):
            with pytest.raises(radixkv.LimitExceeded):
                pool.reserve(range(tokens))
        with pool.reserve([1]) as seq:
            with pytest.raises(radixkv.LimitExceeded):
                seq.extend(range(5000))
            with pytest.raises(radixkv.LimitExceeded):
                pool.lookup([range(900)] * 20)
            seq.extend([2], headroom_tokens=4)
            assert (seq.length, seq.valid()) == (2, True)


def test_too_many_sessions(daemon_factory: Any) -> None:
    daemon = daemon_factory(limits={"sessions": 1})
    with radixkv.connect(daemon.endpoint), pytest.raises(radixkv.LimitExceeded):
        radixkv.connect(daemon.endpoint)
    radixkv.connect(daemon.endpoint).close()


def test_close_gives_everything_back(connect: Any, ns: Any, counts: Any) -> None:
    other = connect()
    seq = other.pool("default").reserve(range(10), namespace=ns)
    other.close()
    other.close()
    after = counts()
    assert after["sequences"] == after["private"] == after["quarantined"] == 0
    for use in (other.stats, lambda: other.pool("default"), lambda: seq.commit(1), lambda: seq.pool.keys(0)):
        with pytest.raises(radixkv.Unavailable, match="closed"):
            use()
    with seq:
        pass
    assert not seq.valid()


def test_a_client_is_a_context_manager(daemon: Any, client: Any) -> None:
    sessions = client.stats().sessions
    with radixkv.connect(daemon.endpoint) as other:
        assert other.stats().sessions == sessions + 1
    assert client.stats().sessions == sessions
    with pytest.raises(radixkv.Unavailable):
        other.stats()


def test_a_client_nobody_holds_any_more_ends_its_session(daemon: Any, client: Any, wait_until: Any) -> None:
    sessions = client.stats().sessions
    radixkv.connect(daemon.endpoint)
    wait_until(lambda: client.stats().sessions == sessions, what="the end of the session")


def test_a_pool_holds_its_client(daemon: Any, ns: Any) -> None:
    pool = radixkv.connect(daemon.endpoint).pool("default")
    with pool.reserve([1], namespace=ns) as seq:
        assert seq.length == 1
    pool.client.close()


def test_clients_leave_no_descriptors_behind(daemon: Any, wait_until: Any) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def use() -> None:
        with radixkv.connect(daemon.endpoint) as client, client.pool("default").reserve([1]) as seq:
            assert seq.valid()

    use()
    gc.collect()
    before = descriptors()
    for _ in range(5):
        use()
    wait_until(lambda: descriptors() <= before, what="the end of the sockets")


def test_stats_are_a_frozen_snapshot(client: Any, daemon: Any) -> None:
    stats = client.stats()
    assert stats.version == stats["version"] == radixkv.__version__
    assert (stats.boot_id, stats.cache_id) == (daemon.ready["boot_id"], daemon.ready["cache_id"])
    assert stats.uptime_s > 0
    default = stats.pools["default"]
    assert default.total_pages == sum(default.pages.values()) == 16
    assert {"total_pages", "pages", "host_pages", "evictable_pages", "sequences", "nodes"} <= set(default)
    assert {"requests", "asked_tokens", "hit_tokens", "evicted_pages"} <= set(stats.counters)
    assert (stats.sessions, stats.queued) == (1, 0)
    with pytest.raises(AttributeError):
        stats.sessions = 5
    with pytest.raises(TypeError):
        stats["sessions"] = 5
    requests = stats.counters.requests
    assert client.stats().counters.requests > requests == stats.counters.requests


def test_every_error_has_its_code() -> None:
    codes = {
        "out_of_pages", "timeout", "stale_handle", "session_lost", "bad_request", "limit_exceeded", "unavailable",
        "permission_denied", "draining", "copy_failed", "version_mismatch", "forked",
    }  # fmt: skip
    kinds = [getattr(radixkv, name) for name in radixkv.__all__ if name[0].isupper()]
    errors = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, radixkv.RadixKVError)]
    assert {kind.code for kind in errors if kind is not radixkv.RadixKVError} == codes
    assert issubclass(radixkv.Timeout, TimeoutError)
    assert issubclass(radixkv.PermissionDenied, PermissionError)


def test_import_is_cheap() -> None:
    script = """
import sys, radixkv
assert not {"torch", "zmq", "msgspec", "numpy"} & set(sys.modules), sorted(sys.modules)
assert set(radixkv.__all__) <= set(dir(radixkv))
radixkv.Timeout, radixkv.Namespace
assert not {"torch", "zmq", "msgspec"} & set(sys.modules)
radixkv.connect
assert "torch" not in sys.modules
try:
    radixkv.nothing
except AttributeError as error:
    assert "nothing" in str(error)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
