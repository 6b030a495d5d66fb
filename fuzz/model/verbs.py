"""What each verb does to one sequence, as docs/protocol.md says it.

Each function looks first (and may refuse), then changes. Which free page becomes a new one is the real engine's
choice, so it is read from the real reply, where it has to be if the engine is right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fuzz.model.packing import pack_pages, unpack_pages, unpack_tokens
from fuzz.model.pool import CACHED, SHADOW, PoolModel, Sequence
from fuzz.model.state import Refused, SessionModel, State
from radixkv import commands


def ceil_pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


@dataclass
class Plan:
    """What a reserve would do right now."""

    shared: list[int]
    source: list[int]
    need: int
    cached: int
    published: int
    copied_rows: int = 0


def plans(pool: PoolModel, body: commands.Reserve) -> list[Plan]:
    """What the reserve may do, best first; the next one only if the pages do not suffice for the one before."""
    tokens, size = unpack_tokens(body.tokens), pool.page_size
    found = pool.match(body.namespace, tokens)
    k, total = len(found), ceil_pages(len(tokens) + body.headroom, size)
    if not tokens or k * size < len(tokens):
        return [Plan(found, [], total - k, k * size, k)]
    drop = Plan(found[:-1], [], total - (k - 1), (k - 1) * size, k - 1)
    if body.last_page == "keep":
        return [Plan(found, [], total - k, len(tokens) - 1, k)]
    if body.last_page == "drop" or size == 1:
        return [drop]
    return [Plan(found[:-1], found[-1:], total - (k - 1), len(tokens) - 1, k - 1, size - 1), drop]


def reserve_plan(state: State, session: SessionModel, body: commands.Reserve) -> Plan:
    """The plan that fits now. Refused(out_of_pages) with the numbers if none does."""
    pool = state.pools[body.pool]
    limits = state.pool_config[body.pool]
    for plan in plans(pool, body):
        pinned = plan.shared + plan.source
        room = state.available(pool, session, pinned, decode=False)
        takes_nothing = plan.need == 0 and set(pinned) <= state.held(pool)
        if plan.need <= room or takes_nothing:
            return plan
    total = len(plan.shared) + plan.need
    most = limits.pages - limits.decode_reserve_pages
    never = total > most or 0 < limits.session_cap_pages < plan.need
    raise Refused("out_of_pages", need=plan.need, available=max(0, room), never_fits=never)


def reserve(state: State, session: SessionModel, body: commands.Reserve, plan: Plan, actual: object) -> commands.Reply:
    """Carry the plan out. ``actual``: the real reply, for the ids of its new pages."""
    pool = state.pools[body.pool]
    tokens = unpack_tokens(body.tokens)
    named = unpack_pages(actual.page_table) if isinstance(actual, commands.Reserved) else []
    fresh = state.take(pool, plan.shared + plan.source, plan.need, named[len(plan.shared) :])
    rows = [(plan.source[0], fresh[0], plan.copied_rows)] if plan.source else []
    session.sequences[body.seq] = Sequence(
        pool=body.pool,
        namespace=body.namespace,
        epoch=pool.epoch_of(body.namespace),
        tokens=tokens,
        pages=plan.shared + fresh,
        published=plan.published,
        depth=plan.published,
        committed=plan.cached,
        cached=plan.cached,
        born_shared=len(plan.shared),
        copy_rows=rows,
        retain=retained(state, body),
    )
    state.counters["asked_tokens"] += len(tokens)
    state.counters["hit_tokens"] += plan.cached
    table = pack_pages(plan.shared + fresh)
    return commands.Reserved(table, plan.cached, plan.published * pool.page_size, rows)


def retained(state: State, body: commands.Reserve) -> list[commands.Retain]:
    """Refused if the priorities cannot be; else what they are."""
    if not body.retain:
        return []
    pool = state.pools[body.pool]
    if pool.policy != "lru" or state.pool_config[body.pool].namespace_cap_pages:
        raise Refused("bad_request")
    if len(body.retain) > 64:
        raise Refused("limit_exceeded")
    at: int | None = 0
    for one in body.retain:
        if at is None or one.start < at or (one.end is not None and one.end < one.start):
            raise Refused("bad_request")
        if one.priority == 100 and one.for_s is None:
            raise Refused("bad_request")
        at = one.end
    length = len(body.tokens) // 4
    ends = [length if one.priority == 100 and one.end is None else one.end for one in body.retain]
    made = [replace_end(one, end) for one, end in zip(body.retain, ends, strict=True)]
    if asked_pins(pool, made) > state.pool_config[body.pool].pin_limit_pages:
        raise Refused("limit_exceeded")
    return made


def replace_end(one: commands.Retain, end: int | None) -> commands.Retain:
    return commands.Retain(one.priority, one.for_s, one.start, None if end is None else max(one.start, end))


def asked_pins(pool: PoolModel, retain: list[commands.Retain]) -> int:
    """Pages whose first token is in a range that is to be pinned."""
    pins = [one for one in retain if one.priority == 100 and one.end]
    return sum(len([t for t in range(one.start, one.end or 0) if t % pool.page_size == 0]) for one in pins)


def pin_room(state: State, body: commands.Reserve, plan: Plan) -> None:
    """Refused if it would pin too much, with what others have pinned."""
    pool = state.pools[body.pool]
    asked = asked_pins(pool, retained(state, body))
    others = pool.pinned(state.held(pool) | set(plan.shared + plan.source))
    if asked and asked + others > state.pool_config[body.pool].pin_limit_pages:
        raise Refused("limit_exceeded")


# -- items of a step ----------------------------------------------------------------------------------------------


def known(session: SessionModel, seq: int) -> Sequence:
    if seq not in session.sequences:
        raise Refused("stale_handle")
    return session.sequences[seq]


def own(state: State, session: SessionModel, seq: int) -> Sequence:
    """The sequence, of which nothing is left to publish."""
    sequence = known(session, seq)
    state.publish_rest(sequence)
    return sequence


def new_ids(state: State, session: SessionModel, ids: range) -> None:
    """Refused unless the session may have so many more sequences under these ids."""
    limits = state.config.limits
    if len(ids) > limits.batch_items or len(session.sequences) + len(ids) > limits.sequences_per_session:
        raise Refused("limit_exceeded")
    if any(seq in session.sequences for seq in ids):
        raise Refused("bad_request")


def copied(state: State, session: SessionModel, seq: int) -> None:
    sequence = own(state, session, seq)
    with state.settled():
        sequence.copy_rows = []


def free(state: State, session: SessionModel, item: commands.Free) -> None:
    sequence = own(state, session, item.seq)
    try:
        if item.commit:
            commit(state, session, commands.Commit(item.seq, item.commit))
            state.publish_rest(sequence)
    finally:
        with state.settled():
            del session.sequences[item.seq]


def truncate(state: State, session: SessionModel, item: commands.Truncate, actual: object) -> commands.Truncated:
    sequence = own(state, session, item.seq)
    pool = state.pools[sequence.pool]
    size = pool.page_size
    if item.n > len(sequence.tokens):
        raise Refused("bad_request")
    keep = ceil_pages(item.n, size)
    inside = item.n % size != 0 and keep <= sequence.published
    if not inside:
        with state.settled():
            _cut(sequence, item.n, keep)
            kept_rows = min(item.n - sequence.published * size, size)
            sequence.copy_rows = [
                (source, target, min(rows, kept_rows))
                for source, target, rows in sequence.copy_rows
                if target in sequence.pages
            ]
        state.counters["truncates"] += 1
        return commands.Truncated(keep)
    source = sequence.pages[keep - 1]
    cut = replace(sequence)
    _cut(cut, item.n, keep - 1)
    cut.copy_rows = [(source, -1, item.n % size)]
    room = _room_after(state, session, item.seq, cut)
    if room < 1:
        raise Refused("out_of_pages", need=1, available=max(0, room), never_fits=keep + 1 > len(pool.state))
    named = unpack_pages(actual.tail) if isinstance(actual, commands.Truncated) else []
    with state.settled():
        vars(sequence).update(vars(cut))
    fresh = state.take(pool, [], 1, named)
    state.counters["truncates"] += 1
    sequence.pages = sequence.pages + fresh
    sequence.copy_rows = [(source, fresh[0], item.n % size)]
    return commands.Truncated(keep, pack_pages(fresh), sequence.copy_rows)


def _cut(sequence: Sequence, n: int, keep: int) -> None:
    """The first n tokens and the first ``keep`` pages stay."""
    sequence.tokens = sequence.tokens[:n]
    sequence.pages = sequence.pages[:keep]
    sequence.committed = min(sequence.committed, n)
    sequence.cached = min(sequence.cached, n)
    sequence.published = min(sequence.published, keep)
    sequence.depth = min(sequence.depth, keep)
    sequence.born_shared = min(sequence.born_shared, keep)


def _room_after(state: State, session: SessionModel, seq: int, cut: Sequence) -> int:
    """What would be available to the session if the sequence held only what ``cut`` holds."""
    pool = state.pools[cut.pool]
    original = session.sequences[seq]
    before = state.held(pool)
    session.sequences[seq] = cut
    gone = sum(1 for page in before - state.held(pool) if pool.state[page] != CACHED)
    room = state.available(pool, session, [], decode=True, coming=gone)
    session.sequences[seq] = original
    return room


def commit(state: State, session: SessionModel, item: commands.Commit, copied: bool = True) -> None:
    """``copied``: its rows are; not if they were announced in this very message."""
    sequence = own(state, session, item.seq)
    pool = state.pools[sequence.pool]
    if not sequence.committed <= item.n <= len(sequence.tokens):
        raise Refused("bad_request")
    with state.settled():
        if copied:
            sequence.copy_rows = []
        sequence.committed = item.n
        state.publish(sequence, item.n // pool.page_size)


def extend(state: State, session: SessionModel, item: commands.Extend, actual: object) -> bytes:
    sequence = known(session, item.seq)
    pool = state.pools[sequence.pool]
    if len(item.tokens) % 4:
        raise Refused("bad_request")
    added = unpack_tokens(item.tokens)
    length = len(sequence.tokens) + len(added)
    if length + item.headroom > state.config.limits.tokens:
        raise Refused("limit_exceeded")
    need = max(0, ceil_pages(length + item.headroom, pool.page_size) - len(sequence.pages))
    room = state.available(pool, session, [], decode=True)
    limits = state.pool_config[pool.name]
    if need and need > room:
        total = len(sequence.pages) + need
        never = total > limits.pages or 0 < limits.session_cap_pages < need
        raise Refused("out_of_pages", need=need, available=max(0, room), never_fits=never)
    named = unpack_pages(actual) if isinstance(actual, bytes) else []
    fresh = state.take(pool, [], need, named)
    sequence.tokens = sequence.tokens + added
    sequence.pages = sequence.pages + fresh
    return pack_pages(fresh)


def share(state: State, session: SessionModel, item: commands.Share, actual: object) -> commands.Shared:
    parent = own(state, session, item.seq)
    pool = state.pools[parent.pool]
    size = pool.page_size
    at = parent.committed if item.at is None else item.at
    children = range(item.first_child, item.first_child + item.count)
    new_ids(state, session, children)
    if at > parent.committed:
        raise Refused("bad_request")
    shared = min(at // size, parent.published)
    rows = at - shared * size
    need = item.count if rows else 0
    source = parent.pages[shared : shared + 1] if rows else []
    room = state.available(pool, session, [], decode=True)
    limits = state.pool_config[pool.name]
    if need and need > room:
        never = shared + 1 + need > limits.pages or 0 < limits.session_cap_pages < need
        raise Refused("out_of_pages", need=need, available=max(0, room), never_fits=never)
    named = unpack_pages(actual.tails) if isinstance(actual, commands.Shared) else []
    fresh = state.take(pool, [], need, named)
    copy_rows = [(source[0], page, rows) for page in fresh]
    for number, child in enumerate(children):
        session.sequences[child] = Sequence(
            pool=parent.pool,
            namespace=parent.namespace,
            epoch=parent.epoch,
            tokens=parent.tokens[:at],
            pages=parent.pages[:shared] + fresh[number : number + 1],
            published=shared,
            depth=min(parent.depth, shared),
            committed=at,
            cached=at,
            born_shared=shared,
            copy_rows=copy_rows[number : number + 1],
            retain=parent.retain,
        )
    state.counters["forks"] += item.count
    return commands.Shared(at, shared, pack_pages(fresh), copy_rows)


def entangled(state: State, sequence: Sequence) -> bool:
    """Whether rows are still to be copied between this sequence and a page of another one that is not in the cache."""
    pool = state.pools[sequence.pool]
    others = [other for other in state.sequences() if other.pool == sequence.pool]
    outside = [page for other in others for page in other.sources() if pool.state[page] != CACHED]
    mine = [page for page in sequence.sources() if pool.state[page] != CACHED]
    return bool(mine) or any(page in outside for page in sequence.pages[sequence.published :])


def compact(state: State, session: SessionModel, seq: int) -> commands.Compacted:
    sequence = own(state, session, seq)
    pool = state.pools[sequence.pool]
    with state.settled():
        pages = list(sequence.pages)
        for index in range(sequence.depth):
            if pool.state[pages[index]] == SHADOW:
                pages[index] = pool.cache[pool.key(sequence, index)]
        sequence.pages = pages
    return commands.Compacted(pack_pages(pages))
