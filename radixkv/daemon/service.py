"""One command to its end, whoever gave it: the engine, then the descriptor tables, then whoever is told.

::

    request ─┐                                          ┌─> reply, late grants     router
             ├─> engine.step ─> stores into the tables ─┼─> copies                 copier
    own   ───┘                                          └─> ends of sessions       attendance

What has left the daemon is in the tables, whatever dies when.
"""

from __future__ import annotations

from typing import Any

from radixkv.commands import (
    Bye,
    Command,
    Done,
    Heartbeat,
    Lookup,
    LosePool,
    Outcome,
    Request,
    Reserve,
    Statistics,
    Stats,
    Step,
)
from radixkv.daemon.agenda import Agenda
from radixkv.daemon.attendance import Attendance
from radixkv.daemon.last_words import LastCommands
from radixkv.daemon.parts import Parts
from radixkv.device.writer import apply_all
from radixkv.engine import invariants
from radixkv.version import VERSION

_LEAVE_NOTHING_PENDING = frozenset((Reserve, Step, Heartbeat, Lookup, Stats))
"""Commands that, answered, leave no deadline: after them the engine is not asked for one. Only a Step can leave work
over, such as the rest of a huge commit, and only a Reserve or a Step can end sessions."""

_CHANGE_NOTHING = frozenset((Heartbeat, Lookup, Stats))


class Service:
    """``paranoid``: every invariant is recounted after every command."""

    def __init__(self, parts: Parts, agenda: Agenda, last: LastCommands, paranoid: bool, log: Any) -> None:
        self._engine, self._router = parts.engine, parts.router
        self._copier, self._events, self._quiescence = parts.copier, parts.events, parts.quiescence
        self._tables = {name: pool.table for name, pool in parts.pools.items()}
        self._is_kept = parts.store is not None
        self._agenda = agenda
        self._last = last
        self._paranoid = paranoid
        self._log = log
        self.attendance = Attendance(parts, agenda, self.step, log)

    def answer(self, route: bytes, request: Request) -> None:
        """A worker's request. ``route``: the way back."""
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
            self._agenda.look_ahead()
        if kind not in _CHANGE_NOTHING:
            self._agenda.stir()
        if kind is Bye and type(reply) is Done:
            self.attendance.ended(request.session, bye=True)

    def step(self, command: Command) -> Outcome:
        """A command of the daemon's own."""
        self._last.note(self._agenda.now, command)
        outcome = self._carry_out(command)
        self._deliver(outcome)
        self._agenda.look_ahead()
        return outcome

    def _carry_out(self, command: Command) -> Outcome:
        """One command to its end: when this returns, the descriptor tables say so, and replies may leave."""
        outcome = self._engine.step(command, self._agenda.now)
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
            self.attendance.ended(session)

    def take_copies(self) -> None:
        """The core hears of the copies that have ended, each by itself."""
        copier = self._copier
        assert copier is not None
        deaths = copier.deaths
        for done in copier.completions():
            self.step(done)
        for pool in copier.take_lost():
            self._log.error("a CUDA error has ended the cache of a pool: its pages are dropped", pool=pool)
            self.step(LosePool(pool))
        if copier.deaths != deaths:
            self._log.warning("the copier died: what it was copying has failed", deaths=copier.deaths)
            self._agenda.look_ahead()

    def _statistics(self, reply: Statistics) -> Statistics:
        """With what the edges have counted."""
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
                "boot_id": self._engine.boot_id,
                "cache_id": self._engine.cache_id,
                "uptime_s": round(self._agenda.now - self._agenda.started, 3),
                "kept": self._is_kept,
                **snapshot,
                "counters": counters,
                "events": None if self._events is None else self._events.statistics(),
            }
        )
