"""After a restart: sessions come back and claim their sequences. What cannot be proven is lost.

::

    known ──rejoin──> back ──resume, last──> settled        all settled, ended, or the time is over:
      │                 │                                   the window closes, eviction goes on
      └──── its end ────┴──> over                           later ones may still come, and may find pages evicted

A claim names pages by id and generation. A page that still has its generation has the content that the worker was
granted: nobody has had it since. Cached pages must also be where the claim's tokens lead in the tree, and private ones
must belong to the session.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.allocator.page_states import Event
from radixkv.allocator.page_states import State as PageState
from radixkv.commands import Claim, Failure, Kept, Resume, Resumed, failure
from radixkv.engine import life, plan
from radixkv.engine.lineage import Lineage
from radixkv.engine.plan import Worker
from radixkv.engine.pool import IN_TREE, Pool, namespace_record
from radixkv.engine.sequence import Sequence
from radixkv.engine.state import State
from radixkv.errors import BadRequest, RadixKVError, SessionLost
from radixkv.tree.node import Root
from radixkv.tree.walk import Match
from radixkv.types import PAGE_ID_BYTES, TOKEN_BYTES

_GENERATION = np.dtype("<u8")
_PAGE = np.dtype("<i4")


class _Proof(NamedTuple):
    """A claim that holds. ``table[:published]`` is immutable; ``shadows`` are pages of it outside the tree."""

    pool: Pool
    root: Root
    match: Match
    table: NDArray[np.int32]
    published: int
    shadows: list[int]
    committed: int
    source: int
    """The page whose rows are still to be copied; -1: none."""


def resume(state: State, session: Worker, body: Resume) -> Resumed:
    results = [_claimed(state, session, claim) for claim in body.claims]
    if body.last:
        state.settled(session)
    return Resumed(results)


def _claimed(state: State, session: Worker, claim: Claim) -> Kept | Failure:
    try:
        proof = _prove(state, session, claim)
    except RadixKVError as error:
        _remember(state, session, claim)
        return failure(error)
    _take_back(state, session, claim, proof)
    immutable = max(proof.committed // proof.pool.page_size, proof.published)
    return Kept(proof.committed, immutable * proof.pool.page_size)


def _remember(state: State, session: Worker, claim: Claim) -> None:
    """The worker may be writing to these pages when it learns that the sequence is lost."""
    pool = state.pools.get(claim.pool)
    if pool is None or pool.lineage is None:
        return
    count = min(len(claim.page_table) // PAGE_ID_BYTES, len(claim.generations) // _GENERATION.itemsize)
    pages = np.frombuffer(claim.page_table, _PAGE, count)
    generations = np.frombuffer(claim.generations, _GENERATION, count)
    there = (pages >= 0) & (pages < pool.pages.size)
    granted = pages[there][pool.lineage.generations[pages[there]] == generations[there]]
    own = pool.lineage.unclaimed.get(session.id, set()).intersection(granted.tolist())
    if own:
        state.refused.setdefault(session.id, {}).setdefault(pool.name, set()).update(own)


# -- planning: only reads -----------------------------------------------------------------------------------------


def _prove(state: State, session: Worker, claim: Claim) -> _Proof:
    """Errors: SessionLost for what cannot be proven; BadRequest, LimitExceeded for what never could be."""
    pool = state.pool(claim.pool)
    state.new_ids(session, claim.seq, 1)
    lineage = pool.lineage
    if lineage is None or session.id not in state.resuming:
        raise SessionLost("nothing of an earlier daemon's time can be claimed any more")
    table, length = _shape(state, pool, claim)
    wrong = np.flatnonzero(lineage.generations[table] != np.frombuffer(claim.generations, _GENERATION))
    if len(wrong):
        raise SessionLost("a page has been handed out again", page=int(table[wrong[0]]))
    root = _root(pool, lineage, table, claim)
    published, shadows = _immutable(pool, lineage, session, table)
    committed = _committed(claim, published * pool.page_size)
    if committed > length:
        raise BadRequest("more is complete than there are tokens", committed_tokens=committed, length=length)
    if committed // pool.page_size > published and pool.config.ranks > len(session.ranks):
        raise BadRequest("nothing can be complete: not all ranks have joined", committed_tokens=committed)
    match = _path(pool, root, claim, table[:published])
    source = _source(pool, claim, table, published)
    if source >= 0 and not (_is_ours(pool, session, source) or _is_next(pool, claim, match, source)):
        raise SessionLost("the source of copy_rows is not there any more", page=source)
    return _Proof(pool, root, match, table, published, shadows, committed, source)


def _committed(claim: Claim, immutable: int) -> int:
    """What an executed commit made immutable is complete, also if it was not answered. The last token of a prompt that
    was found whole and kept is not, until its worker says so: one token that is immutable and not complete may be that
    one, however long the sequence has become. If it was a commit, the worker asks for it again."""
    return claim.committed if claim.committed + 1 == immutable else max(claim.committed, immutable)


def _shape(state: State, pool: Pool, claim: Claim) -> tuple[NDArray[np.int32], int]:
    """Page table and length, if they belong together."""
    length = plan.token_count(claim.tokens, state.config.limits, 0, 0)
    count, odd = divmod(len(claim.page_table), PAGE_ID_BYTES)
    if odd or len(claim.generations) != count * _GENERATION.itemsize or count * pool.page_size < length:
        raise BadRequest("tokens, page table and generations do not belong together", pages=count, length=length)
    table = np.frombuffer(claim.page_table, _PAGE)
    if count and (table.min() < 0 or table.max() >= pool.pages.size or len(np.unique(table)) < count):
        raise BadRequest("a page table names each of the pool's pages at most once", pages=count)
    return table, length


def _root(pool: Pool, lineage: Lineage, table: NDArray[np.int32], claim: Claim) -> Root:
    """The tree of the epoch in which the pages were handed out. Namespaces are compared by their bytes."""
    if not len(table):
        namespace, made = pool.namespaces.open(claim.namespace)
        if made:
            pool.writes.append(namespace_record(pool.name, namespace))
        return namespace.root
    scopes = np.unique(lineage.scopes[table])
    known = pool.namespaces.find(claim.namespace)
    epoch, identity = divmod(int(scopes[0]), 2**32)
    if len(scopes) > 1 or known is None or known.id != identity:
        raise SessionLost("the pages are not of this namespace")
    root = known.root if known.root.epoch == epoch else lineage.roots.get((identity, epoch))
    if root is None:
        root = Root(identity, epoch)
        root.retired = True
        lineage.roots[identity, epoch] = root
    return root


def _immutable(pool: Pool, lineage: Lineage, session: Worker, table: NDArray[np.int32]) -> tuple[int, list[int]]:
    """How many leading pages are cached or shadows, and which are shadows. The others must be private and ours."""
    states = np.frombuffer(pool.pages.states, np.uint8)[table]
    origins = lineage.origins[table]
    waiting = states == PageState.QUARANTINED
    shadow = (origins == PageState.SHADOW) & (waiting | (states == PageState.SHADOW))
    immutable = shadow | np.isin(states, IN_TREE)
    published = int(np.argmin(immutable)) if not immutable.all() else len(table)
    own = waiting & (origins == PageState.PRIVATE) & (lineage.owners[table] == session.id)
    if not own[published:].all():
        raise SessionLost("a page belongs to somebody else now", page=int(table[published:][~own[published:]][0]))
    return published, table[:published][shadow[:published]].tolist()


def _path(pool: Pool, root: Root, claim: Claim, published: NDArray[np.int32]) -> Match:
    """The path of the published pages' tokens; its pages are those of the table, but for shadows.

    In a retired tree nothing will be added: there the path need not reach over shadows at its end.
    """
    cached = np.isin(np.frombuffer(pool.pages.states, np.uint8)[published], IN_TREE)
    depth = len(published)
    if root.retired:
        depth -= int(np.argmax(cached[::-1])) if cached.any() else depth
    match = pool.tree.match(root, claim.tokens, 0, depth * pool.tree.page_token_bytes)
    if match.pages < depth:
        raise SessionLost("the path has been evicted", pages=depth, found=match.pages)
    found = np.frombuffer(b"".join(match.parts), _PAGE)
    if (cached[:depth] & (found != published[:depth])).any():
        raise SessionLost("the pages are not those of these tokens")
    return match


def _source(pool: Pool, claim: Claim, table: NDArray[np.int32], published: int) -> int:
    """The source of rows still to be copied; -1: none."""
    if not claim.copy_rows:
        return -1
    source, target, _ = claim.copy_rows[0]
    if len(claim.copy_rows) > 1 or published >= len(table) or table[published] != target:
        raise BadRequest("rows are copied into the page behind the immutable ones", rows=len(claim.copy_rows))
    if not 0 <= source < pool.pages.size:
        raise BadRequest("rows are copied from a page of the pool", page=source)
    return source


def _is_ours(pool: Pool, session: Worker, source: int) -> bool:
    """Outside the tree, and never anybody else's: it is what it was, whatever happened while the worker was away."""
    lineage, state = pool.lineage, pool.pages.states[source]
    assert lineage is not None
    ours = lineage.owners[source] == session.id and lineage.origins[source] != PageState.QUARANTINED
    return bool(ours) and state in (PageState.QUARANTINED, PageState.PRIVATE, PageState.SHADOW)


def _is_next(pool: Pool, claim: Claim, match: Match, source: int) -> bool:
    """In the tree, right behind the path, and its tokens are those of the rows: others may have had it meanwhile."""
    size = pool.tree.page_token_bytes
    begin = match.pages * size
    rows = claim.tokens[begin : begin + min(claim.copy_rows[0][2] * TOKEN_BYTES, size)]
    skipped = match.inside_pages
    nodes = (match.node.children or {}).values() if match.inside is None else (match.inside,)
    packed = source.to_bytes(PAGE_ID_BYTES, "little")
    return any(
        node.pages[skipped * PAGE_ID_BYTES : (skipped + 1) * PAGE_ID_BYTES] == packed
        and node.tokens[skipped * size : (skipped + 1) * size].startswith(rows)
        for node in nodes
    )


# -- carrying out: cannot fail ------------------------------------------------------------------------------------


def _take_back(state: State, session: Worker, claim: Claim, proof: _Proof) -> None:
    pool = proof.pool
    node = pool.pin(proof.match)
    table = array("i", proof.table.tobytes())
    seq = Sequence(pool.name, session.id, claim.seq, proof.root, node, claim.tokens, table)
    seq.depth = proof.match.pages
    seq.published = proof.published
    seq.committed = proof.committed
    seq.cached = min(claim.cached, proof.committed)
    seq.shared = min(proof.published, seq.cached // pool.page_size)
    seq.shadows = frozenset(proof.shadows)
    _hold(pool, seq)
    life.opened(pool, pool.namespaces.of(seq.root))
    session.sequences[seq.id] = seq
    state.charge(session, pool, seq.charged)
    if proof.source >= 0:
        _hold_source(pool, seq, proof.source)
    if pool.flights is not None:
        pool.flights.note(seq)
    full = seq.committed // pool.page_size
    if full > seq.published:
        life.publish_in_slices(pool, seq, full)


def _hold(pool: Pool, seq: Sequence) -> None:
    """Pages outside the tree go from waiting for a claim into the sequence's hands."""
    lineage = pool.lineage
    assert lineage is not None
    private = seq.pages[seq.published :]
    pool.pages.move(private, PageState.QUARANTINED, Event.CLAIM)
    if pool.shares is not None:
        pool.shares.taken(private, seq.root.namespace)
    lineage.claimed(private)
    for page in seq.shadows:
        _hold_shadow(pool, lineage, page, seq.root.namespace)


def _hold_shadow(pool: Pool, lineage: Lineage, page: int, space: int) -> None:
    if pool.pages.states[page] == PageState.SHADOW:
        pool.pages.hold(page)  # a fork has claimed it before
        return
    pool.pages.move(array("i", (page,)), PageState.QUARANTINED, Event.CLAIM_SHADOW)
    if pool.shares is not None:
        pool.shares.taken(array("i", (page,)), space)
    lineage.claimed((page,))


def _hold_source(pool: Pool, seq: Sequence, source: int) -> None:
    """Hold it in the way that the sequence's kind of source is held.

    Claims come with parents before their forks: a private source that nobody has claimed is in no table any more.
    """
    lineage, state = pool.lineage, pool.pages.states[source]
    assert lineage is not None
    seq.source = source
    if state in IN_TREE:
        _hold_in_tree(pool, seq, source)
    elif state == PageState.SHADOW or (state != PageState.PRIVATE and lineage.origins[source] == PageState.SHADOW):
        _hold_shadow(pool, lineage, source, seq.root.namespace)
    else:
        if state == PageState.PRIVATE:
            pool.pages.hold(source)
        else:
            pool.pages.move(array("i", (source,)), PageState.QUARANTINED, Event.CLAIM)
            if pool.shares is not None:
                pool.shares.taken(array("i", (source,)), seq.root.namespace)
            lineage.claimed((source,))
        pool.copying.setdefault(source, []).append(seq)


def _hold_in_tree(pool: Pool, seq: Sequence, source: int) -> None:
    """The path reaches one page further, over the source."""
    packed = source.to_bytes(PAGE_ID_BYTES, "little")
    child = next(node for node in (seq.node.children or {}).values() if node.pages[:PAGE_ID_BYTES] == packed)
    whole = child.page_count == 1
    match = Match(child if whole else seq.node, 1, None if whole else child, 1, [packed])
    seq.node = pool.pin(match, above=seq.node)
    seq.depth += 1
