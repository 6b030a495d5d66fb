"""Workers that die, close, hang or are paused: exactly what they held comes back, and when it may."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from radixkv.commands import Bye, Commit, Failure, Free, Heartbeat, Reserve, Reserved, Step, Stepped
from radixkv.device.descriptors import FREE, PRIVATE, QUARANTINED
from tests.integration.raw import tokens

HOLDER = """
import os, sys
from tests.integration.raw import RawWorker, tokens
from radixkv.commands import Commit, Reserve, Step
worker = RawWorker(sys.argv[1])
mapping = worker.attachment.map_pool("default")
what = sys.argv[2]
if what == "pages":
    worker.reserve(1, tokens(8))
    worker.ask(Step(commit=[Commit(1, 8)]))
    worker.reserve(2, tokens(8), headroom=8)
elif what == "waiting":
    worker.send(Reserve("default", 9, b"ns", b"", 64, "copy", 600.0))
print("holding", flush=True)
if os.read(0, 1) == b"c":
    worker.close()
    print("closed", flush=True)
    os.read(0, 1)
"""


class Holder:
    """A worker process that holds something until it is told or killed."""

    def __init__(self, endpoint: str, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, endpoint, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.said() == b"holding"

    def said(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, byte: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(byte)
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def holder():
    holders: list[Holder] = []

    def start(endpoint: str, what: str = "pages") -> Holder:
        holders.append(Holder(endpoint, what))
        return holders[-1]

    yield start
    for each in holders:
        each.close()


@pytest.fixture
def daemon(daemon_factory):
    daemon = daemon_factory(lease_s=60.0, heartbeat_s=0.05)
    yield daemon
    assert daemon.stop() == 0


HELD = {"free": 11, "cached": 2, "private": 3}
GIVEN_BACK = {"free": 14, "cached": 2}


def fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_killed_worker_gives_exactly_its_pages_back(daemon, raw_worker, holder, wait_until) -> None:
    healthy = raw_worker(daemon.endpoint)
    mine = healthy.reserve(1, tokens(4, first=500))
    assert isinstance(mine, Reserved)
    worker = holder(daemon.endpoint)
    assert healthy.pages() == {"free": 10, "cached": 2, "private": 4}
    worker.process.send_signal(signal.SIGKILL)
    begin = time.monotonic()
    wait_until(lambda: healthy.stats()["sessions"] == 1)
    wait_until(lambda: healthy.pages() == {"free": 13, "cached": 2, "private": 1})
    assert time.monotonic() - begin < 2.0
    assert healthy.reserve(2, tokens(9)).cached_tokens == 8, "what it had committed stays"
    assert healthy.ask(Step(commit=[Commit(1, 4)])) == Stepped(commit=[None]), "the healthy one goes on"
    assert healthy.ask(Bye())


def test_pages_wait_in_quarantine_while_the_process_lives(daemon, raw_worker, holder, wait_until) -> None:
    healthy = raw_worker(daemon.endpoint)
    table = healthy.table()
    worker = holder(daemon.endpoint)
    assert healthy.pages() == HELD
    private = [page for page, state in enumerate(table.records["state"]) if state == PRIVATE]
    worker.say(b"c")
    assert worker.said() == b"closed"
    wait_until(lambda: healthy.stats()["sessions"] == 1)
    assert healthy.pages() == {"free": 11, "cached": 2, "quarantined": 3}
    assert (table.records["state"][private] == QUARANTINED).all()
    assert healthy.reserve(1, b"", headroom=4 * 14).code == "out_of_pages"
    worker.kill()
    wait_until(lambda: healthy.pages() == GIVEN_BACK)
    assert (table.records["state"][private] == FREE).all()
    table.close()
    assert healthy.ask(Bye())


def test_others_that_wait_get_what_the_dead_one_held(daemon, raw_worker, holder) -> None:
    healthy = raw_worker(daemon.endpoint)
    worker = holder(daemon.endpoint)
    waiting = healthy.send(Reserve("default", 1, b"other", b"", 4 * 15, "copy", 30.0))
    worker.kill()
    identity, reply = healthy.receive()
    assert identity == waiting and isinstance(reply, Reserved)
    assert healthy.pages()["private"] == 15
    assert healthy.ask(Bye())


def test_a_dead_one_in_the_queue_is_skipped(daemon, raw_worker, holder, wait_until) -> None:
    healthy = raw_worker(daemon.endpoint)
    healthy.reserve(1, b"", headroom=4 * 16)
    dead = holder(daemon.endpoint, "waiting")
    wait_until(lambda: healthy.stats()["queued"] == 1)
    watcher = raw_worker(daemon.endpoint)
    waiting = healthy.send(Reserve("default", 2, b"other", b"", 4, "copy", 30.0))
    wait_until(lambda: watcher.stats()["queued"] == 2)
    dead.kill()
    wait_until(lambda: watcher.stats()["sessions"] == 2)
    healthy.send(Step(free=[Free(1)]))
    answers = dict(healthy.receive() for _ in range(2))
    assert isinstance(answers[waiting], Reserved)
    assert watcher.stats()["queued"] == 0
    assert healthy.ask(Bye()) and watcher.ask(Bye())


def test_cycles_of_death_leave_nothing(daemon, raw_worker, holder, wait_until) -> None:
    healthy = raw_worker(daemon.endpoint)
    counts = []
    for cycle in range(8):
        worker = holder(daemon.endpoint, "pages" if cycle % 2 else "nothing")
        worker.kill()
        wait_until(lambda: healthy.stats()["sessions"] == 1)
        wait_until(lambda: "quarantined" not in healthy.pages() and "private" not in healthy.pages())
        counts.append(fds(daemon.pid))
    wait_until(lambda: fds(daemon.pid) <= counts[1])
    assert healthy.ask(Bye())


def test_a_worker_that_hangs_gives_way_when_others_are_short(daemon_factory, raw_worker, holder, wait_until) -> None:
    daemon = daemon_factory(lease_s=0.3, heartbeat_s=0.05)
    healthy = raw_worker(daemon.endpoint)
    worker = holder(daemon.endpoint)
    worker.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    while isinstance(reply := healthy.reserve(1, b"", headroom=4 * 12), Failure):
        assert reply.code == "out_of_pages"
        assert time.monotonic() - begin < 10.0
    assert time.monotonic() - begin > 0.2, "not before its lease was over"
    assert healthy.stats()["counters"]["revoked_sessions"] == 1
    assert healthy.pages()["quarantined"] == 3, "it could still write to its private pages"
    worker.kill()
    wait_until(lambda: "quarantined" not in healthy.pages())
    assert healthy.ask(Bye())
    assert daemon.stop() == 0


def test_a_paused_daemon_expires_nobody(daemon_factory, raw_worker) -> None:
    daemon = daemon_factory(lease_s=1.5, heartbeat_s=0.05)
    silent, short = raw_worker(daemon.endpoint), raw_worker(daemon.endpoint)
    assert isinstance(silent.reserve(1, b"", headroom=4 * 10), Reserved)
    daemon.pause()
    time.sleep(2.0)  # the time that must not count
    daemon.resume()
    assert short.reserve(1, b"", headroom=4 * 10).code == "out_of_pages"
    assert silent.ask(Heartbeat())
    assert silent.stats()["counters"]["revoked_sessions"] == 0
    assert silent.ask(Bye()) and short.ask(Bye())
    assert daemon.stop() == 0
