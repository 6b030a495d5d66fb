"""What leaves the daemon is in the descriptor table already: a reply, a late grant, a welcome.

The real daemon, engine and table, without its sockets: with those, nobody could tell what was first. In their place is
a desk that looks into the table whenever something is put on it.
"""

import os
import select
from contextlib import ExitStack, closing

import numpy as np
import pytest

from fuzz.model.packing import pack_tokens
from radixkv import commands
from radixkv.config import Config, KVSpec, Limits, PoolConfig, ServerConfig
from radixkv.daemon import Daemon
from radixkv.device.descriptors import CACHED, FREE, PRIVATE, QUARANTINED
from radixkv.device.pool_memory import PoolMemory
from radixkv.engine.engine import Engine
from radixkv.ipc.endpoint import resolve
from radixkv.ipc.fdstore import Stored
from radixkv.ipc.log import open_log
from radixkv.starting import Parts

POOL = PoolConfig("default", KVSpec(1, 1, 8, "float32", 4), 8)
LATE = 1e12


class Desk:
    """In the router's place: ``incoming`` goes to the daemon, ``left`` is what came from it and the table just then."""

    def __init__(self, memory):
        self.memory = memory
        self.incoming = []
        self.left = []

    def receive(self):
        return self.incoming.pop(0)

    def send(self, route, request, reply):
        with closing(self.memory.read()) as table:
            self.left.append((reply, table.records.copy(), table.sessions()))

    def grant(self, granted):
        self.send(b"", granted.request, granted.reply)

    def remember(self, route, request):
        pass

    def forget(self, session):
        pass


class Pipe:
    """In the place of sockets that nobody connects to."""

    def __init__(self, stack):
        self._fd, other = os.pipe()
        stack.callback(os.close, self._fd)
        stack.callback(os.close, other)

    def fileno(self):
        return self._fd


class Talk:
    """A daemon and one worker's words to it."""

    def __init__(self, stack):
        config = Config(ServerConfig(endpoint="ipc:///nowhere/at-all.sock"), Limits(), (POOL,))
        self.memory = PoolMemory.create(POOL, "c" * 32, config.limits.sessions)
        stack.callback(self.memory.close)
        self.desk = Desk(self.memory)
        epoll = stack.enter_context(select.epoll())
        pools, engine = {"default": self.memory}, Engine(config, "b" * 32, "c" * 32)
        door, signals = Pipe(stack), Pipe(stack)
        parts = Parts(
            resolve(config.server.endpoint), None, None, Stored(), pools, engine, self.desk, door, epoll, signals
        )
        self.daemon = Daemon(config, parts, True, open_log())
        self.requests = 0

    def say(self, body, session=1):
        self.requests += 1
        request = commands.Request(session, 1, self.requests, LATE, body)
        self.desk.incoming.append((b"way back", request, 100))
        self.daemon._serve_one()

    def reserve(self, seq, tokens, wait_s=0.0):
        self.say(commands.Reserve("default", seq, b"name", pack_tokens(tokens), 0, "copy", wait_s))

    def states(self):
        """Of the pages, when the last thing left."""
        return self.desk.left[-1][1]["state"].tolist()


@pytest.fixture
def talk():
    with ExitStack() as stack:
        talk = Talk(stack)
        assert isinstance(talk.daemon.open_session(1, "one"), commands.Welcome)
        yield talk


def test_a_welcome_is_for_a_session_that_the_table_has(talk):
    welcome = talk.daemon.open_session(2, "two")
    with closing(talk.memory.read()) as table:
        assert table.session(welcome.slot) == (2, welcome.epoch, welcome.token)


def test_a_granted_page_is_private_and_has_its_generation(talk):
    talk.reserve(1, range(8))
    reply, records, _ = talk.desk.left[-1]
    pages = np.frombuffer(reply.page_table, "<i4")
    assert len(pages) == 2
    assert records["state"][pages].tolist() == [PRIVATE, PRIVATE]
    assert records["generation"][pages].tolist() == [1, 1]
    assert records["owner"][pages].tolist() == [1, 1]


def test_a_committed_page_is_cached_and_a_freed_one_is_free(talk):
    talk.reserve(1, range(8))
    talk.say(commands.Step(commit=[commands.Commit(1, 4)]))
    assert sorted(talk.states()) == [FREE] * 6 + [PRIVATE, CACHED]
    talk.say(commands.Step(free=[commands.Free(1)]))
    assert sorted(talk.states()) == [FREE] * 7 + [CACHED]


def test_a_late_grant_is_in_the_table_before_it_leaves(talk):
    talk.reserve(1, range(32))
    talk.reserve(2, range(100, 104), wait_s=9.0)
    talk.say(commands.Step(free=[commands.Free(1)]))
    granted, records, _ = talk.desk.left[-1]
    assert isinstance(granted, commands.Reserved)
    (page,) = np.frombuffer(granted.page_table, "<i4")
    assert records["generation"][page] == 2 and records["state"][page] == PRIVATE


def test_a_session_that_said_goodbye_is_gone_from_the_table(talk):
    talk.reserve(1, range(8))
    talk.say(commands.Bye())
    _, records, sessions = talk.desk.left[-1]
    assert records["state"].tolist() == [FREE] * 8 and sessions == []


def test_the_end_of_a_session_is_stored_before_anybody_hears_of_it(talk):
    talk.reserve(1, range(8))
    assert talk.daemon.report(commands.EndSession(1, True, "its process is gone")) is True
    with closing(talk.memory.read()) as table:
        assert table.records["state"].tolist().count(QUARANTINED) == 2 and table.sessions() == []
