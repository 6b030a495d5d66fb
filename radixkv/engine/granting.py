"""What a reserve or a prefetch gets now, or that something has to be copied between the tiers first.

::

    plan ──> does it fit? ──> must pages be copied before others are taken? ──> carry out
              │                │                     └─ pages have left the device: plan anew
              │                └─ yes, or copies run that it needs: None, unless it wants what is loaded early
              └─ no: None while copies run, whose pages can be had then; else lapsed sessions give way, or OutOfPages

For one that wants its pages early (``early.py``) a load that runs already is as good as one that is begun for it. Who
waits in which line for what, and until when, is ``reserving.py``.
"""

from __future__ import annotations

from radixkv.commands import LookedUp, Prefetch, Reply, Reserve, Reserved, Retain
from radixkv.engine import commit, early, plan, retention, tiering
from radixkv.engine.early import EarlyPlan
from radixkv.engine.plan import NO_MATCH, ReservePlan, Worker
from radixkv.engine.pool import Pool, namespace_record
from radixkv.engine.state import State
from radixkv.engine.tiering import First, Tiering
from radixkv.engine.waiting import Waiting
from radixkv.errors import OutOfPages
from radixkv.tree.walk import Match


def grant(state: State, session: Worker, pool: Pool, body: Reserve) -> Reserved:
    """To one who does not wait, in a pool without a host tier: nothing is copied first. Errors: as ``attempt``."""
    planned = state.insist(session, plan.plan_reserve, pool, session, body)
    return _carry_out(state, session, pool, body, planned)


def attempt(state: State, session: Worker, pool: Pool, waiting: Waiting, now: float) -> Reply | None:
    """Plan a reserve and carry it out. None: something has to be copied first.

    Errors: OutOfPages, LimitExceeded and what planning says.
    """
    body = waiting.body
    assert type(body) is Reserve
    tier = _tiers(state, pool, waiting, now)
    coming = _coming(pool, tier, body) if tier is not None and body.early else None
    try:
        planned = _plan(pool, session, body, coming)
    except OutOfPages as error:
        if tier is not None and tier.host.copies and not error.never_fits:
            return None  # pages that a copy holds can be had as soon as it has ended
        planned = state.insist(session, _plan, pool, session, body, coming)
    if waiting.request in session.waiting:
        state.new_ids(session, body.seq, 1)  # anew: the session may have made others meanwhile
    if tier is not None:
        below = NO_MATCH if coming is not None else _to_load(pool, tier, planned.match, body)
        first = tier.fetch(planned.match, below, planned.new, body.early)
        if first is First.A_NEW_PLAN:
            return attempt(state, session, pool, waiting, now)
        if first is First.COPIES:
            coming = early.plan_early(pool, tier.host, planned.match, body) if body.early and coming is None else None
            if coming is None:
                return None
    if coming is None:
        return _carry_out(state, session, pool, body, planned)
    reply = _carry_out(state, session, pool, body, coming.planned)
    return early.begin(session.sequences[body.seq], coming, reply)


def attempt_prefetch(state: State, pool: Pool, waiting: Waiting, now: float) -> Reply | None:
    """None: copies run for it. Errors: OutOfPages."""
    body = waiting.body
    assert type(body) is Prefetch
    tier, namespace = _tiers(state, pool, waiting, now), pool.namespaces.find(body.namespace)
    if tier is not None and namespace is not None:
        match = pool.tree.match(namespace.root, body.tokens)
        below = pool.tree.match_host(match, body.tokens)
        room = pool.room(0, namespace.root) - pool.tree.idle_on_path(match) - pool.config.decode_reserve_pages
        if below.pages > room:
            raise plan.out_of_pages(pool, below.pages, room, below.pages > pool.pages.size)
        if below.pages and tier.fetch(match, below, below.pages) is First.COPIES:
            return None
    return look_up(pool, body.namespace, [body.tokens])


def look_up(pool: Pool, canonical: bytes, prompts: list[bytes]) -> LookedUp:
    """Tokens of full pages that are on the device, and behind those in the host tier."""
    namespace = pool.namespaces.find(canonical)
    if namespace is None:
        return LookedUp([0] * len(prompts), [0] * len(prompts))
    matches = [pool.tree.match(namespace.root, tokens) for tokens in prompts]
    below = [pool.tree.match_host(match, tokens) for match, tokens in zip(matches, prompts, strict=True)]
    size = pool.page_size
    return LookedUp([match.pages * size for match in matches], [match.pages * size for match in below])


def _tiers(state: State, pool: Pool, waiting: Waiting, now: float) -> Tiering | None:
    """What copies between the pool's tiers. None: there is one tier, or this request has to go without copies."""
    tier = state.tiers.get(pool.name)
    if tier is None or pool.frozen or now < tier.host.rests_until or waiting.rounds >= tiering.ROUNDS:
        return None
    return tier if waiting.rounds > 0 or state.queued < state.config.limits.queued else None


def _coming(pool: Pool, tier: Tiering, body: Reserve) -> EarlyPlan | None:
    """With what a load that runs brings of the prompt, if that is all that the host tier has of it."""
    namespace = pool.namespaces.find(body.namespace)
    if namespace is None or not tier.host.copies:
        return None
    return early.plan_early(pool, tier.host, pool.tree.match(namespace.root, body.tokens), body)


def _plan(pool: Pool, session: Worker, body: Reserve, coming: EarlyPlan | None) -> ReservePlan:
    """``coming``: what counts as there. Errors: OutOfPages and what planning says."""
    if coming is None:
        return plan.plan_reserve(pool, session, body)
    plan.check_room(pool, session, coming.planned)
    return coming.planned


def _to_load(pool: Pool, tier: Tiering, match: Match, body: Reserve) -> Match:
    """What of the prompt is to be loaded: what the host tier has behind ``match``, if that pays."""
    below = tier.worth(pool.tree.match_host(match, body.tokens), body.prefill_tokens_per_s)
    if body.early and below.pages and (named := early.named(pool, match, body)).pages:
        return named
    return below


# -- carrying out -------------------------------------------------------------------------------------------------


def _carry_out(state: State, session: Worker, pool: Pool, body: Reserve, planned: ReservePlan) -> Reserved:
    retain = _retain(state, pool, body, planned) if body.retain else ()
    namespace, made = pool.namespaces.open(body.namespace)
    if made:
        state.writes.append(namespace_record(pool.name, namespace))
    seq, reply = commit.do_reserve(pool, session.id, namespace, body, planned)
    if retain:
        seq.retain = retain
    seq.since_s = state.sessions.running_s
    session.sequences[body.seq] = seq
    state.charge(session, pool, planned.new)
    if pool.flights is not None:
        pool.flights.note(seq)
    return reply


def _retain(state: State, pool: Pool, body: Reserve, planned: ReservePlan) -> tuple[Retain, ...]:
    """The priorities that the sequence will have. Errors: LimitExceeded."""
    retain = retention.ranges(pool, body)
    retention.check_pins(pool, retain, planned.match)
    if pool.priorities is None:
        retention.begin_priorities(pool)
        state.retaining.append(pool)
    return retain
