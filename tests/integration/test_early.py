"""Sequences that are there before their pages are: a real daemon, its copier, and every byte looked at.

A page has three layers of 256 KiB: the copier brings two of them, and then the last. Every word of a page's layer is
the same number, which no other page or layer has. The daemon recounts its invariants after each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

import radixkv
import radixkv.aio
from tests.integration.test_host_tier import copier_of, copiers, counters, figures, stop_process, tiered  # noqa: F401

SPEC = {"layers": 3, "kv_heads": 8, "head_dim": 128, "page_size": 32, "dtype": "float32"}
PAGE_TOKENS, LAYERS = 32, 3
NAMESPACE, FILLER = radixkv.Namespace("early"), radixkv.Namespace("filler")
END_S = 60.0


def document(number: int, pages: int = 4) -> list[int]:
    return [10_000 * number + n for n in range(PAGE_TOKENS * pages)]


def word(tokens: Any, page: int, layer: int) -> int:
    return int(tokens[page * PAGE_TOKENS]) * 8 + layer + 1


def write(seq: Any) -> None:
    """Compute what is not cached, and say so."""
    rows = seq.memory._rows
    for page in range(seq.writable_from_tokens // PAGE_TOKENS, len(seq.page_table)):
        for layer in range(LAYERS):
            rows[seq.page_table[page], layer] = word(seq.tokens, page, layer)
    seq.commit(seq.length)


def check(seq: Any, layers: Any = range(LAYERS), pages: Any = None) -> None:
    """All bytes of these layers, of all pages that need not be computed."""
    rows, tokens = seq.memory._rows, seq.tokens
    for page in range(seq.writable_from_tokens // PAGE_TOKENS) if pages is None else pages:
        for layer in layers:
            found = rows[seq.page_table[page], layer]
            assert (found == np.uint32(word(tokens, page, layer))).all(), f"layer {layer} of page {page}"


def compute(pool: Any, *numbers: int) -> None:
    for number in numbers:
        with pool.reserve(document(number), namespace=NAMESPACE) as seq:
            write(seq)


def early(pool: Any, number: int, **how: Any) -> Any:
    return pool.reserve([*document(number), 7], namespace=NAMESPACE, wait_loaded=False, **how)


@pytest.fixture
def cold(tiered: Any) -> Any:  # noqa: F811
    """A daemon with 12 pages, all free, and its pool; documents 0 to 2 are in the host tier alone."""

    def start(**options: Any) -> tuple[Any, Any]:
        daemon, pool = tiered(**SPEC, pages=12, host_pages=24, reclaim_pages=0, **options)
        compute(pool, 0, 1, 2)
        pool.reserve(document(9, pages=12), namespace=FILLER).free()
        pool.invalidate(FILLER)
        assert pool.lookup(document(0), namespace=NAMESPACE).host_tokens == 4 * PAGE_TOKENS
        assert figures(pool).pages.free == 12
        return daemon, pool

    return start


def test_a_hit_on_host_pages_answers_before_the_copy_has_ended(cold: Any, wait_until: Any) -> None:
    daemon, pool = cold()
    stop_process(pid := copier_of(daemon), wait_until)
    seq = early(pool, 0)
    assert seq.loading == (0, 1, 2, 3) and seq.cached_tokens == 4 * PAGE_TOKENS
    os.kill(pid, signal.SIGCONT)
    for layer in range(LAYERS):
        seq.wait_loaded(layer)
        check(seq, [layer])
    seq.wait_loaded()
    assert seq.loading == ()
    check(seq)
    write(seq)
    seq.free()


def test_a_copier_that_is_killed_in_the_middle_is_noticed_by_nobody(cold: Any, wait_until: Any) -> None:
    """The load is begun again by the next one. A second sequence has joined meanwhile, and others have waited."""
    daemon, pool = cold()
    stop_process(pid := copier_of(daemon), wait_until)
    seq, other = early(pool, 0), early(pool, 0)
    assert seq.loading == other.loading == (0, 1, 2, 3)
    assert seq.page_table[:4].tolist() == other.page_table[:4].tolist()
    os.kill(pid, signal.SIGKILL)
    for layer in range(LAYERS):
        seq.wait_loaded(layer, timeout_s=END_S)
        check(seq, [layer])
    write(seq)
    seq.free()
    other.wait_loaded()
    check(other)
    assert seq.loading == other.loading == () and other.valid()
    other.free()
    assert pool.lookup(document(0), namespace=NAMESPACE).device_tokens == 4 * PAGE_TOKENS
    seen = counters(pool)
    assert (seen.copier_deaths, seen.failed_copies, seen.unknown_copies) == (1, 1, 0)
    assert copier_of(daemon) != pid


def test_a_wait_that_is_cancelled_leaves_the_daemons_line(cold: Any, wait_until: Any) -> None:
    """And the sequence is as it was: it can be waited for again."""
    daemon, _ = cold()
    stop_process(pid := copier_of(daemon), wait_until)

    async def wait_twice() -> None:
        async with await radixkv.aio.connect(daemon.endpoint) as client:
            there = await client.pool()
            seq = await there.reserve([*document(0), 7], namespace=NAMESPACE, wait_loaded=False)
            waiting = asyncio.create_task(seq.wait_loaded())
            while (await client.stats()).queued != 1:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            while (await client.stats()).queued:
                await asyncio.sleep(0)
            assert seq.loading == (0, 1, 2, 3)
            os.kill(pid, signal.SIGCONT)
            await seq.wait_loaded(timeout_s=END_S)
            check(seq)
            await seq.free()

    asyncio.run(asyncio.wait_for(wait_twice(), END_S))


def wait_and_be_killed(endpoint: str, pipe: Any) -> None:
    """A worker that is early, says so, and waits."""
    seq = early(radixkv.connect(endpoint).pool(), 0)
    pipe.send(seq.loading)
    seq.wait_loaded(timeout_s=END_S)
    pipe.send("it should be dead")


def test_a_worker_that_is_killed_in_the_middle_leaves_nothing_behind(cold: Any, wait_until: Any) -> None:
    daemon, pool = cold()
    stop_process(pid := copier_of(daemon), wait_until)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=wait_and_be_killed, args=(daemon.endpoint, theirs))
    worker.start()
    assert ours.poll(END_S) and ours.recv() == (0, 1, 2, 3)
    wait_until(lambda: pool.client.stats().queued == 1, what="its wait")
    worker.kill()
    worker.join(END_S)
    wait_until(lambda: pool.client.stats().queued == 0, what="the end of its session")
    assert figures(pool).pages.loading == 4, "the copy goes on, whoever has died"
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: figures(pool).copies == 0, what="the copy's end")
    wait_until(lambda: figures(pool).pages.free == 8, what="the dead worker's pages")
    assert figures(pool).evictable_pages == 4 and figures(pool).sequences == 0
    with pool.reserve([*document(0), 7], namespace=NAMESPACE) as seq:
        assert seq.cached_tokens == 4 * PAGE_TOKENS
        check(seq)
    assert not ours.poll()


def test_the_daemon_dies_while_pages_are_loading(cold: Any, wait_until: Any) -> None:
    """Who had them has lost them, alone; the next daemon serves the prefix from the host tier, to the byte."""
    daemon, pool = cold(supervised=True)
    held = pool.reserve([*document(1), 7], namespace=NAMESPACE)
    stop_process(copier_of(daemon), wait_until)
    seq = early(pool, 0)
    assert seq.loading == (0, 1, 2, 3)
    daemon.kill_daemon()
    daemon.wait_ready()
    with pytest.raises(radixkv.SessionLost):
        seq.wait_loaded(timeout_s=END_S)
    assert not seq.valid()
    seq.free()
    check(held)
    assert held.valid()
    write(held)
    held.free()
    with pool.reserve([*document(0), 7], namespace=NAMESPACE) as again:
        assert again.cached_tokens == 4 * PAGE_TOKENS
        check(again)


@pytest.mark.long
def test_a_daemon_that_dies_after_the_load_has_ended_takes_nothing_away(cold: Any, wait_until: Any) -> None:
    """Although the worker has never asked whether it had."""
    daemon, pool = cold(supervised=True)
    seq = early(pool, 0)
    with radixkv.connect(daemon.endpoint) as other:
        wait_until(lambda: other.stats().pools["default"].copies == 0, what="the copy's end")
    daemon.kill_daemon()
    daemon.wait_ready()
    seq.wait_loaded(1, timeout_s=END_S)
    assert seq.loading == ()
    check(seq)
    write(seq)
    assert seq.valid()
    seq.free()


@pytest.mark.long
def test_a_load_that_fails_for_good_is_a_typed_error_of_who_had_its_pages(cold: Any, wait_until: Any) -> None:
    """Copiers are killed as fast as they come, for longer than the daemon is patient."""
    daemon, pool = cold()
    other = pool.reserve([*document(1), 7], namespace=NAMESPACE)
    stop_process(copier_of(daemon), wait_until)
    seq = early(pool, 0)
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.001):
            for pid in copiers(daemon.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(radixkv.CopyFailed):
            seq.wait_loaded(timeout_s=END_S)
    finally:
        over.set()
        killer.join()
    assert not seq.valid()
    for verb in (lambda: seq.commit(1), seq.share, lambda: seq.truncate(1), lambda: seq.extend([1])):
        with pytest.raises(radixkv.CopyFailed):
            verb()
    seq.free()
    check(other)
    write(other)
    other.free()
    assert figures(pool).pages.loading == 0
    assert pool.lookup(document(0), namespace=NAMESPACE).host_tokens == 4 * PAGE_TOKENS
    wait_until(lambda: pool.prefetch(document(0), namespace=NAMESPACE).device_tokens > 0, what="another copier")
