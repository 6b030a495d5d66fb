"""``python -m bench.copy``: the copier beside one numpy copy, and what a daemon's clients feel of it.

See docs/performance.md. The arenas are memfds, mapped here too. Pages are scattered, so that no two of them go as one.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

import radixkv
from bench.clean import clean_row
from bench.early import early_rows
from bench.ipc import reserve_and_free
from bench.rows import Row, report, single
from bench.rows import row as median_row
from bench.serving import SMALL_POOL, serving
from bench.stopwatch import percentile, quiet, summarize
from radixkv.commands import Copy, CopyDone
from radixkv.device import arena
from radixkv.device.copier import ProcessCopier
from radixkv.device.copier_process import PoolTiers
from radixkv.device.copying import behave

PAGE_BYTES = {"700k": 737_280, "4m": 4 * 2**20}
"""A page of 16 tokens of SmolLM2-135M in float32, and a large one."""
LAYERS = {"700k": 30, "4m": 32}
DIRECTIONS = {"d2h": True, "h2d": False}

ARENA_BYTES = 256 * 2**20
"""Enough for one copy of it to be as fast as any: beyond three quarters of the last cache glibc copies past it."""
ROUNDS = 40
BUDGET_S = 5.0
"""For the rounds of one row, fewer of them on a machine that is busy."""
LAYERS_BUDGET_S = 1.5
RATIO_BAR, CONTROL_BAR = 0.85, 2.0

CONTROL_ARENA_BYTES = 64 * 2**20
CONTROL_PAGE_BYTES = PAGE_BYTES["700k"]
PROMPT_TOKENS = 2_048
CONTROL_ROUNDS, PAIRS = 15, 150
IN_FLIGHT = 4
"""Copies of a quarter of the arena, each direction: it never has nothing to do."""


def main() -> None:
    report(rows(), sys.argv[1:])


def rows() -> Iterator[Row]:
    made = [row for size in PAGE_BYTES for row in throughput(size)]
    yield from made
    for direction in DIRECTIONS:
        worse = min((row for row in made if direction in row.name), key=lambda row: row.value)
        yield replace(worse, name=f"copy.{direction}_ratio", bar=RATIO_BAR, at_least=True)
    yield from map(by_layer, PAGE_BYTES)
    yield from early_rows()
    yield clean_row()
    yield from control()


# -- throughput ---------------------------------------------------------------------------------------------------


@dataclass
class Arenas:
    """One pool of two arenas of equal size, and a copier that knows it as "default"."""

    device: NDArray[np.uint8]
    host: NDArray[np.uint8]
    copier: ProcessCopier
    order: NDArray[np.int32] = field(init=False)
    """Where page i goes."""

    def __post_init__(self) -> None:
        self.order = np.random.default_rng(5).permutation(len(self.device)).astype("<i4")

    def batch(self, copy: int, pages: slice, to_host: bool) -> Copy:
        sources, targets = np.arange(len(self.device), dtype="<i4")[pages], self.order[pages]
        return Copy(copy, "default", sources.tobytes(), targets.tobytes(), to_host)


@contextmanager
def arenas(arena_bytes: int, page_bytes: int, layers: int = 1) -> Iterator[Arenas]:
    size = arena_bytes - arena_bytes % page_bytes
    with ExitStack() as stack:
        views, fds = [], []
        for number in (1, 2):
            fds.append(arena.create("bench", size))
            stack.callback(os.close, fds[-1])
            views.append(np.frombuffer(arena.map_shared(fds[-1], size), np.uint8).reshape(-1, page_bytes))
            views[-1][:] = number
        tiers = PoolTiers(page_bytes, fds[:1], fds[1:], layers=layers, layer_bytes=page_bytes // layers)
        copier = ProcessCopier({"default": tiers})
        stack.callback(copier.close)
        yield Arenas(views[0], views[1], copier)


def throughput(size: str) -> Iterator[Row]:
    """The same bytes between the same arenas, in turns: one numpy copy here, then page by page there, from the call of
    ``submit`` until ``completions`` says that they have arrived.

    The value compares the fastest rounds, for other work on the machine only ever adds; p50 and p99 are of the rounds'
    ratios. The thread that copies here is as nice as the copier's, so that both have to wait alike.
    """
    with ExitStack() as stack:
        memory = stack.enter_context(arenas(ARENA_BYTES, PAGE_BYTES[size]))
        stack.enter_context(quiet())
        for direction, to_host in DIRECTIONS.items():
            nice = stack.enter_context(ThreadPoolExecutor(1, initializer=behave))
            source, target = (memory.device, memory.host) if to_host else (memory.host, memory.device)
            everything = memory.batch(0, slice(None), to_host)
            ones, ours = [], []
            for _ in rounds(1 + ROUNDS):
                ones.append(nice.submit(seconds, lambda: np.copyto(target, source)).result())  # noqa: B023 - at once
                source[:, 0] += 1
                ours.append(seconds(lambda: copy_now(memory.copier, everything)))  # noqa: B023
                if not np.array_equal(target[memory.order, 0], source[:, 0]):
                    raise RuntimeError("the pages did not arrive")
            ratios = summarize(one / our for one, our in zip(ones[1:], ours[1:], strict=True))
            yield replace(median_row(f"copy.{direction}_ratio_{size}", "x", ratios), value=min(ones) / min(ours))


def by_layer(size: str) -> Row:
    """The same load layer by layer, and page by page, in turns: as ``throughput``, the fastest of each."""
    with arenas(ARENA_BYTES, PAGE_BYTES[size], LAYERS[size]) as memory, quiet():
        whole = memory.batch(0, slice(None), to_host=False)
        layered = structs.replace(whole, by_layer=True)
        pages, layers = [], []
        for _ in rounds(1 + ROUNDS, LAYERS_BUDGET_S):
            pages.append(seconds(lambda: copy_now(memory.copier, whole)))
            memory.host[:, 0] += 1
            layers.append(seconds(lambda: copy_now(memory.copier, layered)))
            if not np.array_equal(memory.device[memory.order, 0], memory.host[:, 0]):
                raise RuntimeError("the pages did not arrive")
    ratios = summarize(one / other for one, other in zip(pages[1:], layers[1:], strict=True))
    return replace(median_row(f"copy.by_layer_ratio_{size}", "x", ratios), value=min(pages) / min(layers))


def rounds(most: int, budget_s: float = BUDGET_S) -> Iterator[int]:
    """As many as there is time for, at least two."""
    begin = time.monotonic()
    for number in range(most):
        if number < 2 or time.monotonic() - begin < budget_s:
            yield number


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def copy_now(copier: ProcessCopier, copy: Copy) -> None:
    copier.submit(copy)
    while not ended(copier, wait=True):
        pass


def ended(copier: ProcessCopier, *, wait: bool = False) -> list[int]:
    """The copies that have ended since the last call. Errors: RuntimeError if one has failed."""
    if wait:
        select.select([copier], [], [])
    ends = [said for said in copier.completions() if isinstance(said, CopyDone)]
    if not all(end.ok for end in ends):
        raise RuntimeError("a copy failed")
    return [end.copy for end in ends]


# -- control ------------------------------------------------------------------------------------------------------


def control() -> Iterator[Row]:
    """Reserve and free of a cached prompt, by a client of a real daemon, in turns with and without a busy copier.

    The daemon has no second tier to copy to, so the copier works on arenas of its own: it takes the same CPUs and the
    same memory bandwidth, but the daemon has no ends of copies to deal with.
    """
    with ExitStack() as stack:
        daemon = stack.enter_context(serving(["--pool", SMALL_POOL]))
        client = stack.enter_context(radixkv.connect(daemon.endpoint))
        ask = reserve_and_free(client.pool("default"), PROMPT_TOKENS)
        memory = stack.enter_context(arenas(CONTROL_ARENA_BYTES, CONTROL_PAGE_BYTES))
        stack.enter_context(quiet())
        idle: list[float] = []
        busy: list[float] = []
        for _ in rounds(CONTROL_ROUNDS, 2 * BUDGET_S):
            idle += [1e6 * seconds(lambda: ask(i)) for i in range(PAIRS)]  # noqa: B023
            busy += while_copying(memory, ask)
    idle.sort()
    busy.sort()
    before, during = percentile(idle, 0.99), percentile(busy, 0.99)
    yield replace(median_row("copy.control_us", "us", summarize(busy)), reference=percentile(idle, 0.5))
    yield Row("copy.control_p99_us", during, "us", before, None, len(busy), percentile(busy, 0.5), during)
    yield single("copy.control_p99_ratio", "x", during / before, CONTROL_BAR)


def while_copying(memory: Arenas, ask: Callable[[int], None]) -> list[float]:
    """us a pair of round trips. Copies that end are submitted again between them."""
    pages = len(memory.device)
    quarters = [slice(at * pages // IN_FLIGHT, (at + 1) * pages // IN_FLIGHT) for at in range(IN_FLIGHT)]
    ways = [(quarter, to_host) for to_host in DIRECTIONS.values() for quarter in quarters]
    copies = [memory.batch(number, *way) for number, way in enumerate(ways)]
    for copy in copies:
        memory.copier.submit(copy)
    measured, running = [], len(copies)
    for i in range(PAIRS):
        measured.append(1e6 * seconds(lambda: ask(i)))  # noqa: B023
        for number in ended(memory.copier):
            memory.copier.submit(copies[number])
    while running:
        running -= len(ended(memory.copier, wait=True))
    return measured


if __name__ == "__main__":
    main()
