"""The single writer: one command in, one outcome out, nothing else.

Pure: no clock, no randomness, no sockets, no memory; the same commands at the same times give the same state. A command
is planned (``plan.py``, only reads, says no by raising) and then carried out (``commit.py``, cannot fail). What would
take long is left in ``State.ending``, ``Pool.retired`` or ``Pool.publishing`` and done in slices, a slice a ``Tick``.

An operating error is a reply (``Failure``). ``BrokenInvariant``, or any other exception that leaves ``step``, is a bug:
the daemon ends.
"""

from __future__ import annotations

from typing import Any

from radixkv.commands import (
    READ_ONLY,
    Adopt,
    Bye,
    Cancel,
    Command,
    Compact,
    Compacted,
    CopyDone,
    CopyProgress,
    Done,
    Drain,
    EndSession,
    Handoff,
    Heartbeat,
    Invalidate,
    Invalidated,
    JoinSession,
    Lookup,
    LosePool,
    MappingGone,
    OpenSession,
    Outcome,
    Prefetch,
    RejoinSession,
    Reply,
    Request,
    Reserve,
    Resume,
    Shutdown,
    Statistics,
    Stats,
    Step,
    Tick,
    WaitLoaded,
    failure,
)
from radixkv.engine import batch, commit, granting, handover, life, loaded, plan, reserving, resume, retention
from radixkv.engine.losing import lose_pool
from radixkv.engine.plan import Worker
from radixkv.engine.snapshot import snapshot
from radixkv.engine.state import SLICE_SEQUENCES, State
from radixkv.errors import Draining, LimitExceeded, RadixKVError, Timeout

SLICE_NODES = 2048
"""How many nodes of invalidated trees one command or tick looks at: well under 10 ms."""


class Engine(State):
    """All pools and sessions of one daemon, changed by ``step`` alone."""

    # -- in and out ---------------------------------------------------------------------------------------------

    def step(self, command: Command, now: float) -> Outcome:
        """Carry out one command at ``now`` (monotonic seconds). See ``commands.Outcome``."""
        if self.retaining:
            self._tell_time(now)
        reply = self._request(command, now) if type(command) is Request else self._internal(command, now)
        if self.queued:
            reserving.serve_waiting(self, now)
            loaded.serve(self, now)
        for tier in self.tiers.values():
            if tier.again:
                tier.begin_again(now)
            tier.write_through(now)
            tier.reclaim(now)
        outcome = Outcome(reply, self.writes.copy())
        self.writes.clear()
        if self.granted or self.ended:
            outcome.granted, outcome.ended = self.granted, self.ended
            self.granted, self.ended = [], []
        if self.effects:
            outcome.effects = self.effects.copy()
            self.effects.clear()
        return outcome

    def next_deadline(self) -> float | None:
        """When a tick is due because somebody's time is over (monotonic seconds); None: nothing is pending."""
        lines = [line for pool in self.pools.values() for line in pool.lines if line]
        ends = [end for line in lines if (end := line.next_end()) is not None]
        if (end := self.transit.next_end()) is not None:
            ends.append(end)
        ends += [copying.due for tier in self.tiers.values() for copying in tier.again]
        ends += [end for pool in self.retaining if (end := retention.next_end(pool)) is not None]
        return min(ends, default=None)

    def has_work(self) -> bool:
        """Left-over work waits for ticks."""
        if self.ending:
            return True
        for pool in self.pools.values():  # noqa: SIM110 - asked after each step: a generator costs three times as much
            if (pool.retired and not pool.frozen) or pool.publishing:
                return True
        return False

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self)

    # -- dispatch -----------------------------------------------------------------------------------------------

    def _internal(self, command: Command, now: float) -> Reply | None:
        match command:
            case Tick():
                self._tick(command, now)
            case OpenSession():
                return self._open(command)
            case RejoinSession() | JoinSession():
                return self._back(command)
            case EndSession():
                self.end_session(command.session, command.mapped)
            case MappingGone():
                self.mapping_gone(command.session)
            case LosePool():
                lose_pool(self, command.pool)
            case CopyDone() | CopyProgress():
                self._copy(command, now)
            case Drain():
                self._drain()
            case _:
                raise TypeError(f"not a command: {command!r}")
        return None

    def _drain(self) -> None:
        """Whoever waits for what is its own already goes on waiting."""
        self.draining = True
        for pool in self.pools.values():
            for waiting in pool.all_waiting():
                if not isinstance(waiting.body, WaitLoaded):
                    reserving.answer_waiting(self, pool, waiting, failure(Draining("the daemon takes nothing new")))

    def _copy(self, command: CopyDone | CopyProgress, now: float) -> None:
        for tier in self.tiers.values():
            copying = tier.host.copies.get(command.copy)
            if copying is not None:
                if isinstance(command, CopyDone):
                    tier.done(copying, command, now)
                else:
                    tier.progress(copying, command)
                return
        self.counters["unknown_copies"] += 1  # twice, or of an earlier daemon's time

    def _open(self, command: OpenSession) -> Reply:
        try:
            if self.draining:
                raise Draining("the daemon takes nothing new")
            self.open_session(command.session, command.token, command.name)
        except RadixKVError as error:
            return failure(error)
        return Done()

    def _back(self, command: RejoinSession | JoinSession) -> Reply:
        try:
            if isinstance(command, RejoinSession):
                self.rejoin(command.session, command.token)
            else:
                self.join(command.session, command.token, command.rank)
        except RadixKVError as error:
            return failure(error)
        return Done()

    def _request(self, request: Request, now: float) -> Reply | None:
        self.counters["requests"] += 1
        if type(request.body) in READ_ONLY:
            return self._read_only(request, now)
        try:
            session = self.sessions.find(request.session, request.epoch)
            if request.id in session.waiting:
                return None
            repeated = session.window.admit(request.id)
        except RadixKVError as error:
            return self._refusal(error)
        if repeated is not None:
            self.counters["repeated_requests"] += 1
            return repeated
        try:
            if now > request.deadline:
                raise _too_late(request, now)
            body = request.body
            reply: Reply | None
            if type(body) is Step:
                reply = batch.step(self, session, body)
            elif type(body) is Reserve:
                reply = reserving.reserve(self, session, request, body, now)
            else:
                reply = self._execute(session, request, now)
        except RadixKVError as error:
            reply = self._refusal(error)
        if reply is not None:
            session.window.keep(request.id, reply)
        return reply

    def _read_only(self, request: Request, now: float) -> Reply:
        """Anybody may ask; who has a session gives a sign of life with it."""
        try:
            if request.session:
                self.sessions.find(request.session, request.epoch)
            if now > request.deadline:
                raise _too_late(request, now)
            return self._read(request.body)  # type: ignore[arg-type]
        except RadixKVError as error:
            return self._refusal(error)

    def _refusal(self, error: RadixKVError) -> Reply:
        self.counters["refused_requests"] += 1
        return failure(error)

    def _read(self, body: Lookup | Stats) -> Reply:
        if isinstance(body, Stats):
            return Statistics(self.snapshot())
        return self._lookup(body)

    def _execute(self, session: Worker, request: Request, now: float) -> Reply | None:
        """All but the two commands that engines send all day."""
        match body := request.body:
            case Heartbeat():
                return Done()
            case Resume():
                return resume.resume(self, session, body)
            case Handoff():
                return handover.handoff(self, session, body, now)
            case Adopt():
                return handover.adopt(self, session, body)
            case Prefetch():
                return reserving.prefetch(self, session, request, body, now)
            case WaitLoaded():
                return loaded.wait_loaded(self, session, request, body, now)
            case Compact():
                seq, pool = self.find(session, body.seq)
                return Compacted(commit.do_compact(pool, seq))
            case Invalidate():
                return self._invalidate(body)
            case Cancel():
                reserving.cancel(self, session, body.request)
                return Done()
            case Bye():
                self.end_session(session.id, mapped=len(session.ranks) > 1)  # one process's word, not the others'
                return Done()
            case Shutdown():
                return Done()  # the process ends itself; there is nothing to do here
        raise TypeError(f"not a command: {body!r}")

    # -- namespaces ---------------------------------------------------------------------------------------------

    def _invalidate(self, body: Invalidate) -> Reply:
        pool = self.pool(body.pool)
        namespace = pool.namespaces.find(body.namespace)
        if namespace is None:
            return Invalidated(0)
        pool.invalidate(namespace)
        if not pool.frozen:
            pool.reclaim(SLICE_NODES)
        return Invalidated(namespace.root.epoch)

    def _lookup(self, body: Lookup) -> Reply:
        pool = self.pool(body.pool)
        limits = self.config.limits
        if len(body.prompts) > limits.batch_items:
            raise LimitExceeded("too many prompts at once", prompts=len(body.prompts), limit=limits.batch_items)
        for tokens in body.prompts:
            plan.token_count(tokens, limits, 0, 0)
        return granting.look_up(pool, body.namespace, body.prompts)

    def _tell_time(self, now: float) -> None:
        for pool in self.retaining:
            pool.now = now

    # -- time ---------------------------------------------------------------------------------------------------

    def _tick(self, tick: Tick, now: float) -> None:
        self.sessions.running_s = tick.running_s
        if self.window_open and tick.running_s >= self.config.server.resume_timeout_s:
            self.close_window()
        for pool in self.pools.values():
            if pool.waiting and self.sessions.lapsed(besides=0):
                pool.gained = True  # who waits is short of pages: the lapsed give way
            if pool.retired and not pool.frozen:
                pool.reclaim(SLICE_NODES)
            life.publish_some(pool)
            pool.now = now
        for pool in self.retaining:
            retention.expire(pool, now, SLICE_NODES)
        for seq in self.transit.overdue(now):
            self.counters["handoffs_expired"] += 1
            life.close(self.pools[seq.pool], seq)
        self.close_some(SLICE_SEQUENCES)


def _too_late(request: Request, now: float) -> Timeout:
    """Whoever sent the request has given up and believes that it was not executed."""
    return Timeout("the request came after its deadline: not executed", late_s=now - request.deadline)
