"""The daemon: one thread, one loop, one writer. It and ``starting.py`` alone know engine, ipc and device.

::

    poll ── ROUTER ──> one request: decode, engine.step, descriptor writes, reply
      │
      └──── epoll ───> no request waits (or 64 have been served): attach connections, pidfds, signals, copies that
                       have ended, whose meaning goes to the engine as commands; tick, if one is due

Waiting happens in one place, ``zmq_poll`` over the socket and the epoll; nothing else in the process blocks. An
unexpected exception is a bug: the last commands go to stderr, the tables are marked, the process ends with 70.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import select
import signal
import time
from collections import deque
from collections.abc import Collection
from functools import partial
from typing import Any

import zmq
from zmq import zmq_poll

from radixkv.commands import (
    PROTOCOL_VERSION,
    Bye,
    Command,
    Done,
    Drain,
    EndSession,
    Failure,
    Heartbeat,
    JoinSession,
    Lookup,
    LosePool,
    MappingGone,
    OpenSession,
    Outcome,
    PoolMap,
    RejoinSession,
    Request,
    Reserve,
    Shutdown,
    Statistics,
    Stats,
    Step,
    Tick,
    Welcome,
    failure,
)
from radixkv.config import Config
from radixkv.device import arena
from radixkv.device.quiescence import LOOK_AGAIN_S, Quiescence, processes_on
from radixkv.device.writer import apply_all
from radixkv.engine import invariants
from radixkv.errors import ConfigError, PermissionDenied, Timeout, Unavailable
from radixkv.ipc.endpoint import EndpointInUse
from radixkv.ipc.log import Lines, announce, open_log
from radixkv.ipc.members import Members
from radixkv.ipc.signals import take_signals
from radixkv.sessions.running_time import RunningTime
from radixkv.starting import Parts, RecoveryFailed, start
from radixkv.version import VERSION

EXIT_DRAINED, EXIT_NO_STORE, EXIT_CONFIG, EXIT_IN_USE, EXIT_MEMORY, EXIT_BROKEN = 0, 1, 2, 3, 4, 70

TICK_S = 5.0
ROUND_S = 5.0
CHECK_PAGES_MAX = 4_096
"""More pages than this in all are recounted only with ``paranoid``: a recount must not be felt (about 2 us a page)."""

_REQUESTS_BEFORE_TICK = 64
_EVENTS_A_ROUND = 16
"""Of connections and processes, before requests are looked at again: a worker's end is two events and takes 0.3 ms (if
it held 1,500 pages), and 64 may die at once."""
_LEAVE_NOTHING_PENDING = frozenset((Reserve, Step, Heartbeat, Lookup, Stats))
"""Commands that, answered, leave no deadline: after them the engine is not asked for one. Only a Step can leave work
over, such as the rest of a huge commit, and only a Reserve or a Step can end sessions."""

_CHANGE_NOTHING = frozenset((Heartbeat, Lookup, Stats))
_NEVER = math.inf

_RECENT_COMMANDS = 256
_RECENT_BYTES = 2 * 1024
"""Requests larger than this are remembered without their content: most of it would be cut when it is printed, and to
hold on to it makes each request touch memory that no cache has (measured: 7 us a request of 8 KiB)."""

_READABLE = int(zmq.POLLIN)
_REPORT_PATIENCE_MS = 10
"""How long each line of the last report waits for somebody to read stderr."""


def serve(config: Config, *, paranoid: bool = False, cold: bool = False) -> int:
    """Own the pools of ``config`` and answer workers until a signal ends it. Returns the process's exit code.

    ``cold``: begin with empty pools, whatever is in the store.
    Exit codes: 0 drained, 1 no answer from the store, 2 configuration or permissions, 3 endpoint or memory in use,
    4 memory, 70 broken invariant.
    """
    log, lines = open_log()
    try:
        with contextlib.ExitStack() as stack:
            parts = start(stack, config, cold, log)
            daemon = Daemon(config, parts, paranoid, (log, lines))
            stack.callback(daemon.members.close)
            return daemon.run()
    except (ConfigError, PermissionDenied) as error:
        log.critical("configuration refused", error=str(error))
        return EXIT_CONFIG
    except (EndpointInUse, arena.MemoryInUse) as error:
        log.critical("endpoint in use", error=str(error))
        return EXIT_IN_USE
    except Unavailable as error:
        log.critical("no store", error=str(error))
        return EXIT_NO_STORE
    except RecoveryFailed as error:
        log.critical("broken: this is a bug in radixkv; the next start is cold", error=str(error), exc_info=error)
        return EXIT_BROKEN
    except arena.MemoryTooSmall as error:
        log.critical("not enough memory", error=error.message, **error.details)
        return EXIT_MEMORY


_Outline = tuple[int, int, int, type, int]
"""Session, epoch, id, kind and bytes of a large request."""


class Daemon:
    """Joins the engine with its edges; ``run`` is the loop."""

    def __init__(self, config: Config, parts: Parts, paranoid: bool, log: tuple[Any, Lines]) -> None:
        self._config = config
        self._parts = parts
        self._endpoint, self._pools, self._store = parts.endpoint, parts.pools, parts.store
        self._engine, self._router, self._signals, self._epoll = parts.engine, parts.router, parts.signals, parts.epoll
        self._tables = {name: pool.table for name, pool in self._pools.items()}
        self._paranoid = paranoid
        self._log, self._lines = log
        self.boot_id, self.cache_id = self._engine.boot_id, self._engine.cache_id
        self.members = Members(parts.listener, self._epoll, self, config.limits.sessions, self._store)
        self._epoll.register(self._signals.fileno(), select.EPOLLIN)
        self._copier = parts.copier
        self._copier_fd = -1 if parts.copier is None else parts.copier.fileno()
        if parts.copier is not None:
            self._epoll.register(self._copier_fd, select.EPOLLIN)
        self._events = parts.events
        uuids = sorted({uuid for pool in self._pools.values() for uuid in pool.placement.uuids})
        self._quiescence = Quiescence(partial(processes_on, uuids)) if uuids else None
        if self._quiescence is not None and (why := self._quiescence.try_out()):
            self._log.warning("pages of workers that die will stay out of use", reason=why)
        self._recent: deque[tuple[float, Command | _Outline]] = deque(maxlen=_RECENT_COMMANDS)
        self._recounts = paranoid or sum(pool.pages for pool in config.pools) <= CHECK_PAGES_MAX
        self._now = self._started = self._ticked = time.monotonic()
        self._idle_tick_s = config.server.lease_s / 4
        """Running time is told to the core in ticks: they have to be short beside the lease that it is counted for."""
        self._tick_s = min(TICK_S, self._idle_tick_s)
        """The same while somebody waits for what the lapsed have; and when a tick needs no wakeup of its own."""
        self._running = RunningTime(self._idle_tick_s, self._now)
        self._until_tick = _REQUESTS_BEFORE_TICK
        self._due = self._round_at = self._now
        self._drain_ends = _NEVER
        self._stop = False

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until drained (0), or until something is found that cannot be (70)."""
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            self._meet_again()
            self._announce()
            self._loop()
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a bug, and nothing here may be trusted any more)
            self._dump(error)
            return EXIT_BROKEN
        self._log.info("stopped", dropped_replies=self._router.dropped_replies, malformed=self._router.malformed)
        return EXIT_DRAINED

    def _meet_again(self) -> None:
        """Watch the workers of an earlier daemon's time, who are expected back."""
        known = [session.id for session in self._engine.sessions.all()]
        for session in self.members.adopt(self._parts.stored, known):
            self._log.warning("the store lost a session: its private pages are out of use for good", session=session)

    def _loop(self) -> None:
        requests = self._router.socket
        sources: list[tuple[Any, int]] = [(requests, _READABLE), (self._epoll.fileno(), _READABLE)]
        if self._events is not None and self._events.replay is not None:
            sources.append((self._events.replay, _READABLE))
        while not self._stop:
            asked = False
            for source, _ in zmq_poll(sources, self._sleep_ms()):
                asked |= source is requests
            self._now = time.monotonic()
            self._running.advance(self._now)
            if asked:
                self._serve_one()
                if self._now - self._ticked >= self._tick_s:
                    self._due = self._now
            self._until_tick -= 1
            if not asked or self._until_tick <= 0:
                events = self._epoll.poll(0, _EVENTS_A_ROUND)
                for fd, _ in events:
                    self._serve_fd(fd)
                if events:
                    self._stir()
                self._serve_time()
                if self._events is not None:
                    self._events.work(self._now)
            if self._drain_ends is not _NEVER and (self._now >= self._drain_ends or self._is_drained()):
                return

    def _sleep_ms(self) -> int:
        """Until something is due, if nothing happens before; -1: nothing ever will be."""
        wait_s = self._due - self._now
        if self._events is not None:
            wait_s = min(wait_s, self._events.wait_s(self._now))
        if wait_s <= 0:
            return 0
        return -1 if wait_s == _NEVER else int(wait_s * 1000) + 1

    def _serve_time(self) -> None:
        """Ticks come when no request is waiting, so that nobody is judged while his sign of life lies unread."""
        self._until_tick = _REQUESTS_BEFORE_TICK
        if self._now < self._due:
            return
        self._ticked = self._now
        if self._step(Tick(self._running.seconds)).writes:
            self._stir()
        if self._copier is not None:
            self._copier.kill_if_stuck(self._now)
        if self._quiescence:
            self._settle()
        if self._now >= self._round_at:
            self._make_round()

    def _stir(self) -> None:
        """Something has happened: a round is made soon, and none after it until something happens again."""
        if self._round_at is _NEVER:
            self._round_at = self._now + ROUND_S
            self._due = min(self._due, self._round_at)

    def _make_round(self) -> None:
        self.members.sweep(self._now)
        if self._recounts:
            invariants.check(self._engine)
        self._round_at = _NEVER if self.members.settled else self._now + ROUND_S
        self._look_ahead()

    def _look_ahead(self) -> None:
        """When the engine is due for a tick: at once if it has left work over, else at somebody's deadline.

        Who is silent lapses some time, but nobody has to be told when that is unless somebody waits for it. Without
        sessions there is no time to be told: an idle daemon sleeps until it is asked for something.
        """
        engine = self._engine
        if engine.has_work():
            self._due = self._now
            return
        deadline = engine.next_deadline()
        due = min(self._round_at, self._drain_ends, _NEVER if deadline is None else deadline)
        if self._copier is not None:
            due = min(due, self._copier.stuck_at)
        if self._quiescence:
            due = min(due, self._now + LOOK_AGAIN_S)
        if len(engine.sessions):
            due = min(due, self._ticked + (self._tick_s if engine.queued else self._idle_tick_s))
        if engine.window_open:
            due = min(due, self._now + max(0.0, self._config.server.resume_timeout_s - self._running.seconds))
        self._due = due

    # -- commands -------------------------------------------------------------------------------------------------

    def _serve_one(self) -> None:
        incoming = self._router.receive()
        if incoming is None:
            return
        route, request, size = incoming
        self._recent.append((self._now, request if size <= _RECENT_BYTES else _outline(request, size)))
        if type(request.body) is Shutdown:
            self._shut_down(route, request)
            return
        outcome = self._carry_out(request)
        reply = outcome.reply
        if reply is None:
            self._router.remember(route, request)
        else:
            if type(reply) is Statistics:
                reply = self._statistics(reply)
            self._router.send(route, request.id, reply)
        kind = type(request.body)
        pending = reply is None or kind not in _LEAVE_NOTHING_PENDING or (kind is Step and self._engine.has_work())
        if outcome.granted or outcome.ended or outcome.effects:
            self._deliver(outcome)
            pending = True
        if pending:
            self._look_ahead()
        if self._round_at is _NEVER and kind not in _CHANGE_NOTHING:
            self._stir()
        if kind is Bye and type(reply) is Done:
            self.members.ended(request.session, self._engine.awaits_mapping_gone(request.session), bye=True)
            self._router.forget(request.session)

    def _step(self, command: Command) -> Outcome:
        """A command of the daemon's own."""
        self._recent.append((self._now, command))
        outcome = self._carry_out(command)
        self._deliver(outcome)
        self._look_ahead()
        return outcome

    def _carry_out(self, command: Command) -> Outcome:
        """One command to its end: when this returns, the descriptor tables say so, and replies may leave."""
        outcome = self._engine.step(command, self._now)
        if outcome.writes:
            apply_all(self._tables, outcome.writes)
            if self._events is not None:
                self._events.take(outcome.writes)
        if self._paranoid:
            invariants.check(self._engine)
        return outcome

    def _deliver(self, outcome: Outcome) -> None:
        for granted in outcome.granted:
            self._router.grant(granted)
        if self._copier is not None:
            for copy in outcome.effects:
                self._copier.submit(copy)
        for session in outcome.ended:
            self._log.warning(
                "session revoked: silent beyond its lease while others are short, or its pool is lost", session=session
            )
            self.members.ended(session, mapped=self._engine.awaits_mapping_gone(session))
            self._router.forget(session)

    def _statistics(self, reply: Statistics) -> Statistics:
        snapshot = reply.snapshot
        counters = {
            **snapshot["counters"],
            "malformed_requests": self._router.malformed,
            "dropped_replies": self._router.dropped_replies,
            "copies_timed_out": self._copier.timed_out if self._copier else 0,
            "copier_deaths": self._copier.deaths if self._copier else 0,
            "unquiet_sessions": self._quiescence.given_up if self._quiescence is not None else 0,
        }
        return Statistics(
            {
                "version": VERSION,
                "boot_id": self.boot_id,
                "cache_id": self.cache_id,
                "uptime_s": round(self._now - self._started, 3),
                **snapshot,
                "counters": counters,
                "events": None if self._events is None else self._events.statistics(),
            }
        )

    # -- members: what ipc.members.Host asks for ------------------------------------------------------------------

    def open_session(self, session: int, name: str) -> Welcome | Failure:
        return self._welcome(OpenSession(session, os.urandom(16), name[:64]))

    def rejoin_session(self, session: int, token: bytes) -> Welcome | Failure:
        return self._welcome(RejoinSession(session, token))

    def join_session(self, session: int, token: bytes, rank: int) -> Welcome | Failure:
        return self._welcome(JoinSession(session, token, rank))

    def _welcome(self, command: OpenSession | RejoinSession | JoinSession) -> Welcome | Failure:
        reply = self._step(command).reply
        if isinstance(reply, Failure):
            return reply
        session = self._engine.sessions.find_quietly(command.session)
        return Welcome(
            version=PROTOCOL_VERSION,
            session=session.id,
            epoch=session.epoch,
            slot=session.slot,
            token=session.token,
            boot_id=self.boot_id,
            cache_id=self.cache_id,
            pools=list(self._pools),
            heartbeat_s=self._config.server.heartbeat_s,
            lease_s=self._config.server.lease_s,
            message_bytes=self._config.limits.message_bytes,
            resumes=self._store is not None,
        )

    def map_pool(self, name: str, rank: int) -> tuple[PoolMap, tuple[int, int]] | Failure:
        pool = self._pools.get(name)
        if pool is None:
            return Failure("bad_request", f"there is no pool {name!r}; there are: {', '.join(self._pools)}")
        ranks = len(pool.arena_fds)
        if rank >= ranks:
            return Failure("bad_request", f"pool {name!r} has ranks 0 to {ranks - 1}", {"rank": rank, "ranks": ranks})
        return pool.map_of(rank), (pool.arena_fds[rank], pool.table_fd)

    def _settle(self) -> None:
        """Pages come back when the GPU works for their owner's processes no more, as far as the driver can tell."""
        assert self._quiescence is not None
        quiet, given_up = self._quiescence.settle(self._now)
        for session in quiet:
            self._step(MappingGone(session))
        for session in given_up:
            self._log.error(
                "the driver still shows a process of an ended session: its pages are out of use for good",
                session=session,
            )
        self._look_ahead()

    def report(self, command: EndSession | MappingGone, pids: Collection[int] = ()) -> bool:
        if self._quiescence is not None:
            if isinstance(command, MappingGone):
                self._quiescence.expect(command.session, pids, self._now)
                self._settle()
                return True
            command = EndSession(command.session, True, command.reason)  # a GPU may work on for who is gone
        self._step(command)
        self._router.forget(command.session)
        return self._engine.awaits_mapping_gone(command.session)

    # -- signals and the end --------------------------------------------------------------------------------------

    def _serve_fd(self, fd: int) -> None:
        if fd == self._copier_fd:
            self._take_copies()
        elif fd != self._signals.fileno():
            self.members.handle(fd, self._now)
        else:
            for number in take_signals(self._signals):
                self._stop_asked(number)

    def _take_copies(self) -> None:
        """The core hears of the copies that have ended, each by itself."""
        assert self._copier is not None
        deaths = self._copier.deaths
        for done in self._copier.completions():
            self._step(done)
        for pool in self._copier.take_lost():
            self._log.error("a CUDA error has ended the cache of a pool: its pages are dropped", pool=pool)
            self._step(LosePool(pool))
        if self._copier.deaths != deaths:
            self._log.warning("the copier died: what it was copying has failed", deaths=self._copier.deaths)
            self._look_ahead()

    def _stop_asked(self, number: signal.Signals) -> None:
        """The first signal drains, a second one ends at once."""
        if self._drain_ends is not _NEVER:
            self._log.warning("stopping without waiting", signal=number.name)
            self._stop = True
            return
        self._drain(number.name)

    def _drain(self, reason: str) -> None:
        self._drain_ends = self._now + self._config.server.drain_s
        self._log.info("draining", reason=reason, at_most_s=self._config.server.drain_s)
        self._step(Drain())

    def _shut_down(self, route: bytes, request: Request) -> None:
        """Somebody asks for the end. With a store, the next daemon goes on with all there is."""
        if self._now > request.deadline:
            self._router.send(route, request.id, failure(Timeout("the request came after its deadline: not executed")))
            return
        self._router.send(route, request.id, Done())
        if self._store is not None:
            self._log.info("leaving everything to the next daemon")
            self._parts.leave()
            self._stop = True
        elif self._drain_ends is _NEVER:
            self._drain("shutdown")

    def _is_drained(self) -> bool:
        snapshot = self._engine.snapshot()
        sequences = sum(pool["sequences"] for pool in snapshot["pools"].values())
        return not sequences and not snapshot["in_transit"] and not snapshot["queued"]

    def _announce(self) -> None:
        line = {
            "event": "ready",
            "endpoint": self._endpoint.address,
            "attach": str(self._endpoint.attach_path),
            "pid": os.getpid(),
            "boot_id": self.boot_id,
            "cache_id": self.cache_id,
            "pools": list(self._pools),
        }
        if self._store is not None:
            self._store.ready()
        announce(json.dumps(line))
        self._log.info("ready", endpoint=self._endpoint.address, libzmq=zmq.zmq_version(), version=VERSION)

    def _dump(self, error: Exception) -> None:
        """Mark the tables first: the next start must not trust them, whatever happens to this report."""
        for table in self._tables.values():
            table.taint()
        self._lines.patience_ms = _REPORT_PATIENCE_MS
        for at, command in self._recent:
            self._lines.write(json.dumps({"at": at, "command": repr(command)[:2000]}))
        self._log.critical("broken: this is a bug in radixkv", error=f"{type(error).__name__}: {error}", exc_info=error)


def _outline(request: Request, size: int) -> _Outline:
    """A large request for the record: who and what, not its content."""
    return request.session, request.epoch, request.id, type(request.body), size
