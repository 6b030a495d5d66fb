"""``python -m bench.deaths``: how soon a dead worker's pages are back, what a survivor feels. See docs/performance.md.

A round: 64 workers (``bench/mortals.py``) hold 100,000 pages together and are killed with SIGKILL, one by one or all at
once. A survivor, in this process, does nothing but reserve, free and ask for ``stats()``: so it sees when the pins are
gone, and it feels when the daemon is busy with something else.

What a process's end takes is first of all the kernel's: the memory goes before the connection. So the time until the
last process is dead, by its pidfd, stands beside.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import radixkv
from bench import workload
from bench.mortals import NAMESPACE, PATIENCE_S, WORKER_PAGES, WORKERS
from bench.rows import Row, report, single
from bench.serving import serving
from bench.stopwatch import quiet, summarize

ROUNDS_ONE_BY_ONE, ROUNDS_AT_ONCE = 2, 4
QUIET_S = 1.0
"""In each round, before the first kill: how long the survivor's usual round trips are measured."""
AFTER_S = 0.5
"""Round trips are compared over so long from the kill of all; of one, until its pages are back."""

SURVIVOR_TOKENS = 512
POOL_PAGES = WORKERS * WORKER_PAGES + 2 * SURVIVOR_TOKENS // workload.PAGE_SIZE
POOL = f"name=default,layers=1,kv_heads=1,head_dim=8,dtype=float16,page_size={workload.PAGE_SIZE},pages={POOL_PAGES}"

GONE_BAR_MS, SURVIVOR_BAR = 100.0, 10.0


def main() -> None:
    report(rows(), sys.argv[1:])


def rows() -> Iterator[Row]:
    with ExitStack() as stack:
        daemon = stack.enter_context(serving(["--pool", POOL]))
        client = stack.enter_context(radixkv.connect(daemon.endpoint))
        stack.enter_context(quiet())
        survivor = Survivor(client)
        seeds = itertools.count()
        one, every = Deaths(together=1, after_s=0.0), Deaths(together=WORKERS, after_s=AFTER_S)
        for deaths, rounds, name in ((one, ROUNDS_ONE_BY_ONE, "one"), (every, ROUNDS_AT_ONCE, "all")):
            for _ in range(rounds):
                with mortals(daemon.endpoint, next(seeds)) as pids:
                    deaths.round(pids, survivor)
            yield from deaths.rows(name)


@contextmanager
def mortals(endpoint: str, seed: int) -> Iterator[list[int]]:
    """Process ids of workers that hold what they are to hold. All are dead in the end."""
    command = [sys.executable, "-m", "bench.mortals", endpoint, str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the workers did not get what they were to hold")
        yield json.loads(line)


class Survivor:
    """A worker that goes on. ``trips_ms``: how long each of its requests took."""

    def __init__(self, client: radixkv.Client) -> None:
        self._client = client
        self._pool = client.pool()
        self._prompt = workload.fresh(workload.generator(5), SURVIVOR_TOKENS)
        with self._pool.reserve(self._prompt, namespace=NAMESPACE) as seq:
            seq.commit(SURVIVOR_TOKENS)
        self.trips_ms: list[float] = []

    def take_trips(self) -> list[float]:
        trips, self.trips_ms = self.trips_ms, []
        return trips

    def go_on(self, until: Callable[[Any], bool]) -> float:
        """Work until ``stats()`` says so; when that was there, in monotonic seconds. Errors: RuntimeError."""
        end = time.monotonic() + PATIENCE_S
        while True:
            seq = self._timed(lambda: self._pool.reserve(self._prompt, namespace=NAMESPACE))
            self._timed(seq.free)
            snapshot = self._timed(self._client.stats)
            now = time.monotonic()
            if until(snapshot):
                return now
            if now > end:
                raise RuntimeError(f"it did not come about within {PATIENCE_S:g} s: {snapshot}")

    def go_on_until(self, end: float) -> None:
        self.go_on(lambda _: time.monotonic() >= end)

    def _timed(self, ask: Callable[[], Any]) -> Any:
        begin = time.perf_counter_ns()
        answer = ask()
        self.trips_ms.append((time.perf_counter_ns() - begin) / 1e6)
        return answer


@dataclass
class Deaths:
    """Workers killed ``together``. Of each death, from the return of ``kill()``: ``gone_ms`` to the first ``stats()``
    without anything that it, or one killed with it, had held; ``dead_ms`` to the end of the last process of them.

    ``usual_ms``, ``trips_ms``: the survivor's round trips before the first kill, and from a kill on."""

    together: int
    after_s: float
    gone_ms: list[float] = field(default_factory=list)
    dead_ms: list[float] = field(default_factory=list)
    usual_ms: list[float] = field(default_factory=list)
    trips_ms: list[float] = field(default_factory=list)

    def round(self, pids: list[int], survivor: Survivor) -> None:
        survivor.take_trips()
        survivor.go_on_until(time.monotonic() + QUIET_S)
        self.usual_ms += survivor.take_trips()
        for first in range(0, WORKERS, self.together):
            with Ends(pids[first : first + self.together]) as ends:
                killed = [_kill(pid) for pid in ends.pids]
                left = WORKERS - first - self.together
                gone = survivor.go_on(partial(holds_no_more_than, left))
                survivor.go_on_until(killed[0] + self.after_s)
                dead = ends.last()
            self.gone_ms += [1000 * (gone - at) for at in killed]
            self.dead_ms += [1000 * (dead - at) for at in killed]
            self.trips_ms += survivor.take_trips()

    def rows(self, name: str) -> Iterator[Row]:
        """Values are 99th percentiles, compared with 99th percentiles."""
        gone, dead = summarize(self.gone_ms), summarize(self.dead_ms)
        yield Row(f"deaths.{name}_gone_ms", gone.p99, "ms", dead.p99, GONE_BAR_MS, gone.n, gone.p50, gone.p99)
        usual, trips = summarize(self.usual_ms), summarize(self.trips_ms)
        bar = SURVIVOR_BAR * usual.p99
        yield Row(f"deaths.{name}_survivor_ms", trips.p99, "ms", usual.p99, bar, trips.n, trips.p50, trips.p99)
        yield single(f"deaths.{name}_survivor_worst_ms", "ms", max(self.trips_ms), reference=max(self.usual_ms))


class Ends:
    """Notes when the last of these processes ends: in a thread that sleeps until then."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self._fds = [os.pidfd_open(pid) for pid in pids]
        self._at = 0.0
        self._thread = threading.Thread(target=self._wait)

    def __enter__(self) -> Ends:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.join()
        for fd in self._fds:
            os.close(fd)

    def last(self) -> float:
        """In monotonic seconds. Waits for it."""
        self._thread.join()
        return self._at

    def _wait(self) -> None:
        for fd in self._fds:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll()
        self._at = time.monotonic()


def _kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def holds_no_more_than(workers: int, snapshot: Any) -> bool:
    """Besides the survivor so many workers are there, and no page is held but theirs."""
    pool = snapshot.pools["default"]
    held = pool.total_pages - pool.pages["free"] - pool.evictable_pages
    return bool(snapshot.sessions <= workers + 1 and held <= workers * WORKER_PAGES)


if __name__ == "__main__":
    main()
