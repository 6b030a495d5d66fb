"""Histories with real processes: workers answer with a toy model while they, and the daemon, are killed and stopped.

Every output is compared with what the model gives without any cache; a document that this process holds all the time
has to be found by every request, before and after each fault. Orders and faults come from a seed, which names the test;
what they meet is up to the machine. Other seeds: RADIXKV_HISTORY_SEEDS=2,3,4.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import radixkv
from tests.conftest import process_state, wait_until
from tests.integration.toy import SPEC, VOCABULARY, reference
from tests.integration.toy_worker import KINDS, TIMEOUT_S, Answer, Order, Tally, live

SEEDS = [int(seed) for seed in os.environ.get("RADIXKV_HISTORY_SEEDS", "1").split(",")]
WORKERS = 4
PAGES = 88
HOT_TOKENS = 48
"""Of the document that is always held: 12 pages."""


class Fault(NamedTuple):
    daemon: str = ""
    """"killed", "killed twice" (the next one as soon as it is ready), "killed early" (the next one while it starts)."""
    worker: signal.Signals | None = None
    long: bool = False
    """When the stopped worker goes on, all pages that can be evicted have been, and are others'. Unless its daemon was
    killed, its session is revoked by then."""


FAULTS = {
    Fault("killed"): 10,
    Fault("killed twice"): 3,
    Fault("killed early"): 3,
    Fault("killed", signal.SIGKILL): 6,
    Fault(worker=signal.SIGKILL): 20,
    Fault(worker=signal.SIGSTOP): 7,
    Fault(worker=signal.SIGSTOP, long=True): 2,
    Fault("killed", signal.SIGSTOP, long=True): 2,
}
"""How often each comes, in random order."""
START_S = 0.6
"""About as long as a daemon takes to start."""
KILLS_MIN, RESUMED_MIN = 50, 20
STOPPED_FOR_FAULTS = 6
"""A stopped worker goes on after 1 to 6 more faults; its lease is over by then, or is not."""
SILENCE_S = 90.0
RETURN_S = 20.0
LOG_SHOWN = 4000


@dataclass
class Worker:
    process: Any
    pipe: Any
    order: Order
    hot: bool
    since: int
    """The number of faults there had been when it got its order."""
    stopped_until: int = 0

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@dataclass
class History:
    """What happens, and what has been seen. ``seen`` counts everything, for the messages of failures."""

    rng: random.Random
    """Of orders; faults have another one, so that the schedule does not depend on who is done first."""
    dice: random.Random
    daemon: Any
    client: radixkv.Client
    context: Any
    documents: list[list[int]]
    workers: list[Worker] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    tickets: list[Order] = field(default_factory=list)
    faults: int = 0
    hits: Counter[int] = field(default_factory=Counter)
    """Per number of faults so far: orders given after that fault whose prompt was found cached."""
    killed: set[int] = field(default_factory=set)
    """Process ids of daemons."""
    stop_next: bool = False
    """The next order that can be is given to somebody who stops in the middle of it."""

    # -- work -----------------------------------------------------------------------------------------------------

    def order(self) -> tuple[Order, bool]:
        if self.tickets:
            return self.tickets.pop(), False
        rng = self.rng
        hot = rng.random() < 0.5
        document = self.documents[0] if hot else rng.choice(self.documents[1:])
        whole = hot or rng.random() < 0.7
        prompt = document if whole else document[: rng.randrange(1, len(document))]
        question = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 9))]
        kind = rng.choice(KINDS)
        return Order(kind, [*prompt, *question], rng.randrange(4, 25), rng.randrange(VOCABULARY)), hot

    def hire(self, order: Order, hot: bool) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=live, args=(self.daemon.endpoint, theirs), daemon=True)
        process.start()
        theirs.close()
        ours.send(order)
        self.workers.append(Worker(process, ours, order, hot, self.faults))

    def work(self, messages: int) -> None:
        """Until there was a hit since the last fault, and so many messages came."""
        while messages > 0 or not self.hits[self.faults]:
            messages -= self.receive(give_orders=True)

    def receive(self, give_orders: bool) -> int:
        busy = [worker.pipe for worker in self.workers if worker.order is not None and not worker.stopped_until]
        ready = wait(busy, SILENCE_S)
        assert ready, f"nobody said anything for {SILENCE_S} s"
        for worker in [worker for worker in self.workers if worker.pipe in ready]:
            try:
                kind, *what = worker.pipe.recv()
            except EOFError:
                worker.process.join(RETURN_S)
                raise AssertionError(f"a worker ended with {worker.process.exitcode} at {worker.order}") from None
            self.note(worker, kind, what)
            if kind in ("done", "handed"):
                worker.order = None
                if give_orders:
                    self.give_order(worker)
        return len(ready)

    def give_order(self, worker: Worker) -> None:
        worker.order, worker.hot = self.order()
        worker.since = self.faults
        if self.stop_next and not worker.hot and worker.order.kind != "adopt":
            worker.order.stops = True
            self.stop_next = False
        worker.pipe.send(worker.order)

    def note(self, worker: Worker, kind: str, what: list[Any]) -> None:
        self.seen[kind] += 1
        order = worker.order
        if kind == "cached":
            (cached,) = what
            if worker.hot:
                assert cached >= HOT_TOKENS, f"{cached} tokens of the document that is held were found: {order}"
            if cached:
                self.hits[worker.since] += 1
        elif kind == "handed":
            ticket, tokens, tally = what
            self.compare(order.prompt, tokens)
            self.tickets.append(Order("adopt", tokens, len(order.prompt) + order.count - len(tokens), ticket))
            self.seen.update(tally)
        elif kind == "done":
            outputs, tally = what
            for given, tokens in outputs:
                self.compare(given, tokens)
            self.seen.update(tally)

    def compare(self, given: list[int], tokens: list[int]) -> None:
        self.seen["compared"] += 1
        assert tokens == reference(given, len(tokens) - len(given)), f"a wrong output to {given}"

    # -- faults ---------------------------------------------------------------------------------------------------

    def fault(self, fault: Fault) -> None:
        self.await_start()
        victim = self.stop_amid() if fault.long else self.dice.choice(self.running())
        if fault.daemon:
            self.kill_daemon(self.daemon.pid)
        if fault.daemon == "killed twice":
            self.await_start()
            self.kill_daemon(self.daemon.pid)
        elif fault.daemon == "killed early":
            wait_until(self.next_daemon, RETURN_S, "the next daemon's process")
            time.sleep(self.dice.uniform(0.0, START_S))  # a random moment of its start; nobody waits for anything
            self.kill_daemon(self.next_daemon())
        if fault.worker == signal.SIGKILL:
            self.kill(victim)
        elif fault.worker == signal.SIGSTOP and not fault.long and len(self.running()) > 1:
            victim.send(signal.SIGSTOP)
            victim.stopped_until = self.faults + 1 + self.dice.randrange(1, STOPPED_FOR_FAULTS + 1)
        self.seen["stops"] += fault.worker == signal.SIGSTOP
        self.faults += 1
        if fault.long:
            if not fault.daemon:
                self.revoke()
            self.evict()
            self.go_on(victim)
        for worker in self.workers:
            if worker.stopped_until and worker.stopped_until <= self.faults:
                self.go_on(worker)

    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.stopped_until]

    def stop_amid(self) -> Worker:
        """A worker that has stopped itself while it had pages and was about to use them."""
        self.stop_next = True
        while self.stop_next:
            self.receive(give_orders=True)
        (victim,) = [worker for worker in self.running() if worker.order.stops]
        victim.stopped_until = sys.maxsize
        wait_until(lambda: process_state(victim.process.pid) == "T", SILENCE_S, "the worker's stop")
        return victim

    def revoke(self) -> None:
        """Ask for all pages there are until the stopped worker has to give way."""
        before, pool = self.count("revoked_sessions"), self.client.pool()
        while self.count("revoked_sessions") == before:
            try:
                pool.reserve([], headroom_tokens=(PAGES * pool.page_size - HOT_TOKENS), timeout=0.2).free()
                break  # it held nothing
            except radixkv.OutOfPages:
                continue
        self.seen["revoked"] += self.count("revoked_sessions") - before

    def evict(self) -> None:
        """Work until every page that nobody holds has been given to somebody else."""
        enough = self.count("evicted_pages") + PAGES
        while self.count("evicted_pages") < enough:
            self.work(1)

    def count(self, what: str) -> int:
        return int(self.client.stats().counters[what])

    def kill_daemon(self, pid: int) -> None:
        """Returns when it is dead."""
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            assert wait([pidfd], RETURN_S)
        finally:
            os.close(pidfd)
        self.killed.add(pid)
        self.seen["daemon kills"] += 1

    def next_daemon(self) -> int:
        """The keeper's child, unless it is one that was killed: 0."""
        keeper = self.daemon.keeper_pid
        pids = map(int, Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())
        return next((pid for pid in pids if pid not in self.killed), 0)

    def kill(self, worker: Worker) -> None:
        """Its order is given to a new one."""
        worker.send(signal.SIGKILL)
        worker.process.join(RETURN_S)
        assert worker.process.exitcode == -signal.SIGKILL
        worker.pipe.close()
        self.workers.remove(worker)
        self.seen["worker kills"] += 1
        self.hire(worker.order, worker.hot)

    def go_on(self, worker: Worker) -> None:
        worker.send(signal.SIGCONT)
        worker.order.stops = False
        worker.stopped_until = 0

    def await_start(self) -> None:
        """Until the present daemon is one that has not been killed."""
        cache_id = self.daemon.ready["cache_id"]
        while self.daemon.pid in self.killed:
            assert self.daemon.wait_ready()["cache_id"] == cache_id, "a cold start: a daemon found a bug in itself"

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everybody ends his order, and then ends."""
        for worker in self.workers:
            if worker.stopped_until:
                self.go_on(worker)
        while any(worker.order is not None for worker in self.workers):
            self.receive(give_orders=False)
        for worker in self.workers:
            worker.pipe.send(None)
            worker.process.join(RETURN_S)
            assert worker.process.exitcode == 0
            worker.pipe.close()
        self.workers.clear()
        self.await_start()

    def end(self) -> None:
        """Whatever happened before. What is printed is shown when something failed."""
        print(f"after {self.faults} faults: {dict(self.seen)}\n{self.daemon.stderr()[-LOG_SHOWN:]}")
        for worker in self.workers:
            worker.process.kill()
            worker.process.join(RETURN_S)
            worker.pipe.close()


@pytest.fixture(scope="module")
def forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.toy_worker", "radixkv.client.sync"])
    return context


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed {seed}")
def history(request: Any, daemon_factory: Any, forks: Any) -> Iterator[History]:
    rng, dice = random.Random(f"orders/{request.param}"), random.Random(f"faults/{request.param}")
    daemon = daemon_factory(
        supervised=True, pools=[{**SPEC, "pages": PAGES}], lease_s=1.5, heartbeat_s=0.1, resume_timeout_s=1.0
    )
    lengths = [HOT_TOKENS] + [rng.randrange(20, 61) for _ in range(9)]
    documents = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    with radixkv.connect(daemon.endpoint, timeout=TIMEOUT_S) as client:
        made = History(rng, dice, daemon, client, forks, documents)
        yield made
        made.end()


def test_every_output_is_that_of_an_undisturbed_run(history: History) -> None:
    daemon, client, dice = history.daemon, history.client, history.dice
    holder = Answer(client.pool(), history.documents[0], Tally())
    holder.publish()
    daemon.kill_daemon()
    daemon.wait_ready()
    assert holder.seq.valid() and client.stats().sessions == 1
    before = open_files(daemon.keeper_pid), open_files(daemon.pid)

    for _ in range(WORKERS):
        history.hire(*history.order())
    schedule = [fault for fault, times in FAULTS.items() for _ in range(times)]
    dice.shuffle(schedule)
    history.work(20)
    for fault in schedule:
        history.fault(fault)
        history.work(dice.randrange(1, 16))
    history.finish()

    assert [number for number in range(len(schedule) + 1) if not history.hits[number]] == []
    assert history.seen["daemon kills"] + history.seen["worker kills"] >= KILLS_MIN, history.seen
    assert history.seen["resumed"] >= RESUMED_MIN, history.seen
    assert history.seen["revoked"] >= 1, history.seen
    wait_until(lambda: client.stats().sessions == 1, RETURN_S, "the end of all workers' sessions")
    for document in history.documents:  # whatever is cached now is right
        again = Answer(client.pool(), document, Tally())
        again.decode(len(document) + 4, lambda _: None)
        again.close()
        history.compare(document, again.tokens)
    assert holder.seq.valid()
    holder.decode(HOT_TOKENS + 4, lambda _: None)
    history.compare(history.documents[0], holder.tokens)
    holder.close()
    wait_until(lambda: client.stats().in_transit == 0, RETURN_S, "the end of all tickets")
    wait_until(lambda: idle(client), RETURN_S, "the return of all pages")
    assert (open_files(daemon.keeper_pid), open_files(daemon.pid)) == before
    client.close()
    assert daemon.stop() == 0
    assert process_state(daemon.pid) == ""
    assert sorted(os.listdir(daemon.directory)) == ["stderr"]


def idle(client: radixkv.Client) -> bool:
    stats = client.stats()
    pool = stats.pools["default"]
    assert sum(pool.pages.values()) == PAGES
    states = {state for state, pages in pool.pages.items() if pages}
    return states <= {"free", "cached"} and pool.sequences == stats.queued == 0


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
