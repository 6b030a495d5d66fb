"""What telling routers costs the daemon's loop: a turn of it in a pool of 1,000,000 pages beside one of 16,384.

Every turn does a bounded piece (``radixkv/ipc/event_feed.py``), so a turn must not take longer in a large pool: while
all that was found at the start is told, while a namespace with all pages is invalidated, and while everything is
encoded for somebody who asks for it. No sockets, no clock: ``Feed`` alone, with events as arrays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np

from bench.rows import Row, report, row
from bench.stopwatch import Summary, quiet, summarize
from radixkv.commands import Assign, NamespaceRecord, Publish
from radixkv.config import EventsConfig, KVSpec, PoolConfig
from radixkv.ipc.event_feed import Feed, Replay
from radixkv.ipc.event_ledger import Ledger, Sizes

FEW, MANY = 16_384, 1_000_000
PAGE_SIZE, PROMPT_PAGES = 16, 256
RATIO_BAR = 3.0
PHASES = ("beginning", "invalidate", "snapshot")


def rows() -> Iterator[Row]:
    with quiet():
        few, many = turns(FEW), turns(MANY)
    for phase in PHASES:
        yield row(f"events.{phase}_turn_us", "us", many[phase])
        ratio, p99 = many[phase].p50 / few[phase].p50, many[phase].p99 / few[phase].p99
        yield Row(f"events.{phase}_1m_over_16k", ratio, "x", few[phase].p50, RATIO_BAR, many[phase].n, ratio, p99)


def turns(pages: int) -> dict[str, Summary]:
    """Times of turns in microseconds, by phase."""
    pool = PoolConfig(spec=KVSpec(layers=1, kv_heads=1, head_dim=1, page_size=PAGE_SIZE), pages=pages)
    feed = Feed(EventsConfig(endpoint="tcp://127.0.0.1:1", buffer_batches=4), pool, full(pool), 0, Sizes())
    taken = {"beginning": summarize(_until_idle(feed))}
    replay = Replay(feed, 0)
    replay.message()
    feed.turn(0.0)
    taken["snapshot"] = summarize(_until_made(replay))
    feed.take([NamespaceRecord(pool.name, 0, 2, b"")])
    taken["invalidate"] = summarize(_until_idle(feed))
    return taken


def full(pool: PoolConfig) -> Ledger:
    """A ledger of prompts in pages as they come from a pool that has been used for long: in no order."""
    ledger = Ledger(pool)
    places = np.random.default_rng(9).permutation(pool.pages).astype("<i4")
    list(ledger.fold(NamespaceRecord(pool.name, 0, 1, b"")))
    for at in range(0, pool.pages, PROMPT_PAGES):
        packed = places[at : at + PROMPT_PAGES].tobytes()
        tokens = np.arange(at * PAGE_SIZE, at * PAGE_SIZE + len(packed) // 4 * PAGE_SIZE, dtype="<u4").tobytes()
        for write in (Assign(pool.name, packed, 1, 0, 1), Publish(pool.name, packed, False, tokens)):
            list(ledger.fold(write))
    return ledger


def _until_idle(feed: Feed) -> Iterator[float]:
    while not feed.is_idle:
        began = time.perf_counter_ns()
        feed.turn(0.0)
        yield (time.perf_counter_ns() - began) / 1e3


def _until_made(replay: Replay) -> Iterator[float]:
    while True:
        began = time.perf_counter_ns()
        made = replay.message()
        yield (time.perf_counter_ns() - began) / 1e3
        if made is not None:
            return


if __name__ == "__main__":
    report(rows(), sys.argv[1:])
