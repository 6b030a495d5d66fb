"""Many threads of one client while its daemon is paused, killed, drained and the process forks: nothing hangs, nothing
is left behind."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

import radixkv

THREADS = 4


class LateEvent:
    """Done a few milliseconds after it was made, like device work."""

    def __init__(self, after_s: float) -> None:
        self.at = time.monotonic() + after_s

    def query(self) -> bool:
        return time.monotonic() >= self.at

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.monotonic()))


class Worker(threading.Thread):
    """Does what comes to its mind until told to stop; errors of the contract are part of life."""

    def __init__(self, pool: Any, seed: int, seen: Counter[str]) -> None:
        super().__init__(daemon=True)
        self.pool = pool
        self.random = random.Random(seed)
        self.seen = seen
        self.stopping = False
        self.wrong: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping:
                try:
                    self.live_a_sequence()
                except radixkv.RadixKVError as error:
                    self.seen[error.code] += 1
        except BaseException as error:  # noqa: BLE001 - the test reports it
            self.wrong = error

    def live_a_sequence(self) -> None:
        tokens = self.random.choices([0, 1], k=self.random.randrange(20))
        with self.pool.reserve(tokens, timeout=self.random.choice([None, 0.1])) as seq:
            for _ in range(self.random.randrange(6)):
                self.do_something(seq)
                self.seen["operations"] += 1

    def do_something(self, seq: Any) -> None:
        after = LateEvent(0.01 * self.random.random()) if self.random.random() < 0.5 else None
        match self.random.randrange(6):
            case 0:
                seq.extend([1] * self.random.randrange(5), headroom_tokens=self.random.randrange(4))
            case 1:
                seq.commit(seq.length, after=after)
            case 2:
                seq.truncate(self.random.randrange(seq.length + 1), after=after)
            case 3:
                for child in seq.share(count=self.random.randrange(3)):
                    child.free()
            case 4:
                self.pool.adopt(seq.handoff()).free()
            case 5:
                self.pool.step(extend={seq: [1]}, commit={seq: (seq.length, after)})


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_storm(daemon_factory: Any, wait_until: Any) -> None:
    daemon = daemon_factory(pools=[{"pages": 64}], heartbeat_s=0.05)
    client = radixkv.connect(daemon.endpoint, timeout=1.0)
    pool = client.pool("default")
    seen: Counter[str] = Counter()
    workers = [Worker(pool, seed, seen) for seed in range(THREADS)]
    for worker in workers:
        worker.start()

    def some_work() -> None:
        goal = seen["operations"] + 100
        wait_until(lambda: seen["operations"] >= goal, timeout=30, what="work")

    some_work()
    daemon.pause()
    wait_until(lambda: seen["timeout"] >= THREADS, what="timeouts")
    daemon.resume()
    some_work()
    child = os.fork()
    if child == 0:
        try:
            pool.reserve([1])
        except radixkv.Forked:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    some_work()
    daemon.kill()
    daemon = daemon_factory(pools=[{"pages": 64}], endpoint=daemon.endpoint, heartbeat_s=0.05)
    some_work()
    assert daemon.stop() == 0
    daemon = daemon_factory(pools=[{"pages": 64}], endpoint=daemon.endpoint, heartbeat_s=0.05)
    some_work()
    for worker in workers:
        worker.stopping = True
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
        assert worker.wrong is None, worker.wrong

    def nothing_left() -> bool:
        stats = client.stats()
        idle = (stats.pools["default"].sequences, stats.queued, stats.in_transit) == (0, 0, 0)
        return idle and not stats.pools["default"].pages.private

    wait_until(nothing_left, what="the return of all pages")
    assert client.stats().sessions == 1
    client.close()
