"""Every way a worker can die, at every kind of moment: its pins come back, its pages when nobody can write to them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from radixkv.commands import (
    Adopt,
    Adopted,
    Bye,
    Commit,
    Extend,
    Failure,
    Free,
    Handoff,
    Reserve,
    Reserved,
    Step,
    Stepped,
)
from radixkv.device.descriptors import FREE, QUARANTINED
from tests.integration.doomed import LEAVES_A_PROCESS, POOL_TOKENS, TICKET, WAYS, live
from tests.integration.raw import RawWorker, tokens

END_S = 20.0
PAGES = 16

every_way = pytest.mark.parametrize("way", WAYS)


class Doomed:
    """A worker in a process of its own that has taken up a state and waits for the word to die."""

    def __init__(self, context: Any, endpoint: str, state: str, way: str) -> None:
        self.way = way
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=live, args=(endpoint, state, way, theirs))
        self.process.start()
        theirs.close()
        assert self.pipe.poll(END_S)
        assert self.pipe.recv() == "holding"
        self.left = 0
        """A process that lives on after the worker's death."""

    def die(self) -> None:
        """Returns when the worker is dead, or runs another program."""
        self.pipe.send("die")
        assert self.way in ("killed", "segfault") or self.pipe.poll(END_S)
        if self.way == "exit with a live fork":
            self.left = self.pipe.recv()
        if self.way == "exec":
            with pytest.raises(EOFError):  # closed at exec
                self.pipe.recv()
            self.left = self.process.pid
        else:
            self.process.join(END_S)
            assert self.process.exitcode == {"killed": -signal.SIGKILL, "segfault": -signal.SIGSEGV}.get(self.way, 0)

    def end(self) -> None:
        """Nothing of it lives any more."""
        if self.left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.left, signal.SIGKILL)
            self.left = 0
        self.process.kill()
        self.process.join(END_S)
        self.pipe.close()


@pytest.fixture(scope="module")
def forks() -> Any:
    """New processes begin as copies of one that has loaded everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.doomed"])
    return context


@pytest.fixture(scope="module")
def daemon(daemon_factory: Any) -> Any:
    return daemon_factory(lease_s=60.0)


@pytest.fixture
def survivor(daemon: Any, raw_worker: Callable[[str], RawWorker], wait_until: Any) -> Iterator[RawWorker]:
    """Sees to it that each test leaves everything as it found it."""
    worker = raw_worker(daemon.endpoint)
    yield worker
    wait_until(lambda: worker.stats()["sessions"] == 1, what="the end of all other sessions")
    wait_until(lambda: set(worker.pages()) <= {"free", "cached"}, what="the return of all pages")
    assert sum(worker.pages().values()) == PAGES
    assert worker.stats()["queued"] == 0
    assert worker.stats()["pools"]["default"]["sequences"] == 0
    assert worker.ask(Bye())


@pytest.fixture
def doomed(forks: Any, daemon: Any, survivor: RawWorker) -> Iterator[Callable[..., Doomed]]:
    started: list[Doomed] = []

    def start(state: str, way: str, endpoint: str = daemon.endpoint) -> Doomed:
        started.append(Doomed(forks, endpoint, state, way))
        return started[-1]

    yield start
    for each in started:
        each.end()


def returned(survivor: RawWorker, worker: Doomed, wait_until: Any, own: int, in_transit: int = 0) -> None:
    """The session is over at once; its own pages are out of use as long as something of it lives, then free."""
    wait_until(lambda: survivor.stats()["sessions"] == 1, what="the end of the dead one's session")
    if worker.way in LEAVES_A_PROCESS:
        assert survivor.pages().get("quarantined", 0) == own
        worker.end()
    wait_until(lambda: "quarantined" not in survivor.pages(), what="the return of its pages")
    assert survivor.pages().get("private", 0) == in_transit


@every_way
def test_during_a_reserve(daemon: Any, survivor: RawWorker, doomed: Any, wait_until: Any, way: str) -> None:
    """The daemon finds the request and the death at the same time, in whichever order."""
    worker = doomed("asking", way)
    daemon.pause()
    try:
        worker.die()
    finally:
        daemon.resume()
    wait_until(lambda: survivor.stats()["sessions"] == 1)
    pages = survivor.pages()
    assert "private" not in pages
    if way in LEAVES_A_PROCESS:
        assert pages["quarantined"] in (2, 2 + 4), "the second reserve was executed or was not"
        worker.end()


@every_way
def test_while_queued(survivor: RawWorker, doomed: Any, wait_until: Any, way: str) -> None:
    assert isinstance(survivor.reserve(1, b"", headroom=POOL_TOKENS), Reserved)
    worker = doomed("queued", way)
    wait_until(lambda: survivor.stats()["queued"] == 1)
    worker.die()
    wait_until(lambda: survivor.stats()["queued"] == 0)
    assert survivor.free(1) == Stepped(free=[None])
    assert isinstance(survivor.reserve(2, b"", headroom=POOL_TOKENS), Reserved), "nothing was granted to the dead one"
    survivor.free(2)


@every_way
def test_while_another_waits_for_its_commit(survivor: RawWorker, doomed: Any, wait_until: Any, way: str) -> None:
    """It computes a prompt in all pages but one; the survivor waits for pages, which its commit would have saved."""
    prompt = tokens(8, first=3000)
    worker = doomed("computing", way)
    waiting = survivor.send(Reserve("default", 1, b"ns", prompt, 4, "copy", 600.0))
    watcher = RawWorker(survivor.endpoint.address)
    wait_until(lambda: watcher.stats()["queued"] == 1)
    worker.die()
    wait_until(lambda: watcher.stats()["sessions"] == 2)
    if way in LEAVES_A_PROCESS:
        assert watcher.pages() == {"free": 1, "quarantined": 15}
        assert watcher.stats()["queued"] == 1, "pages that can be written to are nobody's"
        worker.end()
    identity, reply = survivor.receive()
    assert identity == waiting and isinstance(reply, Reserved)
    assert reply.cached_tokens == 0, "what was not committed is never found"
    watcher.ask(Bye())
    watcher.close()
    survivor.free(1)


@every_way
def test_with_a_handoff_in_transit(survivor: RawWorker, doomed: Any, wait_until: Any, way: str) -> None:
    """What it has handed off survives it; what it has not does not."""
    worker = doomed("handed off", way)
    worker.die()
    returned(survivor, worker, wait_until, own=2, in_transit=1)
    adopted = survivor.ask(Adopt("default", TICKET, 5))
    assert isinstance(adopted, Adopted)
    assert (adopted.tokens, adopted.committed_tokens) == (tokens(10, first=4000), 10)
    assert survivor.ask(Step(commit=[Commit(5, 10)])) == Stepped(commit=[None])
    again = survivor.ask(Adopt("default", TICKET, 6))
    assert isinstance(again, Failure) and again.code == "stale_handle"
    assert survivor.free(5) == Stepped(free=[None])


@every_way
def test_after_it_has_adopted(survivor: RawWorker, doomed: Any, wait_until: Any, way: str) -> None:
    """A sequence has one owner: the giver lives, the adopter dies, the sequence goes with it."""
    assert isinstance(survivor.reserve(3, tokens(10, first=5000)), Reserved)
    survivor.ask(Handoff(3, TICKET, 600.0))
    worker = doomed("adopted", way)
    table = survivor.table()
    worker.die()
    wait_until(lambda: survivor.stats()["sessions"] == 1)
    states = set(table.records["state"].tolist())
    assert QUARANTINED in states or way not in LEAVES_A_PROCESS
    returned(survivor, worker, wait_until, own=3)
    assert QUARANTINED not in table.records["state"] and FREE in table.records["state"]
    table.close()
    stale = survivor.ask(Step(free=[Free(3)]))
    assert stale.free[0].code == "stale_handle"


CROWD = 64


def test_64_at_once(doomed: Any, daemon_factory: Any, raw_worker: Any, wait_until: Any) -> None:
    """They hold one prefix together and pages of their own; a survivor holds the prefix too, and goes on."""
    daemon = daemon_factory(pools=[{"pages": 1024}], lease_s=60.0)
    survivor = raw_worker(daemon.endpoint)
    shared = tokens(16, first=6000)
    assert isinstance(survivor.reserve(1, shared + tokens(1)), Reserved)
    survivor.ask(Step(commit=[Commit(1, 16)]))
    before = survivor.pages()
    table = survivor.table()
    crowd = [doomed("sharing", "killed", daemon.endpoint) for _ in range(CROWD)]
    assert survivor.stats()["sessions"] == CROWD + 1
    assert survivor.pages() == {"cached": 4, "private": 1 + CROWD * (2 + 3), "free": 1024 - 5 - CROWD * 5}
    for worker in crowd:
        worker.process.kill()
    wait_until(lambda: survivor.stats()["sessions"] == 1)
    wait_until(lambda: survivor.pages() == before)
    assert survivor.stats()["pools"]["default"]["sequences"] == 1
    assert np.count_nonzero(table.records["state"] == FREE) == before["free"]
    assert survivor.ask(Step(extend=[Extend(1, tokens(4))])).extend[0]
    table.close()
    assert survivor.ask(Bye())
    assert daemon.stop() == 0


@pytest.mark.parametrize("seed", range(10))
def test_at_any_moment(survivor: RawWorker, doomed: Any, wait_until: Any, seed: int) -> None:
    """Killed between or during any of its requests; the daemon recounts everything after each step."""
    worker = doomed("busy", "killed")
    begin = survivor.stats()["counters"]["requests"]
    worker.pipe.send("work")
    enough = random.Random(seed).randrange(20, 120)
    wait_until(lambda: survivor.stats()["counters"]["requests"] - begin > 2 * enough)
    worker.process.kill()
    wait_until(lambda: survivor.stats()["sessions"] == 1)
