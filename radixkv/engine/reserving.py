"""Reserve, at once or after waiting: the only verb that may wait.

Who waits holds nothing. The line of a pool is first in, first out; whenever pages have come free, what is first is
planned anew. A reserve that may not wait is answered from what is available now, also while others wait.
"""

from __future__ import annotations

from radixkv.commands import Granted, Reply, Request, Reserve, failure
from radixkv.engine import commit, plan
from radixkv.engine.plan import Worker
from radixkv.engine.pool import Pool, namespace_record
from radixkv.engine.state import State
from radixkv.engine.waiting import Waiting
from radixkv.errors import Draining, LimitExceeded, OutOfPages, RadixKVError, Timeout


def reserve(state: State, session: Worker, request: Request, body: Reserve, now: float) -> Reply | None:
    if state.draining:
        raise Draining("the daemon takes nothing new")
    pool = state.pool(body.pool)
    plan.token_count(body.tokens, state.config.limits, 0, body.headroom)
    state.new_ids(session, body.seq, 1)
    behind_others = bool(body.wait_s and pool.waiting)
    try:
        if not behind_others:
            try:
                planned = plan.plan_reserve(pool, session, body)
            except OutOfPages:
                planned = state.insist(session, plan.plan_reserve, pool, session, body)
            return _carry_out(state, session, pool, body, planned)
        plan.plan_reserve(pool, session, body)
    except OutOfPages as error:
        if error.never_fits or not body.wait_s:
            raise
    until = min(now + body.wait_s, request.deadline)
    _wait(state, session, pool, Waiting(session.id, request.id, body, now, until))
    return None


def _carry_out(state: State, session: Worker, pool: Pool, body: Reserve, planned: plan.ReservePlan) -> Reply:
    namespace, made = pool.namespaces.open(body.namespace)
    if made:
        state.writes.append(namespace_record(pool.name, namespace))
    seq, reply = commit.do_reserve(pool, session.id, namespace, body, planned)
    session.sequences[body.seq] = seq
    state.charge(session, pool, planned.new)
    return reply


def _wait(state: State, session: Worker, pool: Pool, waiting: Waiting) -> None:
    limit = state.config.limits.queued
    if state.queued >= limit:
        raise LimitExceeded("too many requests wait already", queued=state.queued, limit=limit)
    session.waiting[waiting.request] = pool.name
    pool.waiting.join(waiting)
    state.queued += 1


def serve_waiting(state: State, now: float) -> None:
    """Answer those whose wait is over; then, where pages have come free, grant from the front what fits."""
    for pool in state.pools.values():
        for waiting in pool.waiting.overdue(now):
            answer_waiting(state, pool, waiting, failure(_in_vain(state, pool, waiting, now)))
            pool.gained = True
    # Again while there is something to look at: a session revoked for one pool's sake makes room in others.
    while gained := [pool for pool in state.pools.values() if pool.gained and pool.waiting]:
        for pool in gained:
            pool.gained = False
            _serve_front(state, pool)


def _serve_front(state: State, pool: Pool) -> None:
    while pool.waiting:
        waiting = pool.waiting.first()
        session = state.sessions.find_quietly(waiting.session)
        try:
            planned = state.insist(session, plan.plan_reserve, pool, session, waiting.body)
            state.new_ids(session, waiting.body.seq, 1)  # anew: the session may have made others meanwhile
            reply = _carry_out(state, session, pool, waiting.body, planned)
            state.counters["granted_after_waiting"] += 1
        except OutOfPages as error:
            if not error.never_fits:
                return
            reply = failure(error)
        except RadixKVError as error:
            reply = failure(error)
        answer_waiting(state, pool, waiting, reply)


def answer_waiting(state: State, pool: Pool, waiting: Waiting, reply: Reply) -> None:
    pool.waiting.leave(waiting.session, waiting.request)
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
    waiting = pool.waiting.leave(session.id, request)
    assert waiting is not None
    answer_waiting(state, pool, waiting, failure(Timeout("the request was cancelled")))
    pool.gained = True  # whoever is first now may fit


def _in_vain(state: State, pool: Pool, waiting: Waiting, now: float) -> OutOfPages:
    """Why it did not fit, in numbers of now."""
    try:
        planned = plan.plan_reserve(pool, state.sessions.find_quietly(waiting.session), waiting.body)
    except OutOfPages as error:
        need, available = error.need, error.available
    else:  # it would fit, but others are before it
        need, available = planned.new, 0
    return OutOfPages("waited in vain", need=need, available=available, waited_s=now - waiting.since)
