"""Threads, close during a call, exit with calls in flight."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import radixkv


def test_many_threads_share_one_client(client: Any, ns: Any, counts: Any) -> None:
    pool = client.pool("default")
    barrier = threading.Barrier(4)

    def work(number: int) -> int:
        barrier.wait()
        done = 0
        for turn in range(25):
            tokens = [number * 1000 + turn] * 6
            with pool.reserve(tokens, namespace=ns) as seq:
                seq.commit(4)
                seq.extend([turn], headroom_tokens=1)
                assert seq.tokens.tolist() == [*tokens, turn]
                assert seq.valid()
                done += pool.lookup(tokens, namespace=ns).device_tokens
        return done

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [100] * 4
    assert counts()["sequences"] == 0


def test_a_waiting_call_blocks_nobody(client: Any, ns: Any, wait_until: Any) -> None:
    pool = client.pool("small")
    holder = pool.reserve(range(16), namespace=ns)
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(pool.reserve([1] * 4, namespace=ns, timeout=60)))
    waiter.start()
    wait_until(lambda: client.stats().queued == 1, what="the queued reserve")
    started = time.monotonic()
    for _ in range(20):
        pool.lookup([1, 2], namespace=ns)
    assert time.monotonic() - started < 5
    assert waiter.is_alive()
    holder.free()
    waiter.join(30)
    got[0].free()


def test_replies_reach_the_thread_that_asked(client: Any, ns: Any) -> None:
    pool = client.pool("default")

    def ask(n: int) -> bool:
        prompt = [n] * 8
        with pool.reserve(prompt, namespace=ns) as seq:
            return seq.tokens.tolist() == prompt and len(pool.lookup([prompt] * n, namespace=ns)) == n

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(ask, [1, 2, 3, 4] * 20))


def test_threads_that_end_take_their_sockets_along(client: Any, wait_until: Any) -> None:
    pool = client.pool("default")
    before = len(client._link._sockets)
    for _ in range(3):
        thread = threading.Thread(target=pool.lookup, args=([1],))
        thread.start()
        thread.join()
    assert len(client._link._sockets) == before


def test_two_threads_on_one_sequence(client: Any, ns: Any) -> None:
    """They come one after the other; the page table is what the daemon has."""
    pool = client.pool("default")
    with pool.reserve([], namespace=ns) as seq:

        def extend(n: int) -> None:
            for _ in range(8):
                seq.extend([n])

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(extend, [1, 2]))
        assert sorted(seq.tokens.tolist()) == [1] * 8 + [2] * 8
        seq.commit(16)
        with pool.reserve(seq.tokens, namespace=ns, last_page="keep") as other:
            assert other.page_table.tolist() == seq.page_table.tolist()


def test_close_while_another_thread_waits(daemon: Any, ns: Any, client: Any, wait_until: Any) -> None:
    other = radixkv.connect(daemon.endpoint)
    pool = other.pool("small")
    holder = pool.reserve(range(16), namespace=ns)
    outcome: list[Any] = []

    def wait() -> None:
        try:
            pool.reserve([1] * 4, namespace=ns, timeout=60)
        except radixkv.RadixKVError as error:
            outcome.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: client.stats().queued == 1, what="the queued reserve")
    started = time.monotonic()
    other.close()
    waiter.join(30)
    assert time.monotonic() - started < 5
    assert isinstance(outcome[0], radixkv.Unavailable)
    assert "closed" in str(outcome[0])
    assert not holder.valid()
    wait_until(lambda: client.stats().queued == 0, what="the end of the queued reserve")


EXIT = """
import sys, threading, radixkv
client = radixkv.connect(sys.argv[1])
pool = client.pool("small")
holder = pool.reserve(range(16))
def wait():
    try:
        pool.reserve([1] * 4, timeout=60)
    except radixkv.Unavailable:
        pass
for _ in range(3):
    threading.Thread(target=wait, daemon=True).start()
while client.stats().queued < 3:
    pass
"""


@pytest.mark.parametrize("ending", ["", "client.close()", "del holder, pool, client", "sys.exit(0)"])
def test_exit_with_calls_in_flight(daemon: Any, client: Any, ending: str, wait_until: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT + ending, daemon.endpoint], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr if "del" not in ending else "") == (0, "")
    wait_until(lambda: client.stats().pools["small"].sequences == 0, what="the end of the worker's session")


def test_an_interrupted_wait_leaves_nothing_behind(daemon: Any, client: Any, ns: Any, wait_until: Any) -> None:
    script = """
import os, signal, sys, threading, radixkv
client = radixkv.connect(sys.argv[1], timeout=0.5)
pool = client.pool("small")
holder = pool.reserve(range(16))
def interrupt():
    while client.stats().queued < 1:
        pass
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    pool.reserve([1] * 4, timeout=60)
except KeyboardInterrupt:
    pool.lookup([1])
    assert client.stats().queued == 0
    holder.free()
    assert client.stats().pools["small"].sequences == 0
    print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, daemon.endpoint], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)
