"""How firmly pages are kept when nobody holds them any longer: what a reserve says of its tokens, and what comes of it.

A sequence that lets go of pages says their priority, be they computed by it or found. What the last one says counts;
who says nothing changes nothing. What it means for the order of eviction is ``evictor/priorities.py``: that order is
the only place where a priority is known, so it can make nobody wait and keep nobody out. The next daemon knows of none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec.structs import replace

from radixkv.commands import Reserve, Retain
from radixkv.engine.plan import ceil_div
from radixkv.engine.pool import Pool
from radixkv.engine.sequence import Sequence
from radixkv.errors import BadRequest, LimitExceeded
from radixkv.evictor.lru import LRU
from radixkv.evictor.policy import Mark
from radixkv.evictor.priorities import DEFAULT, NEVER, PIN, Priorities
from radixkv.tree.node import Node
from radixkv.tree.walk import Match
from radixkv.types import TOKEN_BYTES

RANGES_MAX = 64
"""In one reserve."""


def ranges(pool: Pool, body: Reserve) -> tuple[Retain, ...]:
    """What the sequence will be told. Errors: BadRequest, LimitExceeded (also of what could never be pinned)."""
    if pool.config.policy != "lru":
        raise BadRequest("priorities need a pool with the policy lru", policy=pool.config.policy)
    if pool.shares is not None:
        raise BadRequest("priorities need a pool without floors and caps of namespaces", pool=pool.name)
    if len(body.retain) > RANGES_MAX:
        raise LimitExceeded("too many ranges with a priority", ranges=len(body.retain), limit=RANGES_MAX)
    before: int | None = 0
    for one in body.retain:
        if before is None or one.start < before or (one.end is not None and one.end < one.start):
            raise BadRequest("ranges of tokens come in order and do not overlap", start=one.start)
        if one.priority == PIN and one.for_s is None:
            raise BadRequest("a pin, priority 100, has a limit in time")
        before = one.end
    length = len(body.tokens) // TOKEN_BYTES
    made = tuple(
        replace(one, end=max(one.start, length)) if one.priority == PIN and one.end is None else one
        for one in body.retain
    )
    _within_the_limit(pool, _asked(pool, made), 0)
    return made


def check_pins(pool: Pool, retain: tuple[Retain, ...], match: Match) -> None:
    """Errors: LimitExceeded: with what others have pinned now it would be too much."""
    asked = _asked(pool, retain)
    if asked and pool.priorities is not None:
        own = sum(pages for node, pages in _matched(match) if pool.priorities.pins(node))
        _within_the_limit(pool, asked, max(0, pool.priorities.pinned_pages - own))


def _asked(pool: Pool, retain: tuple[Retain, ...]) -> int:
    """Pages to be pinned."""
    pins = (one for one in retain if one.priority == PIN)
    return sum(ceil_div(one.end, pool.page_size) - ceil_div(one.start, pool.page_size) for one in pins if one.end)


def _within_the_limit(pool: Pool, asked: int, others: int) -> None:
    limit = pool.config.pin_limit_pages
    if asked + others > limit:
        raise LimitExceeded("so many pages cannot be pinned", asked=asked, pinned_pages=others, limit=limit)


def _matched(match: Match) -> Iterator[tuple[Node, int]]:
    """Runs, and how many of their pages."""
    if match.inside is not None:
        yield match.inside, match.inside_pages
    node = match.node
    while node.parent is not None:
        yield node, node.page_count
        node = node.parent


# -- in the order of eviction -------------------------------------------------------------------------------------


def begin_priorities(pool: Pool) -> None:
    """From now on runs can have some. Until then nothing is paid for them."""
    assert isinstance(pool.order, LRU)
    now_ms = round(pool.now * 1000)
    pool.order = pool.priorities = Priorities(pool.order, pool.config.pin_limit_pages, now_ms)
    if pool.host is not None:
        pool.host.begin_priorities(now_ms)


def next_end(pool: Pool) -> float | None:
    """When the next priority is over (monotonic seconds)."""
    ends = [
        None if pool.priorities is None else pool.priorities.next_end_ms(),
        None if pool.host is None else pool.host.next_end_ms(),
    ]
    return min((end / 1000 for end in ends if end is not None), default=None)


def expire(pool: Pool, now: float, budget: int) -> None:
    """Priorities whose time is over are."""
    assert pool.priorities is not None
    pool.priorities.expire(round(now * 1000), budget)
    if pool.host is not None:
        pool.host.expire(round(now * 1000), budget)


def say(pool: Pool, seq: Sequence, depth: int) -> None:
    """The sequence says the priorities of what it lets go of: path beyond ``depth``, source of copy_rows."""
    tree, source = pool.tree, seq.source_node
    below_source = 0 if source is None else sum(node.page_count for node in tree.path(source))
    for one in seq.retain:
        mark, first = _mark_of(pool, one), -(-one.start // pool.page_size)
        last = math.inf if one.end is None else -(-one.end // pool.page_size)
        for node in _stretch(pool, seq.node, seq.depth, max(first, depth), last):
            node.mark = mark
        if source is not None:
            there = _stretch(pool, source, below_source, first, last)
            own = set(tree.path(seq.node))
            for node in there:
                if node not in own:
                    node.mark = mark


def _stretch(pool: Pool, end: Node, depth: int, first: int, last: float) -> list[Node]:
    """Pages ``first`` to ``last`` (not with it) of the path of ``depth`` to ``end``, if they exist."""
    last = int(min(last, depth))
    return pool.tree.stretch(end, depth - last, last - first) if first < last else []


def _mark_of(pool: Pool, one: Retain) -> Mark:
    if one.priority == DEFAULT:
        return ()
    return (one.priority, NEVER if one.for_s is None else round((pool.now + one.for_s) * 1000))
