"""How things are timed: garbage collection off, medians of many, another process's CPU time by its own clock.

Two runs on a shared machine differ by more than most changes do. So whatever is compared is measured in one run, in
turns (``rounds`` of each), and ratios are taken within a round.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Summary:
    """Of ``n`` measurements, in the unit they came in."""

    n: int
    p50: float
    p99: float

    def scaled(self, factor: float) -> Summary:
        return Summary(self.n, self.p50 * factor, self.p99 * factor)


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """The smallest value that at least ``fraction`` of the measurements do not exceed. ``ordered`` ascends."""
    if not ordered:
        raise ValueError("no measurement, no percentile")
    rank = -(-len(ordered) * fraction // 1)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


def summarize(measured: Iterable[float]) -> Summary:
    ordered = sorted(measured)
    return Summary(len(ordered), percentile(ordered, 0.50), percentile(ordered, 0.99))


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside: what exists is frozen, what comes is not looked for."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextmanager
def on_cpu(cpu: int) -> Iterator[None]:
    """This thread, and all threads and processes begun inside, run on this CPU.

    Who wakes whom on which CPU costs more than most of what is measured between processes (a bare echo: 15 us a message
    if both ends are on one CPU, 50 and more if not), and left alone it changes from minute to minute.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def two_cpus() -> tuple[int, int]:
    """For a server and its client: two CPUs if this process may use two, else the same twice."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


def time_each(work: Callable[[Item], object], items: Iterable[Item]) -> list[int]:
    """Nanoseconds that ``work`` takes, one an item. What is done between items (a generator's code) is not counted."""
    clock = time.perf_counter_ns
    measured = []
    for item in items:
        begin = clock()
        work(item)
        measured.append(clock() - begin)
    return measured


def process_cpu_clock(pid: int) -> int:
    """The id of the clock of CPU time (all threads, user and system) that process ``pid`` has used.

    Linux makes it from the pid: its complement, shifted by three, and 2 for the scheduler's nanosecond count.
    """
    return (~pid << 3) | 2


def process_cpu_s(pid: int) -> float:
    """CPU seconds process ``pid`` has used so far, at nanosecond resolution."""
    return time.clock_gettime(process_cpu_clock(pid))


def process_cpu_ns(pid: int) -> int:
    return time.clock_gettime_ns(process_cpu_clock(pid))
