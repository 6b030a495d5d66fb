"""Reserve, at once or after waiting: with ``prefetch`` and ``wait_loaded`` (``loaded.py``) the only verbs that wait.

What each gets when it is its turn is ``granting.py``. Who waits holds nothing. The line of a pool is first in, first
out; whenever pages have come free, what is first is planned anew. A reserve that may not wait is answered from what is
available now, also while others wait.

Whatever has to be copied between the tiers first (``tiering.py``) is waited for in a second line, also by who may not
wait for pages: all in it are planned anew whenever a copy has ended.

In a third line wait those who would compute what another worker is computing (``flights.py``), if they ask for that.
When that is over they are reserves like all others, and only then may have to wait for pages.
"""

from __future__ import annotations

import heapq

from msgspec.structs import replace

from radixkv.commands import Granted, Prefetch, Reply, Request, Reserve, failure
from radixkv.engine import granting, plan, retention, tiering
from radixkv.engine.flights import Flights, would_be_waited_for
from radixkv.engine.plan import Worker
from radixkv.engine.pool import Pool
from radixkv.engine.sequence import Sequence
from radixkv.engine.state import State
from radixkv.engine.waiting import Waiting, WaitingLine
from radixkv.errors import Draining, LimitExceeded, OutOfPages, RadixKVError, Timeout

HOLDERS = 8
"""Told to one who has waited for pages in vain."""


def reserve(state: State, session: Worker, request: Request, body: Reserve, now: float) -> Reply | None:
    if state.draining:
        raise Draining("the daemon takes nothing new")
    pool = state.pool(body.pool)
    plan.token_count(body.tokens, state.config.limits, 0, body.headroom)
    state.new_ids(session, body.seq, 1)
    if body.retain:
        retention.ranges(pool, body)
    if body.join_s and _joins(state, session, request, body, now):
        return None
    behind_others = bool(body.wait_s and pool.waiting)
    if pool.host is None and not body.wait_s:
        return granting.grant(state, session, pool, body)
    waiting = Waiting(session.id, request.id, body, now, min(now + body.wait_s, request.deadline), request.deadline)
    try:
        if behind_others:
            plan.plan_reserve(pool, session, body)
        else:
            reply = granting.attempt(state, session, pool, waiting, now)
            if reply is None:
                _join(state, session, pool, pool.fetching, _patient(waiting, now))
            return reply
    except OutOfPages as error:
        if error.never_fits or not body.wait_s:
            raise
    wait(state, session, pool, pool.waiting, waiting)
    return None


def wait(state: State, session: Worker, pool: Pool, line: WaitingLine, waiting: Waiting) -> None:
    """Errors: LimitExceeded."""
    limit = state.config.limits.queued
    if state.queued >= limit:
        raise LimitExceeded("too many requests wait already", queued=state.queued, limit=limit)
    _join(state, session, pool, line, waiting)


def _join(state: State, session: Worker, pool: Pool, line: WaitingLine, waiting: Waiting) -> None:
    session.waiting[waiting.request] = pool.name
    line.join(waiting)
    state.queued += 1


def serve_waiting(state: State, now: float) -> None:
    """Answer those whose wait is over; then, where pages have come free, grant from the front what fits."""
    for name in state.tiers:
        _serve_fetching(state, state.pools[name], now)
    for pool in state.pools.values():
        for waiting in pool.waiting.overdue(now):
            answer_waiting(state, pool, waiting, failure(_in_vain(state, pool, waiting, now)))
            pool.gained = True
        for waiting in pool.joining.overdue(now):
            _go_on(state, pool, waiting, now)
    # Again while there is something to look at: a session revoked for one pool's sake makes room in others.
    while True:
        _serve_joining(state, now)
        gained = [pool for pool in state.pools.values() if pool.gained and pool.waiting]
        if not gained:
            return
        for pool in gained:
            pool.gained = False
            _serve_front(state, pool, now)


def _serve_front(state: State, pool: Pool, now: float) -> None:
    while pool.waiting:
        waiting = pool.waiting.first()
        assert type(waiting.body) is Reserve
        session = state.sessions.find_quietly(waiting.session)
        try:
            reply = granting.attempt(state, session, pool, waiting, now)
            if reply is None:
                pool.waiting.leave(waiting.session, waiting.request)
                pool.fetching.join(_patient(waiting, now))
                continue
            state.counters["granted_after_waiting"] += 1
        except OutOfPages as error:
            if not error.never_fits:
                return
            reply = failure(error)
        except RadixKVError as error:
            reply = failure(error)
        answer_waiting(state, pool, waiting, reply)


def answer_waiting(state: State, pool: Pool, waiting: Waiting, reply: Reply) -> None:
    pool.leave_lines(waiting.session, waiting.request)
    state.queued -= 1
    session = state.sessions.find_quietly(waiting.session)
    del session.waiting[waiting.request]
    session.window.keep(waiting.request, reply)
    state.granted.append(Granted(waiting.session, waiting.request, reply))


def cancel(state: State, session: Worker, request: int) -> None:
    pool_name = session.waiting.get(request)
    if pool_name is None:
        return
    pool = state.pools[pool_name]
    waiting = pool.leave_lines(session.id, request)
    assert waiting is not None
    answer_waiting(state, pool, waiting, failure(Timeout("the request was cancelled")))
    pool.gained = True  # whoever is first now may fit


def _in_vain(state: State, pool: Pool, waiting: Waiting, now: float) -> OutOfPages:
    """Why it did not fit, in numbers of now."""
    assert type(waiting.body) is Reserve
    try:
        planned = plan.plan_reserve(pool, state.sessions.find_quietly(waiting.session), waiting.body)
    except OutOfPages as error:
        need, available = error.need, error.available
    else:  # it would fit, but others are before it
        need, available = planned.new, 0
    holders = "; ".join([*_holders(state, pool), *plan.quarantined(pool)])
    return OutOfPages("waited in vain", need=need, available=available, waited_s=now - waiting.since, holders=holders)


def _holders(state: State, pool: Pool) -> list[str]:
    """The sessions that have most pages of their own, and how old the oldest of their sequences is."""
    having = [(session.charged.get(pool.name, 0), session) for session in state.sessions.all()]
    said = []
    for pages, session in heapq.nlargest(HOLDERS, having, key=lambda entry: entry[0]):
        oldest = next((seq for seq in session.sequences.values() if seq.pool == pool.name), None)
        if pages and oldest is not None:
            age = state.sessions.running_s - oldest.since_s
            name = f" ({session.name})" if session.name else ""
            said.append(f"session {session.id}{name}: {pages} pages, the oldest sequence for {age:.0f} s")
    return said


# -- what others are computing ------------------------------------------------------------------------------------


def _joins(state: State, session: Worker, request: Request, body: Reserve, now: float) -> bool:
    """Wait for what another session is computing, if somebody is and there is room in the lines.

    Errors: what planning says, but for a lack of pages that may be over by then.
    """
    pool = state.pool(body.pool)
    if pool.flights is None:
        running = [seq for seq in state.live_sequences() if seq.pool == pool.name]
        pool.flights = Flights(pool.tree.page_token_bytes, running)
    writer = _flight(state, pool, session.id, body)
    if writer is None or state.queued >= state.config.limits.queued:
        return False
    try:
        plan.plan_reserve(pool, session, body)
    except OutOfPages as error:
        if error.never_fits:
            raise
    until = min(now + body.join_s, request.deadline)
    _join(state, session, pool, pool.joining, Waiting(session.id, request.id, body, now, until, request.deadline))
    pool.flights.wait((session.id, request.id), writer)
    state.counters["joined"] += 1
    return True


def _flight(state: State, pool: Pool, asking: int, body: Reserve) -> Sequence | None:
    """The sequence that computes what the prompt would be next to compute. None: nobody, or who waits for the asker."""
    namespace = pool.namespaces.find(body.namespace)
    if namespace is None or pool.flights is None:
        return None
    match = pool.tree.match(namespace.root, body.tokens)
    if pool.host is not None and pool.tree.match_host(match, body.tokens).pages:
        return None  # to load is quicker than to wait
    writer = pool.flights.find(match, body.tokens, asking)
    flights = [other.flights for other in state.pools.values() if other.flights is not None]
    return None if writer is None or would_be_waited_for(asking, writer.session, flights) else writer


def _serve_joining(state: State, now: float) -> None:
    """Whoever has been woken looks again."""
    while woken := [(pool, key) for pool in state.pools.values() if pool.flights for key in pool.flights.woken]:
        for pool, key in woken:
            assert pool.flights is not None
            pool.flights.woken.pop(key, None)
            waiting = pool.joining.find(*key)
            if waiting is None:
                continue
            assert type(waiting.body) is Reserve
            writer = _flight(state, pool, waiting.session, waiting.body)
            if writer is not None:
                pool.flights.wait(key, writer)
            else:
                _go_on(state, pool, waiting, now)


def _go_on(state: State, pool: Pool, waiting: Waiting, now: float) -> None:
    """Nothing is computed for this one any more, or not soon enough: as if it had been asked now."""
    assert type(waiting.body) is Reserve
    pool.leave_lines(waiting.session, waiting.request)
    session, body = state.sessions.find_quietly(waiting.session), replace(waiting.body, join_s=0.0)
    del session.waiting[waiting.request]
    state.queued -= 1
    request = Request(session.id, session.epoch, waiting.request, waiting.deadline, body)
    try:
        reply = reserve(state, session, request, body, now)
    except RadixKVError as error:
        reply = failure(error)
    if reply is not None:
        session.window.keep(waiting.request, reply)
        state.granted.append(Granted(session.id, waiting.request, reply))


# -- copies between the tiers -------------------------------------------------------------------------------------


def prefetch(state: State, session: Worker, request: Request, body: Prefetch, now: float) -> Reply | None:
    """Errors: BadRequest, LimitExceeded, OutOfPages (there is no room on the device)."""
    pool = state.pool(body.pool)
    plan.token_count(body.tokens, state.config.limits, 0, 0)
    waiting = Waiting(session.id, request.id, body, now, now, request.deadline)
    reply = granting.attempt_prefetch(state, pool, waiting, now)
    if reply is None:
        _join(state, session, pool, pool.fetching, _patient(waiting, now))
    return reply


def _patient(waiting: Waiting, now: float) -> Waiting:
    """The same as it waits for copies."""
    return waiting._replace(until=min(waiting.deadline, now + tiering.PATIENCE_S), rounds=waiting.rounds + 1)


def _serve_fetching(state: State, pool: Pool, now: float) -> None:
    """Plan those anew who wait for copies if one has ended; those who have waited long enough go without."""
    if pool.copied:
        pool.copied = False
        for waiting in pool.fetching.all():
            _plan_anew(state, pool, waiting, now)
    for waiting in pool.fetching.overdue(now):
        _plan_anew(state, pool, waiting._replace(rounds=tiering.ROUNDS), now)


def _plan_anew(state: State, pool: Pool, waiting: Waiting, now: float) -> None:
    session, body = state.sessions.find_quietly(waiting.session), waiting.body
    try:
        if isinstance(body, Prefetch):
            reply = granting.attempt_prefetch(state, pool, waiting, now)
        else:
            reply = granting.attempt(state, session, pool, waiting, now)
        if reply is None:
            pool.fetching.join(waiting._replace(rounds=waiting.rounds + 1))
            return
    except OutOfPages as error:
        ends = min(waiting.since + body.wait_s if type(body) is Reserve else now, waiting.deadline)
        if not error.never_fits and now < ends:
            pool.fetching.leave(waiting.session, waiting.request)
            pool.waiting.join(waiting._replace(until=ends))
            return
        reply = failure(error)
    except RadixKVError as error:
        reply = failure(error)
    answer_waiting(state, pool, waiting, reply)
