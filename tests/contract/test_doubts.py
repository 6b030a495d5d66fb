"""A daemon that stands still (SIGSTOP) while operations are fenced: what it did not answer is asked again, by whatever
goes out next, before anything else about the sequence is said. Nothing hangs, nothing spins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

import radixkv
from tests.contract.conftest import POOLS

TIMEOUT_S = 0.4
END_S = 5.0


@pytest.fixture(scope="module")
def daemon(daemon_factory: Any) -> Any:
    """Heartbeats come so seldom that no test is over before one."""
    return daemon_factory(pools=POOLS, heartbeat_s=30.0)


@pytest.fixture
def seq(pool: Any, ns: Any) -> Iterator[Any]:
    seq = pool.reserve(range(16), namespace=ns)
    yield seq
    seq.closed = True


@pytest.fixture
def stopped(daemon: Any, client: Any) -> Callable[[], AbstractContextManager[None]]:
    """``with stopped():`` the daemon stands still, and our client has little patience."""

    @contextmanager
    def stopped() -> Iterator[None]:
        daemon.pause()
        core = client._link.core
        patience, core.timeout = core.timeout, TIMEOUT_S
        try:
            yield
        finally:
            core.timeout = patience
            daemon.resume()

    return stopped


class Bounded:
    """What runs in it ends in time, and is idle for most of it."""

    def __enter__(self) -> None:
        self._began, self._used = time.monotonic(), time.process_time()

    def __exit__(self, *exc_info: object) -> None:
        wall_s, cpu_s = time.monotonic() - self._began, time.process_time() - self._used
        assert wall_s < END_S
        assert cpu_s < max(0.2, wall_s / 2), f"{cpu_s:.2f} s of {wall_s:.2f} s were spent waiting busily"


def in_doubt(client: Any, wait_until: Any) -> None:
    """Some call takes along what is ready, and has no answer."""
    with pytest.raises(radixkv.Timeout):
        client.stats()
    wait_until(lambda: client._link.core.session.doubts, what="the end of the keeper's patience too")


def test_nothing_overtakes_it(client: Any, seq: Any, new_fence: Any, stopped: Any, wait_until: Any) -> None:
    """The commit comes too late and is not executed. The truncate goes out when that is known."""
    first, second = new_fence(), new_fence()
    seq.commit(10, after=first)
    seq.truncate(7, after=second)
    with stopped():
        first.done = True
        in_doubt(client, wait_until)
        second.done = True
    with Bounded(), pytest.raises(radixkv.Timeout, match="not executed"):
        seq.pool.flush(10)
    assert (seq.length, seq.committed_tokens, seq.valid()) == (7, 0, True)
    seq.commit(7)
    seq.extend([1, 2])
    assert (seq.length, seq.committed_tokens, seq.valid()) == (9, 7, True)


def test_a_free_behind_it_goes_out_when_nobody_calls(
    client: Any, connect: Any, seq: Any, new_fence: Any, stopped: Any, wait_until: Any
) -> None:
    other = connect()
    fence = new_fence()
    seq.commit(16, after=fence)
    seq.free()
    with stopped():
        fence.done = True
        in_doubt(client, wait_until)
    wait_until(lambda: other.stats().pools["default"].sequences == 0, what="the free")
    assert other.stats().pools["default"].pages["private"] == 0


def test_flush_ends_although_nobody_answers(
    client: Any, seq: Any, new_fence: Any, stopped: Any, wait_until: Any
) -> None:
    fence = new_fence()
    seq.commit(10, after=fence)
    seq.truncate(7, after=fence)
    with stopped():
        fence.done = True
        in_doubt(client, wait_until)
        with Bounded(), pytest.raises(radixkv.Timeout, match="no reply"):
            seq.pool.flush()


@pytest.mark.parametrize("asked_by", ["nobody", "another thread"])
def test_close_ends_although_nobody_answers(
    client: Any, seq: Any, new_fence: Any, stopped: Any, wait_until: Any, asked_by: str
) -> None:
    """Also when it is just being asked about, by a call with more patience."""
    fence = new_fence()
    seq.commit(10, after=fence)
    seq.truncate(7, after=fence)
    ended = []

    def wait_long() -> None:
        try:
            seq.pool.reserve([1], namespace=radixkv.Namespace("long"), timeout=30)
        except radixkv.Unavailable as error:
            ended.append(error.message)

    with stopped():
        fence.done = True
        in_doubt(client, wait_until)
        thread = threading.Thread(target=wait_long)
        if asked_by != "nobody":
            thread.start()
            pending = client._link.core._pending
            wait_until(lambda: any(out.repeated for out in list(pending.values())), what="the repeat")
        with Bounded():
            client.close()
        if asked_by != "nobody":
            thread.join(END_S)
            assert ended == ["closed"]
