"""Sequences that are granted before what the host tier has of them is on the device.

::

    path of the sequence    root ── on the device ── in the host tier alone, being loaded
    its page table                  a  b  c          x  y  z          p  q (private)
                                                     LOADING: the pages that the copy fills

Nobody else sees such pages: in the tree the run stays where it is, in the host tier, until the copy has ended, so all
others wait for it or do without, as for any load. When it has ended well, x, y and z become the run's pages. If another
worker has committed the same tokens meanwhile, the run has that one's pages (``Pool._raise``), and x, y and z become
shadows. Until then the sequence can be freed and extended; whatever publishes or passes pages is refused (``whole``).

A load that fails with such readers is begun again (``Tiering``). If it fails for good, its readers are *lost*: their
pages on the path are gone, their private pages stay theirs until they are freed.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from msgspec.structs import replace

from radixkv.allocator.page_states import LOADING
from radixkv.allocator.page_states import Event as PageEvent
from radixkv.commands import NO_RANGE, Publish, Range, Reserve, Reserved
from radixkv.engine import holding
from radixkv.engine.host import Copying, HostTier
from radixkv.engine.plan import ReservePlan, ceil_div
from radixkv.engine.pool import Pool
from radixkv.engine.sequence import Sequence
from radixkv.errors import BadRequest, CopyFailed
from radixkv.image import NO_PAGE
from radixkv.tree.node import Node
from radixkv.tree.walk import Match
from radixkv.types import PAGE_ID_BYTES, TOKEN_BYTES


class EarlyPlan(NamedTuple):
    """``planned``: as if all were there; ``loading``: the entries of the page table that ``copying`` fills."""

    planned: ReservePlan
    copying: Copying
    loading: range


def named(pool: Pool, match: Match, body: Reserve) -> Match:
    """What of a prompt may be named while it is loaded: of a fully cached one not the page whose rows would be copied.

    ``match``: what is on the device. Only what follows it in the host tier alone comes back.
    """
    below = pool.tree.match_host(match, body.tokens)
    size = pool.tree.page_token_bytes
    whole = (match.pages + below.pages) * size == len(body.tokens)
    return pool.tree.match_host(match, body.tokens[:-size]) if whole and body.last_page != "keep" else below


def plan_early(pool: Pool, host: HostTier, match: Match, body: Reserve) -> EarlyPlan | None:
    """None: not all that follows ``match``, what is on the device, is on its way by one copy. Only reads."""
    below = named(pool, match, body)
    if not below.pages:
        return None
    nodes = matched(below)
    for copying in host.copies.values():
        spanned = [] if copying.to_host else copying.runs[0].spanned()
        if spanned and set(nodes).issubset(spanned):
            above = sum(node.page_count for node in spanned[spanned.index(nodes[-1]) + 1 :])
            pages = copying.runs[0].device[above : above + below.pages]
            break
    else:
        return None
    size, tokens = pool.page_size, len(body.tokens) // TOKEN_BYTES
    first, shared = match.pages, match.pages + below.pages
    whole = Match(below.node, shared, below.inside, below.inside_pages, [*match.parts, pages.tobytes()])
    new = ceil_div(tokens + body.headroom, size) - shared
    cached = min(shared * size, tokens - 1)
    return EarlyPlan(ReservePlan(whole, shared, cached, False, new), copying, range(first, shared))


def matched(below: Match) -> list[Node]:
    """The runs that are matched in the host tier, the end first."""
    found = [] if below.inside is None else [below.inside]
    node = below.node
    while below.pages and not node.pages and node.parent is not None:
        found.append(node)
        node = node.parent
    return found


def begin(seq: Sequence, early: EarlyPlan, reply: Reserved) -> Reserved:
    """The sequence reads what the copy brings. Its reply says which pages that are."""
    seq.load, seq.loading = early.copying, early.loading
    early.copying.readers[seq] = None
    return replace(reply, loading=range_of(seq))


def range_of(seq: Sequence) -> Range:
    return (seq.loading.start, len(seq.loading)) if seq.loading else NO_RANGE


def whole(seq: Sequence) -> None:
    """Errors: BadRequest while pages of the sequence are loading, CopyFailed when that has failed for good."""
    if seq.lost:
        raise CopyFailed("what the host tier had of this sequence could not be loaded: free it", sequence=seq.id)
    if seq.load is not None:
        raise BadRequest("pages of this sequence are still loading: wait until they are there", sequence=seq.id)


# -- the copy has ended -------------------------------------------------------------------------------------------


def arrived(copying: Copying) -> None:
    """All that its readers have in their tables is there."""
    for seq in copying.readers:
        seq.load, seq.loading = None, range(0)
    copying.readers.clear()


def lose(pool: Pool, copying: Copying) -> None:
    """What its readers wait for never comes. The copy still holds the path, so nothing of it falls idle here."""
    for seq in copying.readers:
        own = seq.pages[seq.published :]
        seq.load, seq.loading, seq.lost, seq.retain = None, range(0), True, ()
        holding.let_go(pool, seq, 0)
        if pool.flights is not None:
            pool.flights.over(seq)
        seq.pages, seq.tokens, seq.node = own, b"", seq.root
        seq.shared = seq.published = seq.cached = seq.committed = 0
    copying.readers.clear()


def shade(pool: Pool, node: Node, pages: array[int], copying: Copying) -> array[int]:
    """These pages have been filled with what ``node`` has in other pages by now. Returns those that nobody reads."""
    readers = [(seq, set(seq.pages[seq.loading.start : seq.loading.stop])) for seq in copying.readers]
    read = [page for page in pages if any(page in own for _, own in readers)]  # the first ones, or none
    if not read:
        return pages
    count, size = len(read), pool.tree.page_token_bytes
    pool.pages.move(pages[:count], LOADING, PageEvent.SHADE)
    for seq, own in readers:
        seq.shadows = seq.shadows.union(own.intersection(read))
    for page in read:
        others = sum(page in own for _, own in readers) - 1
        if others:
            pool.pages.hold(page, others)
    above = node.parent
    before = int.from_bytes(above.pages[-PAGE_ID_BYTES:], "little") if above is not None and above.pages else NO_PAGE
    tokens = bytes(node.tokens[: count * size])
    pool.writes.append(Publish(pool.name, pages[:count].tobytes(), True, tokens, before))
    pool.counters["shadow_pages"] += count
    return pages[count:]
