"""Planning: what a command would take, and whether there is as much. Only reads; says no by raising.

What comes out is carried out by ``commit.py``, which cannot fail.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from radixkv.allocator.page_states import FREE, QUARANTINED
from radixkv.commands import Extend, Reply, Reserve, Share, Truncate
from radixkv.config import LAST_PAGE_MODES, Limits
from radixkv.engine.pool import IN_TREE, Pool
from radixkv.engine.sequence import Sequence
from radixkv.errors import BadRequest, LimitExceeded, OutOfPages
from radixkv.sessions.registry import Session
from radixkv.tree.node import Root
from radixkv.tree.walk import Match, walk
from radixkv.types import TOKEN_BYTES

Worker = Session[Sequence, Reply]


class ReservePlan(Struct, frozen=True):
    """``shared`` pages of the match go into the table; with ``copies`` the match is one page longer: the source."""

    match: Match
    shared: int
    cached: int
    copies: bool
    new: int


class TruncatePlan(NamedTuple):
    kept: int
    rows: int
    """Rows to copy into a private page that replaces the last kept one; 0: none does."""


class SharePlan(NamedTuple):
    at: int
    shared: int
    rows: int


def ceil_div(value: int, size: int) -> int:
    return -(-value // size)


def floor_missing(pool: Pool, session: Worker) -> int:
    """How many pages this session is short of its guaranteed floor."""
    floor = pool.config.session_floor_pages
    return max(0, floor - session.charged.get(pool.name, 0)) if floor else 0


def token_count(packed: bytes, limits: Limits, already: int, headroom: int) -> int:
    """Number of packed tokens. Errors: BadRequest (no multiple of 4), LimitExceeded (with those there are already)."""
    count = len(packed) // TOKEN_BYTES
    if len(packed) % TOKEN_BYTES:
        raise BadRequest("tokens are 4 bytes each", bytes=len(packed))
    if already + count + headroom > limits.tokens:
        raise LimitExceeded(
            "a sequence with its headroom may have at most so many tokens",
            tokens=already + count + headroom,
            limit=limits.tokens,
        )
    return count


def require(pool: Pool, session: Worker, need: int, room: int, largest: int) -> None:
    """Errors: OutOfPages unless ``need`` more pages fit into ``room`` and under the session's cap.

    ``largest`` is the most there could ever be of what is asked for; beyond it no waiting helps.
    """
    cap = pool.config.session_cap_pages
    if cap:
        room = min(room, cap - session.charged.get(pool.name, 0))
    if need > room:
        raise out_of_pages(pool, need, room, need > largest or bool(cap and need > cap))


def out_of_pages(pool: Pool, need: int, room: int, never_fits: bool) -> OutOfPages:
    words = "; ".join(["not enough pages", *quarantined(pool)])
    return OutOfPages(words, need=need, available=max(0, room), never_fits=never_fits)


def quarantined(pool: Pool) -> list[str]:
    """For people: that there are pages which no session has and nobody can get, if there are."""
    pages = pool.pages.counts[QUARANTINED]
    return [f"quarantined, as processes that had them may still write to them: {pages}"] if pages else []


def plan_reserve(pool: Pool, session: Worker, body: Reserve) -> ReservePlan:
    """Errors: BadRequest, OutOfPages."""
    if body.last_page not in LAST_PAGE_MODES:
        raise BadRequest(f"last_page is one of {', '.join(LAST_PAGE_MODES)}", last_page=body.last_page)
    tokens = len(body.tokens) // TOKEN_BYTES
    total = -(-(tokens + body.headroom) // pool.page_size)
    namespace = pool.namespaces.find(body.namespace)
    match = NO_MATCH
    if namespace is not None:
        match = walk(namespace.root, body.tokens, 0, len(body.tokens), pool.tree.page_token_bytes)
    root = None if namespace is None else namespace.root
    plan = _shape(pool, match, total, tokens, body.last_page)
    try:
        _fits(pool, session, plan, total, root)
    except OutOfPages:
        if not plan.copies:
            raise
        plan = _shape(pool, match, total, tokens, "drop")
        _fits(pool, session, plan, total, root)
    if match.pages > plan.shared + plan.copies:
        assert namespace is not None
        shorter = pool.tree.match(namespace.root, body.tokens, 0, plan.shared * pool.tree.page_token_bytes)
        plan = replace(plan, match=shorter)
    return plan


NO_MATCH = Match(Root(-1, 0), 0, None, 0, [])


def _shape(pool: Pool, match: Match, total: int, tokens: int, last_page: str) -> ReservePlan:
    """How a match becomes a page table; of a fully cached prompt one token is left to compute."""
    size = pool.page_size
    shared = match.pages
    if shared == 0 or shared * size < tokens:
        return ReservePlan(match, shared, shared * size, False, total - shared)
    if last_page == "keep":
        return ReservePlan(match, shared, tokens - 1, False, total - shared)
    shared -= 1
    if last_page == "copy" and size > 1:
        return ReservePlan(match, shared, tokens - 1, True, total - shared)
    return ReservePlan(match, shared, shared * size, False, total - shared)


def _fits(pool: Pool, session: Worker, plan: ReservePlan, total: int, root: Root | None) -> None:
    config = pool.config
    reserve = config.decode_reserve_pages
    matched = plan.match.pages
    spare = pool.pages.counts[FREE] + pool.tree.idle_pages - pool.floors_missing
    usual = not config.session_cap_pages and not pool.frozen and pool.shares is None
    if plan.new + matched + reserve <= spare and usual:
        return  # the usual case: fits even if the whole path were idle and nothing missing to the session's own floor
    waking = 0 if pool.frozen else pool.tree.idle_on_path(plan.match)
    if matched > plan.shared + plan.copies and waking:
        waking -= 1
    if plan.new == 0 and waking == 0:
        return  # takes nothing from anybody, however short the pool is
    room = pool.room(floor_missing(pool, session), root, reserve) - waking
    largest = min(pool.pages.size - reserve, pool.largest) - (total - plan.new)
    require(pool, session, plan.new, room, largest)


def check_room(pool: Pool, session: Worker, plan: ReservePlan) -> None:
    """For a plan that was made otherwise, in a pool with a host tier. Errors: OutOfPages."""
    _fits(pool, session, plan, plan.shared + plan.new, None)  # the root counts where namespaces have floors or caps


def pages_to_add(pool: Pool, seq: Sequence, item: Extend, limits: Limits) -> int:
    """By how many pages the table has to grow. Errors: BadRequest, LimitExceeded."""
    length = seq.length
    length += token_count(item.tokens, limits, length, item.headroom)
    return max(0, ceil_div(length + item.headroom, pool.page_size) - len(seq.pages))


def plan_extend(pool: Pool, session: Worker, seq: Sequence, new: int) -> None:
    """Errors: OutOfPages."""
    room = pool.room(floor_missing(pool, session), seq.root)
    require(pool, session, new, room, pool.largest - len(seq.pages))


def check_commit(seq: Sequence, n: int) -> None:
    """Errors: BadRequest."""
    if not seq.committed <= n <= len(seq.tokens) // TOKEN_BYTES:
        raise BadRequest(
            "commit counts from token 0, never goes back and never beyond the length",
            n=n,
            committed_tokens=seq.committed,
            length=seq.length,
        )


def plan_truncate(pool: Pool, session: Worker, seq: Sequence, item: Truncate) -> TruncatePlan:
    """Errors: BadRequest, OutOfPages (the private page that replaces an immutable one)."""
    if item.n > seq.length:
        raise BadRequest("truncate keeps at most what there is", n=item.n, length=seq.length)
    last, rows = divmod(item.n, pool.page_size)
    kept = last + (rows > 0)
    if last >= seq.published or not rows:
        return TruncatePlan(kept, 0)
    room = pool.room(floor_missing(pool, session), seq.root) + _given_back(pool, seq, kept)
    cap = pool.config.session_cap_pages
    if room < 1:
        raise out_of_pages(pool, 1, room, pool.largest < kept + 1)
    charged_after = session.charged.get(pool.name, 0) - seq.charged + (kept - min(seq.shared, last))
    if cap and charged_after > cap:
        raise out_of_pages(pool, 1, 0, never_fits=False)
    return TruncatePlan(kept, rows)


def _given_back(pool: Pool, seq: Sequence, kept: int) -> int:
    """Pages that come free or fall idle when the table is cut to its first ``kept`` pages, the last of them immutable.

    That last one stays held as the source of the rows: on the path if it is cached, by itself if it is a shadow.
    """
    states, extra = pool.pages.states, pool.pages.extra_holders
    back = sum(1 for page in seq.pages[kept:] if states[page] not in IN_TREE and page not in extra)
    depth = kept if states[seq.pages[kept - 1]] in IN_TREE else kept - 1
    if seq.depth > depth and not pool.frozen:
        back += pool.tree.sole_pages(seq.node, seq.depth - depth)
    if seq.counts_source and seq.source not in extra:
        back += 1
    return back


def plan_share(pool: Pool, session: Worker, seq: Sequence, item: Share) -> SharePlan:
    """Errors: BadRequest, OutOfPages."""
    at = seq.committed if item.at is None else item.at
    if at > seq.committed:
        raise BadRequest("a fork begins at a committed token", at=at, committed_tokens=seq.committed)
    shared, rows = divmod(at, pool.page_size)
    if rows and item.count:
        room = pool.room(floor_missing(pool, session), seq.root)
        require(pool, session, item.count, room, pool.largest - shared - 1)
    return SharePlan(at, shared, rows)
