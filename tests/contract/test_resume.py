"""The daemon is killed and comes back, under a keeper: sequences go on as if nothing had happened."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import radixkv
from radixkv.commands import Shutdown
from radixkv.errors import RadixKVError
from radixkv.ipc.endpoint import resolve
from radixkv.ipc.question import ask

KILLS = int(os.environ.get("RADIXKV_KILLS", "15"))
"""How many times in a row the daemon is killed; `make fuzz` sets more."""
PAGE = 4
_numbers = itertools.count()


@pytest.fixture(scope="module")
def daemon(daemon_factory: Any) -> Any:
    """Its heartbeats are far apart: nobody notices anything by them."""
    return daemon_factory(pools=[{"pages": 64}, {"name": "tight", "pages": 2}], supervised=True, heartbeat_s=30.0)


@pytest.fixture
def restart(daemon: Any) -> Any:
    """Kill the daemon; returns when the next one is ready."""

    def restart() -> None:
        daemon.kill_daemon()
        daemon.wait_ready()

    return restart


@pytest.fixture
def client(daemon: Any) -> Iterator[Any]:
    with radixkv.connect(daemon.endpoint, timeout=20) as client:
        yield client


@pytest.fixture
def pool(client: Any) -> Any:
    return client.pool("default")


@pytest.fixture
def ns() -> radixkv.Namespace:
    return radixkv.Namespace(f"resume-{next(_numbers)}")


def write(pool: Any, seq: Any) -> None:
    """Compute: one number a token, in every row that may be written."""
    rows = pool.keys(0)
    tokens, table = seq.tokens.tolist(), seq.page_table.tolist()
    for i in range(max(seq.writable_from_tokens, seq.committed_tokens), seq.length):
        rows[table[i // PAGE], i % PAGE] = float(tokens[i])


def holds(pool: Any, seq: Any, n: int) -> bool:
    """Do the first n tokens' rows hold what was computed for these tokens?"""
    rows = pool.keys(0)
    table = seq.page_table.tolist()
    found = [float(rows[table[i // PAGE], i % PAGE, 0, 0]) for i in range(n)]
    return found == [float(token) for token in seq.tokens[:n]]


def quiet(client: Any) -> bool:
    pages = client.stats().pools["default"].pages
    return pages.private == pages.shadow == pages.quarantined == 0


def test_a_sequence_goes_on(daemon: Any, client: Any, pool: Any, ns: Any, restart: Any) -> None:
    before = client.stats()
    seq = pool.reserve(range(10), namespace=ns, headroom_tokens=2)
    write(pool, seq)
    seq.commit(6)
    table, generations = seq.page_table, seq.facts.generations
    restart()
    assert seq.valid()
    seq.commit(10)
    assert client.stats().boot_id not in (before.boot_id, None)
    assert client.stats().cache_id == before.cache_id
    assert seq.page_table is table
    assert seq.facts.generations is generations
    assert (seq.length, seq.committed_tokens, seq.writable_from_tokens) == (10, 10, 8)
    seq.extend([10, 11, 12], headroom_tokens=3)
    write(pool, seq)
    seq.commit(13)
    (child,) = seq.share(9)
    assert holds(pool, child, 9)
    restart()
    with (
        radixkv.connect(daemon.endpoint, timeout=20) as other,
        other.pool("default").reserve(range(13), namespace=ns) as found,
    ):
        assert (found.cached_tokens, found.page_table[:3].tolist()) == (12, seq.page_table[:3].tolist())
        assert holds(other.pool("default"), found, 12)
    child.truncate(5)
    assert (child.valid(), holds(pool, child, 5), holds(pool, seq, 13)) == (True, True, True)
    moved = pool.adopt(seq.handoff())
    restart()
    moved.compact()
    assert (moved.valid(), holds(pool, moved, 13)) == (True, True)
    moved.free()
    child.free()
    assert quiet(client)


def test_valid_says_yes_all_the_time(pool: Any, ns: Any, restart: Any) -> None:
    """No page changes hands: what is being computed may be used, whether a daemon is there or not."""
    with pool.reserve(range(8), namespace=ns) as seq:
        said: list[bool] = []
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.001):
                said.append(seq.valid())

        looking = threading.Thread(target=look)
        looking.start()
        restart()
        seq.commit(8)
        over.set()
        looking.join()
        assert all(said)
        assert len(said) > 10


def test_calls_of_many_threads_in_flight(daemon: Any, client: Any, pool: Any, ns: Any) -> None:
    """Each does what a worker does; none notices anything but the time it takes."""
    over = threading.Event()
    rounds = [0] * 4
    trouble: list[BaseException] = []

    def work(me: int) -> None:
        rng = random.Random(me)
        try:
            while not over.is_set():
                prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
                with pool.reserve(prompt, namespace=ns, headroom_tokens=2, timeout=20) as seq:
                    assert holds(pool, seq, seq.cached_tokens)
                    write(pool, seq)
                    seq.commit(len(prompt) // 2 + 1 if seq.committed_tokens <= len(prompt) // 2 else seq.length)
                    pool.step(commit={seq: seq.length}, extend={seq: ([1, 2], 1)})
                    write(pool, seq)
                    assert seq.valid()
                    seq.commit(seq.length)
                    for child in seq.share(seq.length - 1):
                        assert holds(pool, child, child.length)
                        child.free()
                rounds[me] += 1
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            trouble.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for in_good_order in (False, True, False):
        before = list(rounds)
        if in_good_order:
            ask(resolve(daemon.endpoint), Shutdown(), 10.0)
        else:
            daemon.kill_daemon()
        daemon.wait_ready()
        end = time.monotonic() + 20
        while any(now <= then for now, then in zip(rounds, before, strict=True)) and not trouble:
            assert time.monotonic() < end, "a thread stands still"
            time.sleep(0.002)
    over.set()
    for thread in threads:
        thread.join(30)
    lost = [error for error in trouble if not isinstance(error, radixkv.SessionLost)]
    if lost:
        raise lost[0]
    assert len(trouble) <= 1, "only a truncate, compact, free or handoff in flight can cost a sequence"
    pool.flush()
    client.pool("default").lookup([1])
    assert quiet(client)


def test_killed_again_and_again_also_within_the_resume(daemon: Any, client: Any, pool: Any, ns: Any) -> None:
    """At once when the next daemon is ready, and at random moments while sessions come back to it."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    sequences = []
    for i in range(8):
        seq = pool.reserve(range(100 * i, 100 * i + 11), namespace=ns, headroom_tokens=1)
        write(pool, seq)
        seq.commit(5)
        sequences.append(seq)
    tables = [seq.page_table for seq in sequences]
    try:
        for _ in range(KILLS):
            daemon.kill_daemon()
            daemon.wait_ready()
            time.sleep(rng.choice([0.0, 0.0, rng.uniform(0, 0.03), rng.uniform(0, 0.1)]))
        for i, seq in enumerate(sequences):
            seq.commit(11)
            assert seq.valid()
            assert seq.page_table is tables[i]
            assert holds(pool, seq, 11)
        with radixkv.connect(daemon.endpoint, timeout=20) as other:
            for i in range(8):
                prompt = list(range(100 * i, 100 * i + 11))
                assert other.pool("default").lookup(prompt, namespace=ns).device_tokens == 8
    except (AssertionError, RadixKVError) as error:
        error.add_note(f"seed {seed}")
        raise
    for seq in sequences:
        seq.free()
    assert quiet(client)


def test_two_restarts_while_nobody_looks(client: Any, pool: Any, ns: Any, restart: Any) -> None:
    with pool.reserve(range(8), namespace=ns) as seq:
        restart()
        restart()
        seq.commit(8)
        assert seq.valid()
        assert pool.lookup(range(8), namespace=ns).device_tokens == 8


def test_a_queued_reserve_goes_on_waiting(client: Any, wait_until: Any, restart: Any) -> None:
    tight = client.pool("tight")
    holder = tight.reserve(range(8))
    granted: list[Any] = []
    waiter = threading.Thread(target=lambda: granted.append(tight.reserve([1], timeout=60)))
    waiter.start()
    wait_until(lambda: client.stats().queued == 1, what="the queued reserve")
    restart()
    wait_until(lambda: client.stats().queued == 1, what="the queued reserve, at the next daemon")
    holder.free()
    waiter.join(30)
    assert granted[0].valid()
    granted[0].free()


def test_fenced_operations_go_out_to_the_next_daemon(pool: Any, ns: Any, new_fence: Any, restart: Any) -> None:
    fence = new_fence()
    seq, going = pool.reserve(range(8), namespace=ns), pool.reserve(range(50, 58), namespace=ns)
    seq.commit(8, after=fence)
    going.free(after=fence)
    restart()
    assert pool.lookup(range(8), namespace=ns).device_tokens == 0
    fence.done = True
    pool.flush()
    assert seq.committed_tokens == 8
    assert pool.lookup(range(8), namespace=ns).device_tokens == 8
    seq.free()
    assert quiet(pool.client)


def test_one_that_cannot_be_proven_is_lost_alone(client: Any, pool: Any, ns: Any, restart: Any) -> None:
    lost, live = pool.reserve(range(8), namespace=ns), pool.reserve(range(20, 28), namespace=ns)
    lost.facts = lost.facts._replace(generations=lost.facts.generations + np.uint64(1))
    restart()
    result = pool.step(commit={lost: 8, live: 8})
    assert isinstance(result.commit[lost], radixkv.SessionLost)
    assert result.commit[live] is None
    assert (lost.valid(), live.valid()) == (False, True)
    for use in (lambda: lost.commit(8), lambda: lost.extend([1]), lost.share):
        with pytest.raises(radixkv.SessionLost):
            use()
    with lost:
        pass
    live.free()


def test_no_daemon_for_a_while(daemon: Any, client: Any, ns: Any, wait_until: Any) -> None:
    """The keeper is stopped. Calls end in time, nothing is lost, and what could not be said is said later."""
    with radixkv.connect(daemon.endpoint, timeout=0.3) as hasty:
        pool = hasty.pool("default")
        seq, going = pool.reserve(range(8), namespace=ns), pool.reserve(range(50, 58), namespace=ns)
        os.kill(daemon.keeper_pid, signal.SIGSTOP)
        daemon.kill_daemon()
        for call in (hasty.stats, lambda: pool.reserve([1]), lambda: seq.commit(4), lambda: seq.extend([1])):
            started = time.monotonic()
            with pytest.raises(radixkv.Unavailable):
                call()
            assert time.monotonic() - started < 3
        going.free()
        assert seq.valid()
        os.kill(daemon.keeper_pid, signal.SIGCONT)
        daemon.wait_ready()
        while True:
            try:
                seq.commit(8)
                break
            except radixkv.Unavailable:
                continue
        assert (seq.valid(), seq.length) == (True, 8)
        wait_until(lambda: client.stats().pools["default"].sequences == 1, what="the free of before")
        os.kill(daemon.keeper_pid, signal.SIGSTOP)
        daemon.kill_daemon()
        started = time.monotonic()
    assert time.monotonic() - started < 3, "to close waits for nobody"
    os.kill(daemon.keeper_pid, signal.SIGCONT)
    daemon.wait_ready()
    seq.closed = True


WORKER = """
import os, sys, radixkv
client = radixkv.connect(sys.argv[1], timeout=20)
pool = client.pool("default")
seq = pool.reserve(range(8), namespace=radixkv.Namespace(sys.argv[2]))
pool.keys(0)[seq.page_table.tolist()] = 5.0
if sys.argv[3] == "fork" and os.fork() == 0:
    sys.stdin.readline()
    try:
        seq.commit(8)
    except radixkv.Forked:
        print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
print("holding", flush=True)
sys.stdin.readline()
seq.commit(8)
assert seq.valid()
assert (pool.keys(0)[seq.page_table.tolist()] == 5.0).all()
print("went on", flush=True)
"""


def worker(daemon: Any, ns: Any, how: str) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WORKER, daemon.endpoint, ns.model, how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    return process


def test_a_client_that_stood_still_over_a_restart(daemon: Any, client: Any, ns: Any, restart: Any) -> None:
    process = worker(daemon, ns, "plain")
    process.send_signal(signal.SIGSTOP)
    restart()
    process.send_signal(signal.SIGCONT)
    assert process.communicate("\n", timeout=30)[0] == "went on\n"
    assert process.returncode == 0
    assert client.pool("default").lookup(range(8), namespace=ns).device_tokens == 8


def test_a_forked_child_holds_nothing(daemon: Any, client: Any, ns: Any, restart: Any, wait_until: Any) -> None:
    """Neither the connection nor the lifeline, of before the restart or of after: its parent's death is complete."""
    process = worker(daemon, ns, "fork")
    restart()
    wait_until(lambda: client.stats().sessions == 2, what="the worker's return")
    assert process.stdin is not None
    process.kill()
    process.wait()
    wait_until(lambda: client.stats().sessions == 1 and quiet(client), what="the worker's pages")
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "forked\n", "the child was there all the time"
    process.stdin.close()
    process.stdout.close()


def test_a_cold_start_loses_the_sequences_and_nothing_else(daemon_factory: Any) -> None:
    first = daemon_factory(supervised=True)
    with radixkv.connect(first.endpoint, timeout=20) as client:
        pool = client.pool("default")
        old = [pool.reserve(range(8)), pool.reserve(range(4))]
        first.kill()
        second = daemon_factory(supervised=True, endpoint=first.endpoint)
        for seq in old:
            with pytest.raises(radixkv.SessionLost):
                seq.commit(4)
            assert not seq.valid()
        with pool.reserve(range(8)) as seq:
            seq.commit(8)
            assert seq.valid()
            second.kill_daemon()
            second.wait_ready()
            seq.extend([1])
            assert seq.valid()
