"""Workers that hold something in the daemon and then die in a given way. ``live`` runs in a process of its own."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import resource
import shutil
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import zmq

from radixkv.commands import (
    Adopt,
    Adopted,
    Commit,
    Done,
    Extend,
    Handoff,
    Reserve,
    Reserved,
    Share,
    Shared,
    Step,
    Truncate,
)
from radixkv.device import arena
from tests.integration.raw import RawWorker, tokens

TICKET = b"0123456789abcdef"
POOL_TOKENS = 64
"""What the whole of the tests' pool has room for: 16 pages of 4 tokens."""

WAYS = ("killed", "segfault", "exec", "exit with a live fork")
LEAVES_A_PROCESS = ("exec", "exit with a live fork")
"""Ways after which something that could still have the mapping, for all the daemon can know, lives on."""
LIVES_ON_S = 60
"""Should the test run not end it."""


def live(endpoint: str, state: str, way: str, pipe: Connection) -> None:
    """Take up ``state``, say so, and on the word die as ``way`` says."""
    os.set_inheritable(pipe.fileno(), False)  # multiprocessing leaves it open over exec
    worker = RawWorker(endpoint)
    mapping = worker.attachment.map_pool("default")
    memory = arena.map_shared(mapping.arena_fd, mapping.pool.arena_bytes)
    before, last = STATES[state]
    before(worker)
    pipe.send("holding")
    try:
        pipe.recv()
    except EOFError:
        return
    memory[:4] = b"mine"
    last(worker)
    die(way, pipe)


def die(way: str, pipe: Connection) -> None:
    match way:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(0)
        case "exec":
            sleep = shutil.which("sleep")
            assert sleep is not None
            os.execv(sleep, [sleep, str(LIVES_ON_S)])
        case "exit with a live fork":
            child = os.fork()
            if child == 0:
                signal.alarm(LIVES_ON_S)
                signal.pause()
            pipe.send(child)
            os._exit(0)
        case _:
            raise ValueError(way)


# -- what it does before it says "holding", and between the word and its death ------------------------------------


def _nothing(_worker: RawWorker) -> None:
    return


def _some_pages(worker: RawWorker) -> None:
    assert isinstance(worker.reserve(1, tokens(8, first=1000)), Reserved)


def _ask_for_more(worker: RawWorker) -> None:
    """Returns when the request is in the daemon's socket, whether or not the daemon runs."""
    worker.send(Reserve("default", 2, b"ns", tokens(8, first=2000), 8))
    worker.dealer.close(linger=-1)
    zmq.Context.instance().term()


def _wait_in_the_queue(worker: RawWorker) -> None:
    worker.send(Reserve("default", 1, b"ns", b"", POOL_TOKENS, "copy", 600.0))


def _compute(worker: RawWorker) -> None:
    """All pages but one; what others wait for is never committed."""
    assert isinstance(worker.reserve(1, tokens(8, first=3000), headroom=POOL_TOKENS - 12), Reserved)


def _compute_and_hand_off(worker: RawWorker) -> None:
    assert isinstance(worker.reserve(1, tokens(10, first=4000)), Reserved)
    worker.ask(Step(commit=[Commit(1, 10)]))
    assert worker.ask(Handoff(1, TICKET, 600.0)) == Done()
    _some_pages(worker)


def _adopt(worker: RawWorker) -> None:
    """The ticket is there before this worker is."""
    assert not isinstance(worker.ask(Adopt("default", TICKET, 7)), Done)


def _share_a_prefix(worker: RawWorker) -> None:
    """A cached prefix that all of them hold, a page of it computed by this one, and private pages."""
    assert isinstance(worker.reserve(1, tokens(16, first=6000) + worker.welcome.token[:4], headroom=6), Reserved)
    worker.ask(Step(commit=[Commit(1, 16)]))
    assert isinstance(worker.reserve(2, tokens(9, first=10_000 * (worker.welcome.slot + 1))), Reserved)


def _work_for_ever(worker: RawWorker) -> None:
    """Every verb, one after the other, until somebody ends it."""
    for seq in itertools.count(1, 10):
        prompt = tokens(10, first=seq % 70)
        if not isinstance(worker.reserve(seq, prompt, headroom=4), Reserved):
            continue
        shared = worker.ask(Step(commit=[Commit(seq, 9)], share=[Share(seq, 5, 2, seq + 1)])).share[0]
        worker.ask(Step(extend=[Extend(seq, tokens(3))], truncate=[Truncate(seq + 1, 3)]))
        ticket = seq.to_bytes(16, "little")
        assert worker.ask(Handoff(seq, ticket, 0.2)) == Done()
        assert isinstance(worker.ask(Adopt("default", ticket, seq + 3)), Adopted)
        assert isinstance(shared, Shared)
        assert worker.free(seq + 1, seq + 2, seq + 3).free == [None] * 3


STATES: dict[str, tuple[Callable[[RawWorker], None], Callable[[RawWorker], None]]] = {
    "asking": (_some_pages, _ask_for_more),
    "queued": (_wait_in_the_queue, _nothing),
    "computing": (_compute, _nothing),
    "handed off": (_compute_and_hand_off, _nothing),
    "adopted": (_adopt, _nothing),
    "sharing": (_share_a_prefix, _nothing),
    "busy": (_nothing, _work_for_ever),
}
