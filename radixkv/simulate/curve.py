"""Hit rate against capacity: one replay for each policy and capacity, and the bound that no policy can pass."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from radixkv.errors import ConfigError
from radixkv.simulate.bound import Uses, belady_hits, next_uses
from radixkv.simulate.replay import Memory, replay
from radixkv.simulate.trace import Trace, load, name_of

BOUND = "bound"
SHARES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5)
"""Of a trace's different blocks: the capacities that are looked at unless others are asked for."""


@dataclass(frozen=True, slots=True)
class Point:
    """``policy`` may also be ``BOUND``."""

    trace: str
    policy: str
    device_blocks: int
    hits: int
    blocks: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0

    def as_json(self) -> dict[str, str | int | float]:
        return {**asdict(self), "hit_rate": round(self.hit_rate, 6)}


@dataclass(frozen=True, slots=True)
class Task:
    """One point to be found. ``trace`` counts from 0."""

    trace: int
    policy: str
    device_blocks: int


def capacities(trace: Trace, asked: Sequence[int] = ()) -> list[int]:
    """Those that are asked for, else shares of the trace's different blocks; ones too small for it are left out.

    Errors: ConfigError when none is left.
    """
    wanted = sorted(set(asked)) or sorted({int(trace.unique_blocks * share) for share in SHARES})
    large = [blocks for blocks in wanted if blocks >= max(1, trace.longest)]
    if not large and not asked:
        raise ConfigError(
            f"trace {trace.name} is too short: half of its {trace.unique_blocks} different blocks do not hold its "
            f"longest prompt, of {trace.longest}; name device_blocks yourself"
        )
    if not large:
        raise ConfigError(
            f"device_blocks = {', '.join(map(str, wanted))} is not allowed; allowed: at least {max(1, trace.longest)}, "
            f"the longest prompt of {trace.name}"
        )
    return large


def points(paths: Sequence[Path], tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Point]]:
    """Find them in ``jobs`` processes, in whatever order they come."""
    if jobs == 1:
        finder = _Finder(paths)
        yield from ((task, finder.find(task)) for task in tasks)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, _prepare, (paths,)) as pool:
        yield from _as_they_come(pool, tasks)


def _as_they_come(pool: Executor, tasks: Sequence[Task]) -> Iterator[tuple[Task, Point]]:
    running = {pool.submit(_find, task): task for task in tasks}
    try:
        for done in as_completed(running):
            yield running[done], done.result()
    finally:
        for task in running:
            task.cancel()


def names(paths: Sequence[Path]) -> list[str]:
    """What the traces are called: the file's name, or its whole path if another one is called the same."""
    short = [name_of(path) for path in paths]
    return [str(path) if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]


class _Finder:
    """Reads each trace once."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._names = names(paths)
        self._traces: dict[int, Trace] = {}
        self._uses: dict[int, Uses] = {}

    def find(self, task: Task) -> Point:
        trace = self._traces.get(task.trace)
        if trace is None:
            trace = self._traces[task.trace] = load(self._paths[task.trace])
        if task.policy == BOUND:
            if task.trace not in self._uses:
                self._uses[task.trace] = next_uses(trace)
            hits = belady_hits(trace, task.device_blocks, self._uses[task.trace])
        else:
            hits = replay(trace, Memory(task.device_blocks, policy=task.policy)).device_hits
        return Point(self._names[task.trace], task.policy, task.device_blocks, hits, trace.blocks)


_finders: list[_Finder] = []
"""One, in a process that finds points for another."""


def _prepare(paths: Sequence[Path]) -> None:
    _finders.append(_Finder(paths))


def _find(task: Task) -> Point:
    return _finders[0].find(task)
