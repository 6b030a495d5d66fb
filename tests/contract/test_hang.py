"""Workers that stand still (SIGSTOP): their lease, and what they find when they go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import radixkv
from tests.contract.hanging import FIRST, PROMPT, live

LEASE_S = 0.3
ANSWER_S = 20.0
PAGES = 16


class Hanging:
    """A worker that has stopped itself."""

    def __init__(self, context: Any, *what: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=live, args=(*what, theirs))
        self.process.start()
        theirs.close()
        assert self.said() == "holding"

    def go_on(self) -> Any:
        """SIGCONT; what the first call gave."""
        os.kill(self.process.pid, signal.SIGCONT)
        return self.said()

    def said(self) -> Any:
        assert self.pipe.poll(ANSWER_S)
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(ANSWER_S)
        self.pipe.close()


@pytest.fixture(scope="module")
def daemon(daemon_factory: Any) -> Any:
    return daemon_factory(lease_s=LEASE_S, heartbeat_s=0.05)


@pytest.fixture
def hanging(daemon: Any, ns: Any, wait_until: Any) -> Iterator[Callable[[str], Hanging]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.contract.hanging", "radixkv.client.sync"])
    started: list[Hanging] = []

    def start(first: str, committed: int = 4) -> Hanging:
        worker = Hanging(context, daemon.endpoint, ns, first, committed)
        started.append(worker)
        wait_until(lambda: state_of(worker.process.pid) == "T", what="the worker's stop")
        return worker

    yield start
    for worker in started:
        worker.end()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_nobody_is_short_and_it_loses_nothing(client: Any, hanging: Any, counts: Any) -> None:
    """Silent for three leases, and everything is as it was: revocation is lazy."""
    revoked = client.stats().counters["revoked_sessions"]
    worker = hanging("commit")
    time.sleep(3 * LEASE_S)  # the time that is not held against it
    assert counts()["private"] == 2
    assert worker.go_on() is None, "its commit is carried out"
    valid, *others = worker.said()
    assert valid is True and "session_lost" not in others
    assert client.stats().counters["revoked_sessions"] == revoked


@pytest.mark.parametrize("first", FIRST)
def test_whatever_it_does_first_tells_it(
    client: Any, pool: Any, ns: Any, hanging: Any, counts: Any, wait_until: Any, first: str
) -> None:
    """Its pages were needed: its pins are gone, pages that it can write to are out of use, it publishes nothing."""
    revoked = client.stats().counters["revoked_sessions"]
    worker = hanging(first)
    began = time.monotonic()
    with pool.reserve([], namespace=ns, headroom_tokens=4 * (PAGES - 2), timeout=ANSWER_S) as taken:
        assert len(taken.page_table) == PAGES - 2, "all but what it can still write to, its cached page too"
        assert time.monotonic() - began > LEASE_S / 2
        assert client.stats().counters["revoked_sessions"] == revoked + 1
        assert counts()["quarantined"] == 2
        assert worker.go_on() == (False if first == "valid" else "session_lost")
        valid, *others = worker.said()
        assert (valid, set(others)) == (False, {"session_lost"})
        assert pool.lookup(PROMPT, namespace=ns).device_tokens == 0
    worker.pipe.send("again")
    assert worker.said() == (0, True), "in its next session it reserves as anybody does"
    assert counts()["quarantined"] == 2
    worker.pipe.send("end")
    wait_until(lambda: counts()["quarantined"] == 0, what="the return of its pages at its end")


def test_its_pages_are_untouched_and_it_is_told_all_the_same(pool: Any, ns: Any, hanging: Any, counts: Any) -> None:
    """All of them are private and out of use: what says that they are lost is the session's end."""
    worker = hanging("valid", committed=0)
    with pytest.raises(radixkv.OutOfPages):
        pool.reserve([], namespace=ns, headroom_tokens=4 * (PAGES - 2), timeout=3 * LEASE_S)
    assert counts()["quarantined"] == 3
    assert worker.go_on() is False
    assert set(worker.said()) == {False, "session_lost"}
