"""The time as the daemon last read it, and what is due when: it sleeps until then if nothing happens before.

::

    tick    the core is told how long the daemon has been running: when somebody's deadline has come, when the core has
            left work over, and often enough for leases
    round   what a look at everything would find; once, soon after something has happened
    drain   the end, for those who do not end by themselves

Reads no clock: ``turn`` is told what it said.
"""

from __future__ import annotations

import math

from radixkv.config import ServerConfig
from radixkv.daemon.parts import Parts
from radixkv.device.quiescence import LOOK_AGAIN_S
from radixkv.sessions.running_time import RunningTime

TICK_S = 5.0
ROUND_S = 5.0
NEVER = math.inf


class Agenda:
    """All times are monotonic seconds."""

    def __init__(self, server: ServerConfig, parts: Parts, now: float) -> None:
        self._engine = parts.engine
        self._copier = parts.copier
        self._quiescence = parts.quiescence
        self._resume_timeout_s = server.resume_timeout_s
        self._idle_tick_s = server.lease_s / 4
        """Running time is told to the core in ticks: they have to be short beside the lease that it is counted for."""
        self._tick_s = min(TICK_S, self._idle_tick_s)
        """The same while somebody waits for what the lapsed have; and when a tick needs no wakeup of its own."""
        self.running = RunningTime(self._idle_tick_s, now)
        self.now = self.started = self.due = self.round_at = self._ticked = now
        self.drain_ends = NEVER

    def turn(self, now: float) -> None:
        """The loop has turned: it is ``now``."""
        self.now = now
        self.running.advance(now)

    def sleep_ms(self, at_most_s: float = NEVER) -> int:
        """Until something is due, if nothing happens before; -1: nothing ever will be."""
        wait_s = min(self.due - self.now, at_most_s)
        if wait_s <= 0:
            return 0
        return -1 if wait_s == NEVER else int(wait_s * 1000) + 1

    def is_due(self) -> bool:
        return self.now >= self.due

    def tick_if_long_ago(self) -> None:
        """While requests come anyway, a tick costs no wakeup."""
        if self.now - self._ticked >= self._tick_s:
            self.due = self.now

    def tick(self) -> float:
        """A tick it is: running seconds so far."""
        self._ticked = self.now
        return self.running.seconds

    def stir(self) -> None:
        """Something has happened: a round is made soon, and none after it until something happens again."""
        if self.round_at == NEVER:
            self.round_at = self.now + ROUND_S
            self.due = min(self.due, self.round_at)

    def round_made(self, settled: bool) -> None:
        """``settled``: another would find nothing unless something happens."""
        self.round_at = NEVER if settled else self.now + ROUND_S
        self.look_ahead()

    def look_ahead(self) -> None:
        """When the engine is due for a tick: at once if it has left work over, else at somebody's deadline.

        Who is silent lapses some time, but nobody has to be told when that is unless somebody waits for it. Without
        sessions there is no time to be told: an idle daemon sleeps until it is asked for something.
        """
        engine = self._engine
        if engine.has_work():
            self.due = self.now
            return
        deadline = engine.next_deadline()
        due = min(self.round_at, self.drain_ends, NEVER if deadline is None else deadline)
        if self._copier is not None:
            due = min(due, self._copier.stuck_at)
        if self._quiescence:
            due = min(due, self.now + LOOK_AGAIN_S)
        if len(engine.sessions):
            due = min(due, self._ticked + (self._tick_s if engine.queued else self._idle_tick_s))
        if engine.window_open:
            due = min(due, self.now + max(0.0, self._resume_timeout_s - self.running.seconds))
        self.due = due
