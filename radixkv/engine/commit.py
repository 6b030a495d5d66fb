"""Carrying out what was planned. Nothing here can fail: whoever calls has a plan that says there is enough."""

from __future__ import annotations

from array import array

from radixkv.allocator.page_states import PRIVATE, SHADOW
from radixkv.commands import CopyRow, Reserve, Reserved, Share, Shared, Truncate, Truncated
from radixkv.engine import holding, life
from radixkv.engine.namespaces import Namespace
from radixkv.engine.plan import ReservePlan, SharePlan, TruncatePlan
from radixkv.engine.pool import IN_TREE, Pool
from radixkv.engine.sequence import Sequence
from radixkv.tree.node import Node
from radixkv.types import PAGE_ID_BYTES, TOKEN_BYTES


def do_reserve(
    pool: Pool, session: int, namespace: Namespace, body: Reserve, plan: ReservePlan
) -> tuple[Sequence, Reserved]:
    match, shared, cached = plan.match, plan.shared, plan.cached
    root = namespace.root
    node: Node = root
    if match.pages:
        node = pool.pin(match)
    found = b"".join(match.parts)
    new = pool.take(plan.new, session, root)
    table = found[: shared * PAGE_ID_BYTES] + new.tobytes()
    seq = Sequence(
        pool.name, session, body.seq, root, node, body.tokens, array("i", table),
        match.pages, shared, shared, cached, cached,
    )  # fmt: skip
    rows: list[CopyRow] = []
    if plan.copies:
        seq.source = int.from_bytes(found[-PAGE_ID_BYTES:], "little")
        rows.append((seq.source, new[0], pool.page_size - 1))
    life.opened(pool, namespace)
    counters = pool.counters
    counters["asked_tokens"] += len(body.tokens) // TOKEN_BYTES
    counters["hit_tokens"] += cached
    return seq, Reserved(table, cached, shared * pool.page_size, rows)


def do_commit(pool: Pool, seq: Sequence, n: int) -> None:
    seq.committed = n
    full = n // pool.page_size
    if full > seq.published:
        life.publish_in_slices(pool, seq, full)
    if seq.source >= 0:
        holding.release_source(pool, seq)


def do_extend(pool: Pool, seq: Sequence, tokens: bytes, new: int) -> bytes:
    """Returns the packed ids of the appended pages."""
    if tokens:
        if isinstance(seq.tokens, bytes):
            seq.tokens = bytearray(seq.tokens)
        seq.tokens += tokens
    if tokens and pool.flights is not None:
        pool.flights.note(seq)
    if not new:
        return b""
    pages = pool.take(new, seq.session, seq.root)
    seq.pages.extend(pages)
    return pages.tobytes()


def do_truncate(pool: Pool, seq: Sequence, item: Truncate, plan: TruncatePlan) -> Truncated:
    size = pool.page_size
    last = item.n // size
    if isinstance(seq.tokens, bytes):
        seq.tokens = bytearray(seq.tokens)
    del seq.tokens[item.n * TOKEN_BYTES :]
    if last < seq.published:
        reply = _cut_immutable(pool, seq, last, plan)
    else:
        if plan.kept <= seq.published:
            holding.release_source(pool, seq)
        _cut_private(pool, seq, max(plan.kept, seq.published))
        reply = Truncated(plan.kept)
    seq.committed = min(seq.committed, item.n)
    seq.cached = min(seq.cached, item.n)
    seq.shared = min(seq.shared, len(seq.pages))
    if pool.flights is not None:
        pool.flights.note(seq)
    return reply


def _cut_private(pool: Pool, seq: Sequence, kept: int) -> None:
    dropped = seq.pages[kept:]
    del seq.pages[kept:]
    pool.drop(dropped, PRIVATE, None)


def _cut_immutable(pool: Pool, seq: Sequence, last: int, plan: TruncatePlan) -> Truncated:
    """Keep ``last`` immutable pages; rows of the next one, if wanted, are to be copied into a private page."""
    source = seq.pages[last] if plan.rows else -1
    in_tree = source >= 0 and pool.pages.states[source] in IN_TREE
    if source >= 0 and not in_tree:
        pool.pages.hold(source)
    holding.let_go(pool, seq, last + in_tree)
    _cut_private(pool, seq, seq.published)
    shadows = seq.shadows.intersection(seq.pages[last:])
    if shadows:
        seq.shadows -= shadows
        pool.drop(array("i", sorted(shadows)), SHADOW, None)
    seq.published = last
    del seq.pages[last:]
    seq.shared = min(seq.shared, last)
    if source < 0:
        return Truncated(plan.kept)
    seq.source = source
    page = pool.take(1, seq.session, seq.root)
    seq.pages.extend(page)
    return Truncated(plan.kept, page.tobytes(), [(source, page[0], plan.rows)])


def do_share(pool: Pool, seq: Sequence, item: Share, plan: SharePlan) -> tuple[list[Sequence], Shared]:
    """Children hold the shared pages and, while rows are to be copied, the page they come from."""
    source = seq.pages[plan.shared] if plan.rows else -1
    in_tree = source >= 0 and pool.pages.states[source] in IN_TREE
    depth = min(seq.depth, plan.shared + in_tree)
    node = pool.tree.node_at(seq.node, seq.depth - depth) if item.count else seq.node
    if depth and item.count:
        pool.tree.hold(node, item.count)
    table = seq.pages[: plan.shared]
    shadows = seq.shadows.intersection(table)
    tails = pool.take(item.count if plan.rows else 0, seq.session, seq.root)
    tokens = bytes(seq.tokens[: plan.at * TOKEN_BYTES])
    children = []
    rows: list[CopyRow] = []
    for index in range(item.count):
        child = Sequence(pool.name, seq.session, item.first_child + index, seq.root, node, tokens, table[:])
        child.depth = depth
        child.shared = child.published = plan.shared
        child.cached = child.committed = plan.at
        child.shadows = shadows
        child.retain = seq.retain
        for page in shadows:
            pool.pages.hold(page)
        if source >= 0:
            child.pages.append(tails[index])
            child.source = source
            rows.append((source, tails[index], plan.rows))
            _hold_source(pool, child, source, in_tree)
        life.opened(pool, pool.namespaces.of(seq.root))
        children.append(child)
    return children, Shared(plan.at, plan.shared, tails.tobytes(), rows)


def _hold_source(pool: Pool, child: Sequence, source: int, in_tree: bool) -> None:
    if in_tree:
        return  # the child's path reaches over it
    pool.pages.hold(source)
    if pool.pages.states[source] == PRIVATE:
        pool.copying.setdefault(source, []).append(child)


def do_compact(pool: Pool, seq: Sequence) -> bytes:
    """Canonical pages for shadows, where the path has them. Returns the new page table, packed."""
    depth = min(seq.depth, seq.published)
    if seq.shadows and depth:
        path = pool.tree.path_pages(seq.node)[: depth * PAGE_ID_BYTES]
        shadows = seq.shadows.intersection(seq.pages[:depth])
        seq.pages = type(seq.pages)("i", path) + seq.pages[depth:]
        seq.shadows -= shadows
        pool.drop(array("i", sorted(shadows)), SHADOW, None)
    return seq.pages.tobytes()
