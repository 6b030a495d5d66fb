"""How firmly pages are kept when nobody holds them any longer: what a reserve says of its tokens, and what comes of it.

A sequence that lets go of pages says their priority, be they computed by it or found. What the last one says counts;
who says nothing changes nothing. What it means for the order of eviction is ``evictor/priorities.py``: that order is
the only place where a priority is known, so it can make nobody wait and keep nobody out. The next daemon knows of none.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from radixkv.commands import Reserve, Retain
from radixkv.engine.plan import ceil_div
from radixkv.engine.pool import Pool
from radixkv.errors import BadRequest, LimitExceeded
from radixkv.evictor.priorities import PIN
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
