"""``python -m bench.deaths``: how soon a dead worker's pages are back, what a survivor feels. See docs/performance.md.

A round: 64 workers (``bench/mortals.py``) hold 100,000 pages together and are killed with SIGKILL, one by one or all at
once. A survivor, in this process, does nothing but reserve, free and ask for ``stats()``: so it sees when the pins are
gone, and it feels when the daemon is busy with something else.

What a process's end takes is first of all the kernel's: the memory goes before the connection. So two more times stand
beside: until the process is dead, by its pidfd; and until the last of 64 is dead that are killed while the daemon is
stopped, so that the kernel has nothing else to do.
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
from typing import IO, Any

import radixkv
from bench import workload
from bench.mortals import NAMESPACE, PATIENCE_S, WORKER_PAGES, WORKERS
from bench.rows import Row, report, row, single
from bench.serving import Serving, serving
from bench.stopwatch import quiet, summarize

ROUNDS_ONE_BY_ONE, ROUNDS_AT_ONCE, ROUNDS_ALONE = 2, 20, 5
ROUNDS_END_S = 34.0
"""No round begins later than so long after the first: a busy machine has fewer of them, and says so (``n``)."""
QUIET_S = 0.25
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
        mortals = stack.enter_context(bringing_up_mortals(daemon.endpoint))
        stack.enter_context(quiet())
        survivor = Survivor(client)
        one, every = Deaths("one", 1, after_s=0.0), Deaths("all", WORKERS, after_s=AFTER_S)
        alone_ms: list[float] = []
        end = time.monotonic() + ROUNDS_END_S
        for _ in range(ROUNDS_ONE_BY_ONE):
            one.round(next(mortals), survivor)
        yield from one.rows(summarize(one.dead_ms).p99)
        for number in range(ROUNDS_AT_ONCE):
            if number * ROUNDS_ALONE % ROUNDS_AT_ONCE < ROUNDS_ALONE:
                alone_ms.append(alone(daemon, next(mortals), survivor))
            every.round(next(mortals), survivor)
            if time.monotonic() > end:
                break
        measured = summarize(alone_ms)
        yield from every.rows(measured.p99)
        yield row("deaths.alone_ms", "ms", measured)


@contextmanager
def bringing_up_mortals(endpoint: str) -> Iterator[Iterator[list[int]]]:
    """Each ``next``: process ids of workers that hold what they are to hold; the first is their process group.

    Errors: RuntimeError.
    """
    command = [sys.executable, "-m", "bench.mortals", endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield _sets(process.stdin, process.stdout)


def _sets(asks: IO[str], answers: IO[str]) -> Iterator[list[int]]:
    for number in itertools.count():
        print(number, file=asks, flush=True)
        line = answers.readline()
        if not line:
            raise RuntimeError("the workers did not get what they were to hold")
        yield json.loads(line)


def alone(daemon: Serving, pids: list[int], survivor: Survivor) -> float:
    """Milliseconds from ``killpg()`` to the end of the last of these workers, with the daemon stopped."""
    os.kill(daemon.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.pid, os.WSTOPPED)
    try:
        with Ends(pids) as ends:
            killed = _kill_all(pids)
            dead = ends.last()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    survivor.go_on(partial(holds_no_more_than, 0))
    return 1000 * (dead - killed)


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
    """Workers killed ``together``, a kill after the other. From the call of ``kill()`` or ``killpg()``: ``gone_ms`` to
    the first ``stats()`` without anything that those killed by it had held; ``dead_ms`` to the end of the last of them.

    From the call, not from its return: the dying may run before that, for most of the time that they take.

    ``usual_ms``, ``trips_ms``: the survivor's round trips before the first kill, and from a kill on."""

    name: str
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
                killed = _kill_all(ends.pids)
                gone = survivor.go_on(partial(holds_no_more_than, WORKERS - first - self.together))
                survivor.go_on_until(killed + self.after_s)
                dead = ends.last()
            self.gone_ms.append(1000 * (gone - killed))
            self.dead_ms.append(1000 * (dead - killed))
            self.trips_ms += survivor.take_trips()

    def rows(self, beside_ms: float) -> Iterator[Row]:
        """Values are 99th percentiles, compared with 99th percentiles."""
        name, gone = self.name, summarize(self.gone_ms)
        yield Row(f"deaths.{name}_gone_ms", gone.p99, "ms", beside_ms, GONE_BAR_MS, gone.n, gone.p50, gone.p99)
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
        for fd in reversed(self._fds):  # when the last is dead most others are: this thread hardly wakes
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll()
        self._at = time.monotonic()


def _kill_all(pids: list[int]) -> float:
    """SIGKILL to one process, or to a process group by its first. When that began, in monotonic seconds."""
    kill = os.kill if len(pids) == 1 else os.killpg
    began = time.monotonic()
    kill(pids[0], signal.SIGKILL)
    return began


def holds_no_more_than(workers: int, snapshot: Any) -> bool:
    """Besides the survivor so many workers are there, and no page is held but theirs."""
    pool = snapshot.pools["default"]
    held = pool.total_pages - pool.pages["free"] - pool.evictable_pages
    return bool(snapshot.sessions <= workers + 1 and held <= workers * WORKER_PAGES)


if __name__ == "__main__":
    main()
