"""The whole engine, naively: one command at a time, every reply and every count predicted.

``EngineModel.apply(command, now, outcome)`` carries the command out on the model and raises ``Mismatch`` where the real
outcome differs. It takes from the real reply only what the engine is free to choose: which free pages it hands out.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

from fuzz.model import verbs
from fuzz.model.compare import same_reply
from fuzz.model.mismatch import Mismatch, expect, require
from fuzz.model.orders import Priorities
from fuzz.model.packing import pack_pages, pack_tokens, unpack_pages, unpack_tokens
from fuzz.model.pool import PoolModel
from fuzz.model.state import Refused, SessionModel, Slices, State, Transit, Waiting
from radixkv import commands
from radixkv.config import LAST_PAGE_MODES, Config

SPAN = 1024
"""How far behind a session's newest request id another one may still come in."""

Reply = commands.Reply


class EngineModel:
    """Predicts the engine. ``state`` may be looked at by whoever makes up the next command."""

    def __init__(self, config: Config, slices: Slices) -> None:
        self.state = State(config, slices)
        self._granted: list[commands.Granted] = []
        self._ended: list[int] = []
        self._epochs: dict[tuple[str, bytes], int] = {}

    def apply(self, command: commands.Command, now: float, outcome: commands.Outcome) -> None:
        """Carry ``command`` out and compare. Raises Mismatch."""
        self._granted, self._ended = list(outcome.granted), []
        for pool in self.state.pools.values():
            pool.now = now
        match command:
            case commands.Request():
                self._request(command, now, outcome.reply)
            case commands.OpenSession():
                self._open(command, outcome.reply)
            case commands.EndSession():
                self._end(command.session, command.mapped)
            case commands.MappingGone():
                self.state.gone.add(command.session)
                for pool in self.state.pools.values():
                    pool.release_quarantine(command.session)
            case commands.Tick():
                self._tick(command, now)
            case commands.Drain():
                self._drain()
        body = command.body if isinstance(command, commands.Request) else command
        if isinstance(body, commands.Tick | commands.Invalidate):
            self._reclaimed(outcome)
        self._expire(now)
        while sum(self._serve_queue(pool) for pool in self.state.pools.values()):
            pass  # a session revoked for one pool's sake may have made room in another
        expect("I10", "answers given to nobody who waits", self._granted, [])
        expect("I14", "sessions ended by the core", list(outcome.ended), self._ended)

    # -- requests -----------------------------------------------------------------------------------------------

    def _request(self, request: commands.Request, now: float, actual: Reply | None) -> None:
        self.state.counters["requests"] += 1
        session = self.state.sessions.get(request.session)
        read_only = isinstance(request.body, commands.READ_ONLY)
        if (session is None or request.epoch != session.epoch) and (request.session or not read_only):
            same_reply(actual, commands.Failure("session_lost", ""))
            return
        if session is not None:
            session.seen_s = self.state.running_s
        if session is None or read_only:
            same_reply(actual, self._answer(lambda: self._read(request.body, actual), request, now))
        elif not self._is_repeat(session, request, actual):
            session.taken.add(request.id)
            same_reply(actual, self._answer(lambda: self._verb(session, request, now, actual), request, now))
            if actual is not None:
                session.answers.append((request.id, actual))

    def _is_repeat(self, session: SessionModel, request: commands.Request, actual: Reply | None) -> bool:
        """True if this id waits in a queue, was answered before, or is too old; the answer is then compared."""
        if any(w.session == session.id and w.request == request.id for q in self.state.queue.values() for w in q):
            expect("I18", f"answer to a repeat of waiting request {request.id}", actual, None)
            return True
        for kept, answer in session.answers[-self.state.config.server.keep_replies :]:
            if kept == request.id:
                expect("I18", f"answer to a repeat of request {request.id}", actual, answer)
                return True
        if request.id in session.taken or (session.taken and request.id <= max(session.taken) - SPAN):
            same_reply(actual, commands.Failure("bad_request", ""))
            return True
        return False

    @staticmethod
    def _answer(verb: Callable[[], Reply | None], request: commands.Request, now: float) -> Reply | None:
        try:
            if now > request.deadline:
                raise Refused("timeout")
            return verb()
        except Refused as refused:
            return failure(refused)

    def _read(self, body: commands.Body, actual: Reply | None) -> Reply:
        if isinstance(body, commands.Lookup):
            return self._lookup(body)
        require("I17", isinstance(actual, commands.Statistics), f"stats was answered by {actual!r}")
        assert isinstance(actual, commands.Statistics)
        return actual

    def _verb(self, session: SessionModel, request: commands.Request, now: float, actual: Reply | None) -> Reply | None:
        match request.body:
            case commands.Reserve():
                return self._reserve(session, request, now, actual)
            case commands.Step():
                return self._step(session, request.body, actual)
            case commands.Handoff():
                return self._handoff(session, request.body, now)
            case commands.Adopt():
                return self._adopt(session, request.body)
            case commands.Compact():
                return verbs.compact(self.state, session, request.body.seq)
            case commands.Invalidate():
                return self._invalidate(request.body, actual)
            case commands.Cancel():
                return self._cancel(session, request.body)
            case commands.Bye():
                self._end(session.id, mapped=False)
        return commands.Done()

    def _lookup(self, body: commands.Lookup) -> Reply:
        pool = self._pool(body.pool)
        if len(body.prompts) > self.state.config.limits.batch_items:
            raise Refused("limit_exceeded")
        found = [len(pool.match(body.namespace, self._tokens(prompt))) * pool.page_size for prompt in body.prompts]
        return commands.LookedUp(found, [0] * len(found))

    def _pool(self, name: str) -> PoolModel:
        if name not in self.state.pools:
            raise Refused("bad_request")
        return self.state.pools[name]

    def _tokens(self, packed: bytes, headroom: int = 0) -> list[int]:
        if len(packed) % 4:
            raise Refused("bad_request")
        if len(packed) // 4 + headroom > self.state.config.limits.tokens:
            raise Refused("limit_exceeded")
        return unpack_tokens(packed)

    # -- reserve ------------------------------------------------------------------------------------------------

    def _reserve(
        self, session: SessionModel, request: commands.Request, now: float, actual: Reply | None
    ) -> Reply | None:
        body = request.body
        assert isinstance(body, commands.Reserve)
        if self.state.draining:
            raise Refused("draining")
        self._pool(body.pool)
        self._tokens(body.tokens, body.headroom)
        verbs.new_ids(self.state, session, range(body.seq, body.seq + 1))
        verbs.retained(self.state, body)
        if body.last_page not in LAST_PAGE_MODES:
            raise Refused("bad_request")
        waiting = Waiting(session.id, request.id, body, request.deadline, now)
        try:
            if not (body.wait_s and self.state.queue[body.pool]):
                return self._reserve_now(session, body, actual)
            verbs.reserve_plan(self.state, session, body)
        except Refused as refused:
            if refused.code != "out_of_pages" or refused.details["never_fits"] or not body.wait_s:
                raise
        self._wait(waiting)
        return None

    def _reserve_now(self, session: SessionModel, body: commands.Reserve, actual: Reply | None) -> Reply:
        plan = self._revoking(session, lambda: verbs.reserve_plan(self.state, session, body))
        verbs.new_ids(self.state, session, range(body.seq, body.seq + 1))
        verbs.pin_room(self.state, body, plan)
        self._namespace_room(body)
        return verbs.reserve(self.state, session, body, plan, actual)

    def _revoking(self, session: SessionModel, plan: Callable[[], Any]) -> Any:
        """What ``plan`` finds; while it finds too few pages, others who have been silent too long give way."""
        while True:
            try:
                return plan()
            except Refused as refused:
                lapsed = self.state.lapsed(but=session)
                if refused.code != "out_of_pages" or refused.details["never_fits"] or lapsed is None:
                    raise
                self._end(lapsed.id, mapped=True)
                self.state.close_some(all_of_them=True)
                self._ended.append(lapsed.id)

    def _namespace_room(self, body: commands.Reserve) -> None:
        """Refused if this namespace would be one more than the table has room for."""
        used = {namespace for namespace, _, _ in self.state.pools[body.pool].cache}
        used |= {sequence.namespace for sequence in self.state.sequences() if sequence.pool == body.pool}
        if body.namespace not in used and len(used) >= self.state.pool_config[body.pool].namespaces:
            raise Refused("limit_exceeded")

    def _wait(self, waiting: Waiting) -> None:
        if sum(len(queue) for queue in self.state.queue.values()) >= self.state.config.limits.queued:
            raise Refused("limit_exceeded")
        self.state.queue[waiting.body.pool].append(waiting)

    # -- the batch ----------------------------------------------------------------------------------------------

    def _step(self, session: SessionModel, body: commands.Step, actual: Reply | None) -> Reply:
        lists = (body.free, body.truncate, body.commit, body.extend, body.share, body.copied)
        if sum(len(items) for items in lists) > self.state.config.limits.batch_items:
            raise Refused("limit_exceeded")
        real = actual if isinstance(actual, commands.Stepped) else commands.Stepped()
        result = commands.Stepped([], [], [], [], [], [])
        for seq in body.copied:
            result.copied.append(self._item(session, verbs.copied, seq))
        for free in body.free:
            result.free.append(self._item(session, verbs.free, free))
        for truncate, done in _paired(body.truncate, real.truncate):
            result.truncate.append(self._item(session, verbs.truncate, truncate, done))
        announced = {
            item.seq
            for item, done in zip(body.truncate, result.truncate, strict=True)
            if isinstance(done, commands.Truncated) and done.copy_rows
        }
        for commit in body.commit:
            result.commit.append(self._item(session, verbs.commit, commit, commit.seq not in announced))
        for extend, done in _paired(body.extend, real.extend):
            result.extend.append(self._item(session, verbs.extend, extend, done))
        for share, done in _paired(body.share, real.share):
            result.share.append(self._item(session, verbs.share, share, done))
        return result

    def _item(self, session: SessionModel, verb: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._revoking(session, lambda: verb(self.state, session, *arguments))
        except Refused as refused:
            return failure(refused)

    # -- passing on, invalidating, cancelling -------------------------------------------------------------------

    def _handoff(self, session: SessionModel, body: commands.Handoff, now: float) -> Reply:
        sequence = verbs.own(self.state, session, body.seq)
        if body.ticket in self.state.transit:
            raise Refused("bad_request")
        if len(self.state.transit) >= self.state.config.limits.sequences_per_session:
            raise Refused("limit_exceeded")
        if verbs.entangled(self.state, sequence):
            raise Refused("bad_request")
        del session.sequences[body.seq]
        self.state.transit[body.ticket] = Transit(sequence, now + body.ttl_s)
        return commands.Done()

    def _adopt(self, session: SessionModel, body: commands.Adopt) -> Reply:
        pool = self._pool(body.pool)
        verbs.new_ids(self.state, session, range(body.seq, body.seq + 1))
        transit = self.state.transit.get(body.ticket)
        if transit is None or transit.sequence.pool != body.pool:
            raise Refused("stale_handle")
        sequence = transit.sequence
        cap = self.state.pool_config[body.pool].session_cap_pages
        charged = self.state.charged(session, body.pool)
        if cap and charged + sequence.charged > cap:
            never = sequence.charged > cap
            raise Refused("out_of_pages", need=sequence.charged, available=max(0, cap - charged), never_fits=never)
        del self.state.transit[body.ticket]
        session.sequences[body.seq] = sequence
        return commands.Adopted(
            pack_tokens(sequence.tokens),
            pack_pages(sequence.pages),
            sequence.committed,
            sequence.cached,
            sequence.published * pool.page_size,
            list(sequence.copy_rows),
            sequence.namespace,
        )

    def _invalidate(self, body: commands.Invalidate, actual: Reply | None) -> Reply:
        pool = self._pool(body.pool)
        pool.epoch[body.namespace] = pool.epoch_of(body.namespace) + 1
        if not isinstance(actual, commands.Invalidated):
            return commands.Invalidated(-1)
        in_use = any(namespace == body.namespace for namespace, _, _ in pool.cache)
        in_use |= any(s.namespace == body.namespace and s.pool == body.pool for s in self.state.sequences())
        if in_use or actual.epoch:
            before = self._epochs.get((body.pool, body.namespace), 0)
            require("I6", actual.epoch > before, f"epoch {actual.epoch} after {before}")
            self._epochs[body.pool, body.namespace] = actual.epoch
        return actual

    def _cancel(self, session: SessionModel, body: commands.Cancel) -> Reply:
        for queue in self.state.queue.values():
            for waiting in [w for w in queue if w.session == session.id and w.request == body.request]:
                queue.remove(waiting)
                self._late(waiting, commands.Failure("timeout", ""))
        return commands.Done()

    # -- sessions -----------------------------------------------------------------------------------------------

    def _floors_hold(self) -> bool:
        """Can every pool promise its floor to one more session?"""
        sessions = len(self.state.sessions) + 1
        return all(pool.session_floor_pages * sessions <= pool.pages for pool in self.state.pool_config.values())

    def _open(self, command: commands.OpenSession, actual: Reply | None) -> None:
        if self.state.draining:
            same_reply(actual, commands.Failure("draining", ""))
        elif len(self.state.sessions) >= self.state.config.limits.sessions or not self._floors_hold():
            same_reply(actual, commands.Failure("limit_exceeded", ""))
        else:
            same_reply(actual, commands.Done())
            self.state.sessions[command.session] = SessionModel(command.session, seen_s=self.state.running_s)

    def _end(self, session_id: int, mapped: bool) -> None:
        session = self.state.sessions.get(session_id)
        if session is None:
            return
        for queue in self.state.queue.values():
            for waiting in [waiting for waiting in queue if waiting.session == session_id]:
                queue.remove(waiting)
                self._late(waiting, commands.Failure("session_lost", ""))
        self.state.ending += [(sequence, session_id if mapped else 0) for sequence in session.sequences.values()]
        del self.state.sessions[session_id]
        self.state.close_some()

    def _drain(self) -> None:
        self.state.draining = True
        for queue in self.state.queue.values():
            for waiting in list(queue):
                queue.remove(waiting)
                self._late(waiting, commands.Failure("draining", ""))

    # -- time and the queue -------------------------------------------------------------------------------------

    def _tick(self, tick: commands.Tick, now: float) -> None:
        self.state.running_s = tick.running_s
        self.state.publish_some()
        for pool in self.state.pools.values():
            if isinstance(pool.order, Priorities):
                pool.order.now = round(now * 1000)
        late = [(transit.deadline, ticket) for ticket, transit in self.state.transit.items() if transit.deadline <= now]
        for _, ticket in sorted(late):
            with self.state.settled():
                del self.state.transit[ticket]
        self.state.close_some()

    def _in_vain(self, waiting: Waiting, now: float) -> Reply:
        """The numbers of the moment at which the wait is over; nothing is left for who is not first."""
        session = self.state.sessions[waiting.session]
        try:
            need, available = verbs.reserve_plan(self.state, session, waiting.body).need, 0
        except Refused as refused:
            need, available = int(refused.details["need"]), int(refused.details["available"])
        waited = now - waiting.since
        return failure(Refused("out_of_pages", need=need, available=available, waited_s=waited, never_fits=False))

    def _reclaimed(self, outcome: commands.Outcome) -> None:
        """Pages of invalidated epochs that the engine has taken back of its own accord, before it took any pages."""
        before = list(takewhile(lambda write: not isinstance(write, commands.Assign), outcome.writes))
        for name, pool in self.state.pools.items():
            gone = {
                page
                for write in before
                if isinstance(write, commands.Retire) and write.pool == name and not write.quarantined
                for page in unpack_pages(write.pages)
            }
            for page in pool.dead(self.state.held(pool)):
                if page in gone:
                    pool.forget(page)
                    self.state.counters["evicted_pages"] += 1

    def _expire(self, now: float) -> None:
        """Answer those whose time is over."""
        for queue in self.state.queue.values():
            for waiting in sorted((w for w in queue if w.until <= now), key=lambda w: (w.until, w.session, w.request)):
                queue.remove(waiting)
                self._late(waiting, self._in_vain(waiting, now))

    def _serve_queue(self, pool: PoolModel) -> int:
        """Grant from the front as long as what is first fits. Returns how many were answered."""
        queue, served = self.state.queue[pool.name], 0
        while queue:
            waiting = queue[0]
            session = self.state.sessions[waiting.session]
            place = (waiting.session, waiting.request)
            actual = next((grant.reply for grant in self._granted if (grant.session, grant.request) == place), None)
            try:
                reply = self._reserve_now(session, waiting.body, actual)
            except Refused as refused:
                if refused.code == "out_of_pages" and not refused.details["never_fits"]:
                    break
                reply = failure(refused)
            queue.pop(0)
            self._late(waiting, reply)
            served += 1
        return served

    def _late(self, waiting: Waiting, reply: Reply) -> None:
        """The next late answer must be this one."""
        if not self._granted:
            raise Mismatch("I10", f"no answer for request {waiting.request} of session {waiting.session}: {reply!r}")
        grant = self._granted.pop(0)
        expect("I10", "whose turn it is", (grant.session, grant.request), (waiting.session, waiting.request))
        same_reply(grant.reply, reply)
        self.state.sessions[waiting.session].answers.append((waiting.request, grant.reply))


def _paired(items: list[Any], results: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items, results + [None] * (len(items) - len(results)), strict=False))


def failure(refused: Refused) -> commands.Failure:
    return commands.Failure(refused.code, "", dict(refused.details))
