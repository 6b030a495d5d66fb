"""The single writer: one command in, one outcome out, nothing else.

Pure: no clock, no randomness, no sockets, no memory; the same commands at the same times give the same state. A command
is planned (``plan.py``, only reads, says no by raising) and then carried out (``commit.py``, cannot fail). What would take
long is left in ``_ending`` or ``Pool.retired`` and done in slices, a slice a ``Tick``.

An operating error is a reply (``Failure``). ``BrokenInvariant``, or any other exception that leaves ``step``, is a bug:
the daemon ends.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from radixkv.commands import (
    READ_ONLY,
    Adopt,
    Adopted,
    Bye,
    Cancel,
    Command,
    Commit,
    Compact,
    Compacted,
    CopyDone,
    Done,
    Drain,
    EndSession,
    Extend,
    Failure,
    Free,
    Granted,
    Handoff,
    Heartbeat,
    Invalidate,
    Invalidated,
    LookedUp,
    Lookup,
    MappingGone,
    NamespaceRecord,
    OpenSession,
    Outcome,
    Own,
    Reply,
    Request,
    Reserve,
    SessionRecord,
    Share,
    Shared,
    Statistics,
    Stats,
    Step,
    Stepped,
    Tick,
    Truncate,
    Truncated,
    Write,
)
from radixkv.config import Config
from radixkv.engine import commit, plan
from radixkv.engine.pool import Pool
from radixkv.engine.sequence import Sequence
from radixkv.engine.snapshot import snapshot
from radixkv.engine.transit import Transit
from radixkv.engine.waiting import Waiting
from radixkv.errors import BadRequest, Draining, LimitExceeded, OutOfPages, RadixKVError, StaleHandle, Timeout
from radixkv.sessions.registry import Registry, Session

Worker = Session[Sequence, Reply]

SLICE_SEQUENCES = 256
SLICE_NODES = 2048
"""How much left-over work one command or tick does: well under 10 ms."""


class Engine:
    """All pools and sessions of one daemon."""

    def __init__(self, config: Config, boot_id: str, cache_id: str) -> None:
        self.config = config
        self.boot_id = boot_id
        self.cache_id = cache_id
        self.pools = {pool.name: Pool(pool) for pool in config.pools}
        self.sessions: Registry[Sequence, Reply] = Registry(
            config.limits.sessions, config.server.keep_replies, config.server.lease_s
        )
        self.transit = Transit()
        self.quarantine: dict[int, dict[str, list[int]]] = {}
        """By ended session: pages its process could still write to."""
        self.counters: Counter[str] = Counter()
        self.draining = False
        self._ending: deque[tuple[Sequence, dict[str, list[int]] | None, int]] = deque()
        """Sequences of ended sessions still to be closed, with where their pages go, and whose they were."""
        self._writes: list[Write] = []
        self._granted: list[Granted] = []
        self._ended: list[int] = []
        for pool in self.pools.values():
            pool.writes = self._writes
            pool.floors_missing = 0

    # -- in and out ---------------------------------------------------------------------------------------------

    def step(self, command: Command, now: float) -> Outcome:
        """Carry out one command at ``now`` (monotonic seconds). See ``commands.Outcome``."""
        if type(command) is Request:
            reply = self._request(command, now)
        else:
            reply = self._internal(command, now)
        for pool in self.pools.values():
            if pool.gained:
                pool.gained = False
                if pool.waiting:
                    self._serve_waiting(pool, now)
        outcome = Outcome(reply, self._writes, self._granted, [], self._ended)
        self._writes, self._granted, self._ended = [], [], []
        for pool in self.pools.values():
            pool.writes = self._writes
        return outcome

    def next_deadline(self) -> float | None:
        """When a tick is due because somebody's time is over (monotonic seconds); None: nothing is pending."""
        ends = [end for pool in self.pools.values() if pool.waiting and (end := pool.waiting.next_end()) is not None]
        if (end := self.transit.next_end()) is not None:
            ends.append(end)
        return min(ends, default=None)

    def has_work(self) -> bool:
        """Left-over work waits for ticks."""
        return bool(self._ending) or any(pool.retired for pool in self.pools.values())

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self)

    def live_sequences(self) -> list[Sequence]:
        """All sequences that hold pages: of sessions, in transit, and still to be closed."""
        of_sessions = [seq for session in self.sessions.all() for seq in session.sequences.values()]
        return of_sessions + self.transit.sequences() + [seq for seq, _, _ in self._ending]

    # -- dispatch -----------------------------------------------------------------------------------------------

    def _internal(self, command: Command, now: float) -> Reply | None:
        match command:
            case Tick():
                self._tick(command, now)
            case OpenSession():
                try:
                    return self._open(command)
                except RadixKVError as error:
                    return failure(error)
            case EndSession():
                self._end(command.session, command.mapped, now)
            case MappingGone():
                self._mapping_gone(command.session)
            case CopyDone():
                self.counters["unknown_copies"] += 1  # no tier to copy to yet: every completion is a stranger
            case Drain():
                self.draining = True
                for pool in self.pools.values():
                    for waiting in pool.waiting.all():
                        self._answer_waiting(pool, waiting, failure(Draining("the daemon takes nothing new")))
            case _:
                raise TypeError(f"not a command: {command!r}")
        return None

    def _request(self, request: Request, now: float) -> Reply | None:
        self.counters["requests"] += 1
        body = request.body
        session: Worker | None = None
        try:
            if request.session or not isinstance(body, READ_ONLY):
                session = self.sessions.find(request.session, request.epoch)
            if now > request.deadline:
                raise Timeout("the request came after its deadline; nothing was executed", late_s=now - request.deadline)
            if isinstance(body, READ_ONLY):
                return self._read(body)
            assert session is not None
            if request.id in session.waiting:
                return None
            repeated = session.window.admit(request.id)
            if repeated is not None:
                self.counters["repeated_requests"] += 1
                return repeated
            reply = self._execute(session, request.id, body, now)
        except RadixKVError as error:
            reply = failure(error)
            self.counters["refused_requests"] += 1
        if session is not None and reply is not None:
            session.window.keep(request.id, reply)
        return reply

    def _read(self, body: Lookup | Stats) -> Reply:
        if isinstance(body, Stats):
            return Statistics(self.snapshot())
        return self._lookup(body)

    def _execute(self, session: Worker, request: int, body: Any, now: float) -> Reply | None:
        match body:
            case Step():
                return self._step(session, body)
            case Reserve():
                return self._reserve(session, request, body, now)
            case Heartbeat():
                return Done()
            case Handoff():
                return self._handoff(session, body, now)
            case Adopt():
                return self._adopt(session, body)
            case Compact():
                seq, pool = self._find(session, body.seq)
                return Compacted(commit.do_compact(pool, seq))
            case Invalidate():
                return self._invalidate(body)
            case Cancel():
                self._cancel(session, body.request)
                return Done()
            case Bye():
                self._end(session.id, False, now)
                return Done()
        raise TypeError(f"not a command: {body!r}")

    # -- sessions -----------------------------------------------------------------------------------------------

    def _open(self, command: OpenSession) -> Reply:
        if self.draining:
            raise Draining("the daemon takes nothing new")
        session = self.sessions.open(command.session, command.token, command.name)
        self._writes.append(SessionRecord(session.slot, session.id, session.epoch, session.token))
        for pool in self.pools.values():
            pool.floors_missing += pool.config.session_floor_pages
        return Done()

    def _end(self, identity: int, mapped: bool, now: float) -> None:
        """Everything of the session comes back: at once its place and its requests, in slices its sequences."""
        session = self.sessions.end(identity)
        if session is None:
            return
        self._writes.append(SessionRecord(session.slot, session.id, 0, b""))
        for pool in self.pools.values():
            pool.floors_missing -= plan.floor_missing(pool, session)
            pool.gained = True
        for request, pool_name in session.waiting.items():
            self.pools[pool_name].waiting.leave(identity, request)
        quarantine = self.quarantine.setdefault(identity, {}) if mapped else None
        self._ending.extend((seq, quarantine, identity) for seq in session.sequences.values())
        self._close_some(SLICE_SEQUENCES)

    def _close_some(self, budget: int) -> None:
        while self._ending and budget > 0:
            budget -= 1
            seq, quarantine, identity = self._ending.popleft()
            pool = self.pools[seq.pool]
            if quarantine is None or identity not in self.quarantine:
                pool.close(seq)
            else:
                pool.close(seq, quarantine.setdefault(pool.name, []))

    def _mapping_gone(self, identity: int) -> None:
        for name, pages in self.quarantine.pop(identity, {}).items():
            if pages:
                self.pools[name].clear(pages)

    def _revoke_lapsed(self, asking: Worker, now: float) -> bool:
        """``asking`` is short of pages: end the other session that has been silent longest beyond its lease."""
        session = self.sessions.lapsed(besides=asking.id)
        if session is None:
            return False
        self.counters["revoked_sessions"] += 1
        self._ended.append(session.id)
        self._end(session.id, True, now)
        while self._ending:
            self._close_some(SLICE_SEQUENCES)
        return True

    def _charge(self, session: Worker, pool: Pool, pages: int) -> None:
        """The session's tables have grown (or shrunk) by so many pages of its own."""
        if not pages:
            return
        charged = session.charged.get(pool.name, 0)
        session.charged[pool.name] = charged + pages
        if pages < 0:
            pool.gained = True
        floor = pool.config.session_floor_pages
        if floor:
            pool.floors_missing += max(0, floor - charged - pages) - max(0, floor - charged)

    def _find(self, session: Worker, identity: int) -> tuple[Sequence, Pool]:
        seq = session.sequences.get(identity)
        if seq is None:
            raise StaleHandle("this session has no such sequence", sequence=identity)
        return seq, self.pools[seq.pool]

    def _pool(self, name: str) -> Pool:
        pool = self.pools.get(name)
        if pool is None:
            raise BadRequest(f"there is no pool {name!r}; there are: {', '.join(self.pools)}")
        return pool

    def _new_ids(self, session: Worker, first: int, count: int) -> None:
        limits = self.config.limits
        if count > limits.batch_items:
            raise LimitExceeded("too many forks at once", count=count, limit=limits.batch_items)
        if len(session.sequences) + count > limits.sequences_per_session:
            raise LimitExceeded(
                "too many sequences", sequences=len(session.sequences) + count, limit=limits.sequences_per_session
            )
        if any(first + index in session.sequences for index in range(count)):
            raise BadRequest("this sequence id is in use", sequence=first)

    # -- reserve ------------------------------------------------------------------------------------------------

    def _reserve(self, session: Worker, request: int, body: Reserve, now: float) -> Reply | None:
        if self.draining:
            raise Draining("the daemon takes nothing new")
        pool = self._pool(body.pool)
        plan.token_count(body.tokens, self.config.limits, 0, body.headroom)
        self._new_ids(session, body.seq, 1)
        behind_others = bool(body.wait_s and pool.waiting)
        try:
            if not behind_others:
                return self._try_reserve(session, pool, body, now)
            self._plan_reserve(session, pool, body)
        except OutOfPages as error:
            if error.never_fits or not body.wait_s:
                raise
        return self._wait(session, request, pool, body, now)

    def _plan_reserve(self, session: Worker, pool: Pool, body: Reserve) -> plan.ReservePlan:
        namespace = pool.namespaces.find(body.namespace)
        return plan.plan_reserve(pool, session, namespace.root if namespace else None, body)

    def _try_reserve(self, session: Worker, pool: Pool, body: Reserve, now: float) -> Reply:
        while True:
            try:
                planned = self._plan_reserve(session, pool, body)
                break
            except OutOfPages as error:
                if error.never_fits or not self._revoke_lapsed(session, now):
                    raise
        namespace, made = pool.namespaces.open(body.namespace)
        if made:
            planned = planned._replace(match=planned.match._replace(node=namespace.root))
            self._writes.append(NamespaceRecord(pool.name, namespace.id, namespace.root.epoch, namespace.canonical))
        seq, reply = commit.do_reserve(pool, session.id, namespace.root, body, planned)
        session.sequences[body.seq] = seq
        self._charge(session, pool, planned.new)
        return reply

    def _wait(self, session: Worker, request: int, pool: Pool, body: Reserve, now: float) -> None:
        queued = sum(len(other.waiting) for other in self.pools.values())
        if queued >= self.config.limits.queued:
            raise LimitExceeded("too many requests wait already", queued=queued, limit=self.config.limits.queued)
        if not pool.namespaces.has_room(body.namespace):
            pool.namespaces.open(body.namespace)
        session.waiting[request] = pool.name
        pool.waiting.join(Waiting(session.id, request, body, now, now + body.wait_s))

    def _serve_waiting(self, pool: Pool, now: float) -> None:
        """From the front, as long as what is first in line fits."""
        while pool.waiting:
            waiting = pool.waiting.first()
            session = self.sessions.find_quietly(waiting.session)
            try:
                self._new_ids(session, waiting.body.seq, 1)
                reply = self._try_reserve(session, pool, waiting.body, now)
                self.counters["granted_after_waiting"] += 1
            except OutOfPages as error:
                if not error.never_fits:
                    return
                reply = failure(error)
            except RadixKVError as error:
                reply = failure(error)
            self._answer_waiting(pool, waiting, reply)

    def _answer_waiting(self, pool: Pool, waiting: Waiting, reply: Reply) -> None:
        pool.waiting.leave(waiting.session, waiting.request)
        session = self.sessions.find_quietly(waiting.session)
        del session.waiting[waiting.request]
        session.window.keep(waiting.request, reply)
        self._granted.append(Granted(waiting.session, waiting.request, reply))

    def _cancel(self, session: Worker, request: int) -> None:
        pool_name = session.waiting.get(request)
        if pool_name is None:
            return
        pool = self.pools[pool_name]
        waiting = pool.waiting.leave(session.id, request)
        assert waiting is not None
        self._answer_waiting(pool, waiting, failure(Timeout("the request was cancelled")))
        pool.gained = True  # whoever is first now may fit

    # -- the batch ----------------------------------------------------------------------------------------------

    def _step(self, session: Worker, body: Step) -> Reply:
        items = sum(map(len, (body.free, body.truncate, body.commit, body.extend, body.share, body.copied)))
        if items > self.config.limits.batch_items:
            raise LimitExceeded("too many items in one step", items=items, limit=self.config.limits.batch_items)
        return Stepped(
            copied=[self._item(self._copied, session, seq) for seq in body.copied],
            free=[self._item(self._free, session, item) for item in body.free],
            truncate=[self._item(self._truncate, session, item) for item in body.truncate],
            commit=[self._item(self._commit, session, item) for item in body.commit],
            extend=[self._item(self._extend, session, item) for item in body.extend],
            share=[self._item(self._share, session, item) for item in body.share],
        )

    @staticmethod
    def _item(verb: Any, session: Worker, item: Any) -> Any:
        """One item's result: it fails alone."""
        try:
            return verb(session, item)
        except RadixKVError as error:
            return failure(error)

    def _copied(self, session: Worker, identity: int) -> None:
        seq, pool = self._find(session, identity)
        pool.release_source(seq)

    def _free(self, session: Worker, item: Free) -> None:
        seq, pool = self._find(session, item.seq)
        del session.sequences[item.seq]
        self._charge(session, pool, -seq.charged)
        pool.close(seq)

    def _truncate(self, session: Worker, item: Truncate) -> Truncated:
        seq, pool = self._find(session, item.seq)
        planned = self._planned(plan.plan_truncate, pool, session, seq, item)
        before = seq.charged
        reply = commit.do_truncate(pool, seq, item, planned)
        self._charge(session, pool, seq.charged - before)
        pool.counters["truncates"] += 1
        return reply

    def _commit(self, session: Worker, item: Commit) -> None:
        seq, pool = self._find(session, item.seq)
        plan.check_commit(seq, item)
        commit.do_commit(pool, seq, item.n)

    def _extend(self, session: Worker, item: Extend) -> bytes:
        seq = session.sequences.get(item.seq)
        if seq is None:
            raise StaleHandle("this session has no such sequence", sequence=item.seq)
        pool = self.pools[seq.pool]
        new = self._planned(plan.plan_extend, pool, session, seq, item, self.config.limits)
        pages = commit.do_extend(pool, seq, item.tokens, new)
        if new:
            self._charge(session, pool, new)
        return pages

    def _share(self, session: Worker, item: Share) -> Shared:
        seq, pool = self._find(session, item.seq)
        self._new_ids(session, item.first_child, item.count)
        planned = self._planned(plan.plan_share, pool, session, seq, item)
        children, reply = commit.do_share(pool, seq, item, planned)
        for child in children:
            session.sequences[child.id] = child
            self._charge(session, pool, child.charged)
        pool.counters["forks"] += len(children)
        return reply

    def _planned(self, planner: Any, pool: Pool, session: Worker, *args: Any) -> Any:
        """A plan; before "no" is final, sessions that have lapsed give way."""
        while True:
            try:
                return planner(pool, session, *args)
            except OutOfPages as error:
                if error.never_fits or not self._revoke_lapsed(session, 0.0):
                    raise

    # -- handing over -------------------------------------------------------------------------------------------

    def _handoff(self, session: Worker, body: Handoff, now: float) -> Reply:
        seq, pool = self._find(session, body.seq)
        if body.ticket in self.transit:
            raise BadRequest("this ticket is in use")
        if pool.counts_hold_of(seq):
            raise BadRequest("rows are still to be copied from or to this sequence's private pages: say copied first")
        del session.sequences[body.seq]
        self._charge(session, pool, -seq.charged)
        seq.session = 0
        self._own(pool, seq)
        self.transit.put(body.ticket, seq, now + body.ttl_s)
        return Done()

    def _adopt(self, session: Worker, body: Adopt) -> Reply:
        pool = self._pool(body.pool)
        self._new_ids(session, body.seq, 1)
        seq = self.transit.peek(body.ticket)
        if seq is None or seq.pool != pool.name:
            raise StaleHandle("no sequence is in transit under this ticket in this pool")
        cap = pool.config.session_cap_pages
        charged = session.charged.get(pool.name, 0)
        if cap and charged + seq.charged > cap:
            raise OutOfPages(need=seq.charged, available=max(0, cap - charged), never_fits=seq.charged > cap)
        self.transit.take(body.ticket)
        seq.id, seq.session = body.seq, session.id
        session.sequences[body.seq] = seq
        self._charge(session, pool, seq.charged)
        self._own(pool, seq)
        rows = []
        if seq.source >= 0:
            rows.append((seq.source, seq.pages[seq.published], seq.committed % pool.page_size))
        writable = seq.published * pool.page_size
        return Adopted(bytes(seq.tokens), seq.pages.tobytes(), seq.committed, seq.cached, writable, rows)

    def _own(self, pool: Pool, seq: Sequence) -> None:
        """The pages that are the sequence's own have a new owner in the table."""
        own = seq.pages[seq.published :]
        own.extend(seq.shadows)
        if own:
            self._writes.append(Own(pool.name, own.tobytes(), seq.session))

    # -- namespaces ---------------------------------------------------------------------------------------------

    def _invalidate(self, body: Invalidate) -> Reply:
        pool = self._pool(body.pool)
        namespace = pool.namespaces.find(body.namespace)
        if namespace is None:
            return Invalidated(0)
        pool.invalidate(namespace)
        pool.reclaim(SLICE_NODES)
        return Invalidated(namespace.root.epoch)

    def _lookup(self, body: Lookup) -> Reply:
        pool = self._pool(body.pool)
        limits = self.config.limits
        if len(body.prompts) > limits.batch_items:
            raise LimitExceeded("too many prompts at once", prompts=len(body.prompts), limit=limits.batch_items)
        namespace = pool.namespaces.find(body.namespace)
        found = []
        for tokens in body.prompts:
            plan.token_count(tokens, limits, 0, 0)
            pages = pool.tree.match(namespace.root, tokens).pages if namespace else 0
            found.append(pages * pool.page_size)
        return LookedUp(found, [0] * len(found))

    # -- time ---------------------------------------------------------------------------------------------------

    def _tick(self, tick: Tick, now: float) -> None:
        self.sessions.running_s = tick.running_s
        for pool in self.pools.values():
            for waiting in pool.waiting.overdue(now):
                late = self._overdue(pool, waiting, now)
                self._answer_waiting(pool, waiting, failure(late))
                pool.gained = True
            if pool.retired:
                pool.reclaim(SLICE_NODES)
        for seq in self.transit.overdue(now):
            self.counters["handoffs_expired"] += 1
            self.pools[seq.pool].close(seq)
        self._close_some(SLICE_SEQUENCES)

    def _overdue(self, pool: Pool, waiting: Waiting, now: float) -> OutOfPages:
        """Why it did not fit, in numbers of now."""
        try:
            planned = self._plan_reserve(self.sessions.find_quietly(waiting.session), pool, waiting.body)
        except OutOfPages as error:
            need, available = error.need, error.available
        else:  # it would fit, but others are before it
            need, available = planned.new, 0
        return OutOfPages("waited in vain", need=need, available=available, waited_s=now - waiting.since)


def failure(error: RadixKVError) -> Failure:
    return Failure(error.code, error.message, error.details)
