"""The daemon stands still, goes away, comes back: calls end within their limit, the client heals by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import radixkv


@pytest.fixture
def own_daemon(daemon_factory: Any) -> Any:
    return daemon_factory(pools=[{"name": "default"}, {"name": "other"}], heartbeat_s=0.2)


@pytest.fixture
def own(own_daemon: Any) -> Any:
    with radixkv.connect(own_daemon.endpoint, timeout=0.3) as client:
        yield client


def test_a_call_without_reply_is_a_timeout(own_daemon: Any, own: Any) -> None:
    pool = own.pool("default")
    seq = pool.reserve(range(8))
    own_daemon.pause()
    calls = (own.stats, lambda: pool.reserve([1, 2]), lambda: pool.lookup([1]), lambda: seq.commit(4))
    for call in (*calls, lambda: own.pool("other")):
        started = time.monotonic()
        with pytest.raises(radixkv.Timeout):
            call()
        assert 0.2 < time.monotonic() - started < 3
    started = time.monotonic()
    with pytest.raises(radixkv.Timeout):
        pool.reserve([1], timeout=0.3)
    assert time.monotonic() - started > 0.5
    own_daemon.resume()
    with radixkv.connect(own_daemon.endpoint) as patient:
        while patient.stats().pools["default"].sequences > 1:
            pool.lookup([1])  # takes the frees along for what was given up
    assert own.pool("other").total_pages == 16
    seq.commit(4)
    assert (seq.committed_tokens, seq.valid()) == (4, True)
    seq.free()


def test_an_extend_whose_reply_was_missed_is_not_lost(own_daemon: Any, own: Any) -> None:
    """Executed or not: afterwards client and daemon agree about the page table."""
    pool = own.pool("default")
    with pool.reserve(range(4)) as seq:
        own_daemon.pause()
        with pytest.raises(radixkv.Timeout):
            seq.extend([4], headroom_tokens=3)
        own_daemon.resume()
        while True:
            try:
                seq.extend([5], headroom_tokens=8)
                break
            except radixkv.Timeout:
                continue
        seq.commit(seq.length)
        with pool.reserve(seq.tokens[:4], last_page="keep") as other:
            assert other.page_table.tolist() == seq.page_table[:1].tolist()
        assert seq.capacity_tokens - seq.length >= 8
        assert seq.valid()


def test_leaving_a_with_block_while_nobody_answers(own_daemon: Any, own: Any) -> None:
    pool = own.pool("default")
    with pool.reserve(range(8)):
        own_daemon.pause()
    with pytest.raises(ZeroDivisionError), pool_body(pool, own_daemon):
        raise ZeroDivisionError
    with radixkv.connect(own_daemon.endpoint) as patient:
        while patient.stats().pools["default"].sequences:
            pool.lookup([1])


def pool_body(pool: Any, daemon: Any) -> Any:
    daemon.resume()
    while True:
        try:
            seq = pool.reserve(range(8))
            break
        except radixkv.Timeout:
            continue
    return seq


def test_a_daemon_that_stood_still_expires_nobody(daemon_factory: Any) -> None:
    daemon = daemon_factory(heartbeat_s=0.05, lease_s=0.2)
    with radixkv.connect(daemon.endpoint, timeout=10) as client:
        seq = client.pool("default").reserve(range(8))
        daemon.pause()
        time.sleep(0.4)  # longer than the lease: that is what is tested
        daemon.resume()
        seq.commit(8)
        assert seq.valid()
        seq.free()


def test_heartbeats_keep_an_idle_session(daemon_factory: Any) -> None:
    daemon = daemon_factory(pools=[{"pages": 4}], heartbeat_s=0.05, lease_s=0.4)
    with radixkv.connect(daemon.endpoint) as idle, radixkv.connect(daemon.endpoint) as other:
        seq = idle.pool("default").reserve(range(16))
        with pytest.raises(radixkv.OutOfPages):
            other.pool("default").reserve([1], timeout=1.0)
        seq.commit(16)
        assert seq.valid()
        seq.free()


def test_a_killed_daemon(own_daemon: Any, own: Any) -> None:
    pool = own.pool("default")
    seq = pool.reserve(range(8))
    own_daemon.kill()
    for call in (own.stats, lambda: pool.reserve([1]), lambda: seq.commit(4), lambda: own.pool("other")):
        started = time.monotonic()
        with pytest.raises((radixkv.Unavailable, radixkv.Timeout)):
            call()
        assert time.monotonic() - started < 3
    with seq:
        pass


def test_a_waiting_call_does_not_wait_for_a_dead_daemon(daemon_factory: Any, wait_until: Any) -> None:
    daemon = daemon_factory(pools=[{"pages": 2}])
    with radixkv.connect(daemon.endpoint, timeout=0.5) as client:
        pool = client.pool("default")
        holder = pool.reserve(range(8))
        outcome: list[Any] = []

        def wait() -> None:
            try:
                pool.reserve([1], timeout=60)
            except radixkv.RadixKVError as error:
                outcome.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_until(lambda: client.stats().queued == 1, what="the queued reserve")
        daemon.kill()
        started = time.monotonic()
        waiter.join(30)
        assert isinstance(outcome[0], radixkv.Unavailable | radixkv.Timeout)
        assert time.monotonic() - started < 20
        del holder


def test_a_new_daemon_takes_its_place(daemon_factory: Any) -> None:
    first = daemon_factory()
    client = radixkv.connect(first.endpoint, timeout=10)
    pool = client.pool("default")
    ns = radixkv.Namespace("m")
    old = pool.reserve(range(8), namespace=ns)
    old.commit(8)
    view = pool.keys(0)
    view.fill_(1.0)
    first.kill()
    second = daemon_factory(endpoint=first.endpoint)
    with pool.reserve(range(8), namespace=ns) as seq:  # waits until the client has healed
        assert (seq.cached_tokens, seq.valid()) == (0, True)
        assert client.stats().boot_id == second.ready["boot_id"] != first.ready["boot_id"]
        assert client.pool("default") is pool
        assert (view == 1.0).all()
        assert (pool.keys(0) == 0.0).all()
        for use in (lambda: old.commit(8), lambda: old.extend([1]), old.share, old.compact):
            with pytest.raises(radixkv.SessionLost):
                use()
        assert not old.valid()
        result = pool.step(commit={seq: 8, old: 8})
        assert result.commit[seq] is None
        assert isinstance(result.commit[old], radixkv.SessionLost)
        with old:
            pass
    client.close()


def test_a_new_daemon_without_the_pool(daemon_factory: Any) -> None:
    first = daemon_factory(pools=[{"name": "default"}, {"name": "second"}])
    with radixkv.connect(first.endpoint, timeout=10) as client:
        pool, second = client.pool("default"), client.pool("second")
        first.kill()
        daemon_factory(endpoint=first.endpoint)
        with pool.reserve([1, 2]):
            pass
        with pytest.raises(radixkv.Unavailable, match="second"):
            second.reserve([1, 2])


def test_an_idle_client_heals_before_it_is_used(daemon_factory: Any, wait_until: Any) -> None:
    first = daemon_factory()
    with radixkv.connect(first.endpoint, timeout=10) as client:
        pool = client.pool("default")
        first.kill()
        second = daemon_factory(endpoint=first.endpoint)
        with radixkv.connect(second.endpoint) as other:
            wait_until(lambda: other.stats().sessions == 2, what="the healed client")
        assert pool.lookup([1]).device_tokens == 0


WORKER = """
import sys, radixkv
client = radixkv.connect(sys.argv[1])
seq = client.pool("default").reserve(range(8))
seq.commit(8)
print("holding", flush=True)
sys.stdin.readline()
assert not seq.valid()
try:
    seq.commit(8)
except radixkv.SessionLost:
    print("lost", flush=True)
with client.pool("default").reserve(range(50, 54)) as other:
    print("again", other.valid(), flush=True)
"""


def test_a_session_that_was_revoked(daemon_factory: Any) -> None:
    """Its worker hung beyond the lease and somebody was short of pages: it can tell, and goes on in a new session."""
    daemon = daemon_factory(pools=[{"pages": 2}], lease_s=0.4, heartbeat_s=0.05)
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, daemon.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert worker.stdout.readline() == "holding\n"
    worker.send_signal(signal.SIGSTOP)
    with radixkv.connect(daemon.endpoint) as other, other.pool("default").reserve(range(90, 98), timeout=30) as seq:
        assert len(seq.page_table) == 2
    worker.send_signal(signal.SIGCONT)
    assert worker.communicate("\n", timeout=30)[0] == "lost\nagain True\n"
    assert worker.returncode == 0


def test_a_draining_daemon(daemon_factory: Any) -> None:
    daemon = daemon_factory(drain_s=30.0)
    with radixkv.connect(daemon.endpoint, timeout=5) as client:
        pool = client.pool("default")
        seq = pool.reserve(range(8))
        daemon.process.terminate()
        with pytest.raises(radixkv.Draining):
            while True:
                pool.reserve([1]).free()
        seq.commit(8)
        seq.free()
        assert daemon.process.wait(30) == 0
