"""What leaves the daemon is in the descriptor table already: a reply, a late grant, a welcome, a copy. And how long
it sleeps.

The real daemon, engine and table, without its sockets: with those, nobody could tell what was first. In their place is
a desk that looks into the table whenever something is put on it.
"""

import math
import os
import select
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest

from fuzz.model.packing import pack_tokens
from radixkv import commands
from radixkv.config import Config, EventsConfig, KVSpec, Limits, PoolConfig, ServerConfig
from radixkv.daemon.agenda import ROUND_S, TICK_S
from radixkv.daemon.loop import Daemon
from radixkv.daemon.parts import Parts
from radixkv.device.descriptors import CACHED, FREE, PRIVATE, QUARANTINED
from radixkv.device.pool_memory import PoolMemory
from radixkv.engine.engine import Engine
from radixkv.ipc.endpoint import resolve
from radixkv.ipc.events import Events
from radixkv.ipc.fdstore import Stored
from radixkv.ipc.log import open_log

POOL = PoolConfig("default", KVSpec(1, 1, 8, "float32", 4), 8)
LATE = 1e12
LEASE_S = ServerConfig().lease_s


class Desk:
    """In the router's place: ``incoming`` goes to the daemon, ``left`` is what came from it and the table just then."""

    def __init__(self, memory):
        self.memory = memory
        self.incoming = []
        self.left = []
        self.malformed = self.dropped_replies = 0

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


class CopyDesk:
    """In the copier's place: ``asked`` is what was asked for, the table just then and how many replies had left before;
    ``ended`` goes to the daemon."""

    def __init__(self, stack, desk):
        self.desk = desk
        self.asked = []
        self.ended = []
        self.stuck_at, self.deaths, self.timed_out = math.inf, 0, 0
        self._pipe = Pipe(stack)

    def fileno(self):
        return self._pipe.fileno()

    def submit(self, copy):
        with closing(self.desk.memory.read()) as table:
            self.asked.append((copy, table.records.copy(), len(self.desk.left)))

    def completions(self):
        ended, self.ended = self.ended, []
        return ended

    def take_lost(self):
        return []

    def kill_if_stuck(self, now):
        if now >= self.stuck_at:
            self.timed_out, self.stuck_at = 1, math.inf


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

    def __init__(self, stack, pool=POOL, events=None):
        config = Config(ServerConfig(endpoint="ipc:///nowhere/at-all.sock"), Limits(), (pool,))
        self.memory = PoolMemory.create(pool, "c" * 32, config.limits.sessions)
        stack.callback(self.memory.close)
        self.desk = Desk(self.memory)
        epoll = stack.enter_context(select.epoll())
        pools, engine = {"default": self.memory}, Engine(config, "b" * 32, "c" * 32)
        door, signals = Pipe(stack), Pipe(stack)
        self.copies = CopyDesk(stack, self.desk) if pool.host_pages else None
        endpoint, ends = resolve(config.server.endpoint), (door, epoll, signals, self.copies, events)
        parts = Parts(config, endpoint, None, None, Stored(), pools, engine, self.desk, *ends)
        self.daemon = Daemon(parts, True, open_log())
        self.agenda, self.attendance = self.daemon._agenda, self.daemon._attendance
        self.engine = engine
        self.requests = 0

    def say(self, body, session=1):
        self.requests += 1
        request = commands.Request(session, 1, self.requests, LATE, body)
        self.desk.incoming.append((b"way back", request, 100))
        self.daemon._serve_one()

    def reserve(self, seq, tokens, wait_s=0.0):
        self.say(commands.Reserve("default", seq, b"name", pack_tokens(tokens), 0, "copy", wait_s))

    def cache(self, seq, tokens):
        """Computed and let go of."""
        self.reserve(seq, tokens)
        self.say(commands.Step(commit=[commands.Commit(seq, len(tokens))]))
        self.say(commands.Step(free=[commands.Free(seq)]))

    def end(self, copy, ok=True):
        self.copies.ended.append(commands.CopyDone(copy.copy, ok))
        self.daemon._serve_fd(self.copies.fileno())

    def sleeps_s(self, later_s=0.0):
        """How long the daemon would sleep if it turned its loop after so many seconds."""
        self.agenda.turn(self.agenda.now + later_s)
        self.daemon._serve_time()
        return self.agenda.due - self.agenda.now

    def states(self):
        """Of the pages, when the last thing left."""
        return self.desk.left[-1][1]["state"].tolist()


@pytest.fixture
def talk():
    with ExitStack() as stack:
        talk = Talk(stack)
        assert isinstance(talk.attendance.open_session(1, "one"), commands.Welcome)
        yield talk


def test_a_welcome_is_for_a_session_that_the_table_has(talk):
    welcome = talk.attendance.open_session(2, "two")
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
    assert talk.attendance.report(commands.EndSession(1, True, "its process is gone")) is True
    with closing(talk.memory.read()) as table:
        assert table.records["state"].tolist().count(QUARANTINED) == 2 and table.sessions() == []


def test_without_sessions_it_sleeps_until_somebody_comes(talk):
    talk.say(commands.Bye())
    talk.sleeps_s()
    assert talk.sleeps_s(ROUND_S) == math.inf
    assert talk.daemon._sleep_ms() == -1


def test_with_a_session_that_wants_nothing_it_wakes_four_times_a_lease(talk):
    talk.sleeps_s(ROUND_S)
    for _ in range(3):
        talk.say(commands.Heartbeat())
        assert talk.sleeps_s(LEASE_S / 4) == LEASE_S / 4
    assert talk.engine.sessions.running_s == pytest.approx(ROUND_S + 3 * LEASE_S / 4)


def test_after_something_has_changed_there_is_one_more_round(talk, monkeypatch):
    rounds = []
    monkeypatch.setattr(talk.attendance.members, "sweep", rounds.append)
    talk.sleeps_s(ROUND_S)
    talk.reserve(1, range(8))
    assert talk.sleeps_s() == ROUND_S
    assert talk.sleeps_s(ROUND_S) == LEASE_S / 4
    assert talk.sleeps_s(LEASE_S / 4) == LEASE_S / 4
    assert len(rounds) == 2


def test_who_waits_for_pages_of_the_lapsed_gets_them_within_a_tick(talk):
    """The first session has all pages and is silent; nothing but time passes."""
    assert isinstance(talk.attendance.open_session(2, "two"), commands.Welcome)
    talk.reserve(1, range(32))
    talk.say(commands.Step(commit=[commands.Commit(1, 32)]))
    talk.sleeps_s(LEASE_S / 4)
    talk.requests = 0
    request = commands.Reserve("default", 1, b"name", pack_tokens(range(100, 104)), 0, "copy", 2 * LEASE_S)
    talk.say(request, session=2)
    silent_s = LEASE_S / 4
    while len(talk.desk.left) < 3:
        assert talk.daemon._sleep_ms() <= 1000 * TICK_S + 1
        silent_s += TICK_S
        talk.sleeps_s(TICK_S)
    assert isinstance(talk.desk.left[-1][0], commands.Reserved)
    assert LEASE_S < silent_s <= LEASE_S + TICK_S


def test_the_time_it_stands_still_is_not_counted(talk):
    talk.sleeps_s(ROUND_S)
    talk.sleeps_s(1000 * LEASE_S)
    assert talk.engine.sessions.running_s == pytest.approx(ROUND_S + LEASE_S / 4)


# -- copies ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiered():
    """Seven of eight pages are cached and idle; four more in the host tier. Nothing is copied ahead of need."""
    with ExitStack() as stack:
        talk = Talk(stack, replace(POOL, host_pages=4, reclaim_pages=0))
        assert isinstance(talk.attendance.open_session(1, "one"), commands.Welcome)
        talk.cache(1, range(28))
        yield talk


def test_a_copy_is_asked_for_when_the_table_says_what_it_reads_and_fills(tiered):
    """A save reads cached pages. A load fills pages that are nobody's, which no later daemon takes for cached."""
    tiered.reserve(2, range(100, 112))
    save, records, _ = tiered.copies.asked[-1]
    assert save.to_host and records["state"][np.frombuffer(save.sources, "<i4")].tolist() == [CACHED, CACHED]
    tiered.end(save)
    granted, records, _ = tiered.desk.left[-1]
    assert records["state"][np.frombuffer(granted.page_table, "<i4")].tolist() == [PRIVATE] * 3
    tiered.say(commands.Step(free=[commands.Free(2)]))
    tiered.reserve(3, range(28))
    load, records, _ = tiered.copies.asked[-1]
    targets = np.frombuffer(load.targets, "<i4")
    assert not load.to_host and len(targets) == 2
    assert records["state"][targets].tolist() == [PRIVATE] * 2 and records["owner"][targets].tolist() == [0, 0]
    tiered.end(load)
    granted, records, _ = tiered.desk.left[-1]
    assert granted.cached_tokens == 27 and records["state"][targets[0]] == CACHED


def test_a_copy_that_failed_is_heard_of_by_who_waited_for_it(tiered):
    tiered.reserve(2, range(100, 112))
    (asked,) = tiered.copies.asked
    tiered.end(asked[0], ok=False)
    assert isinstance(tiered.desk.left[-1][0], commands.Reserved)
    tiered.say(commands.Stats(), session=0)
    assert tiered.desk.left[-1][0].snapshot["counters"]["failed_copies"] == 1


def test_an_answer_that_waits_for_no_copy_leaves_before_one_is_asked_for():
    with ExitStack() as stack:
        talk = Talk(stack, replace(POOL, host_pages=4, reclaim_pages=4))
        assert isinstance(talk.attendance.open_session(1, "one"), commands.Welcome)
        talk.cache(1, range(16))
        talk.reserve(2, range(50, 62))
        (asked,) = talk.copies.asked
        assert asked[0].to_host and asked[2] == len(talk.desk.left) == 4


def test_it_wakes_when_the_copier_counts_as_stuck(tiered):
    tiered.sleeps_s(ROUND_S)
    tiered.copies.stuck_at = tiered.agenda.now + 0.25
    tiered.agenda.look_ahead()
    assert tiered.agenda.due == tiered.copies.stuck_at
    tiered.sleeps_s(0.25)
    tiered.say(commands.Stats(), session=0)
    assert tiered.desk.left[-1][0].snapshot["counters"]["copies_timed_out"] == 1


def test_routers_are_told_when_the_replies_have_left(tmp_path):
    with ExitStack() as stack:
        events = stack.enter_context(closing(Events(EventsConfig(endpoint=f"ipc://{tmp_path}/pub"), POOL, None)))
        talk = Talk(stack, events=events)
        assert isinstance(talk.attendance.open_session(1, "one"), commands.Welcome)
        events.work(0.0)
        told = events.feed.next
        talk.cache(1, range(8))
        assert len(talk.desk.left) == 3
        assert events.feed.next == told, "to serve a request is not to tell of it"
        assert talk.daemon._sleep_ms() == 0, "but it is told before the daemon sleeps"
        events.work(0.0)
        assert events.feed.next == told + 1
        assert events.wait_s(0.0) == math.inf
