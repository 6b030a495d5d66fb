"""The life of a sequence in its pool: it is opened, what it has computed is published, it is closed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from radixkv.allocator.page_states import PRIVATE, PUBLISH, SHADE, SHADOW
from radixkv.commands import Copied, Publish
from radixkv.engine import holding
from radixkv.engine.namespaces import Namespace
from radixkv.engine.pool import Pool
from radixkv.engine.sequence import Sequence
from radixkv.image import NO_PAGE
from radixkv.tree.node import Node
from radixkv.tree.walk import Match
from radixkv.types import PAGE_ID, PAGE_ID_BYTES

SLICE_PAGES = 8192
"""How many pages one command or tick publishes: well under 10 ms."""


def opened(pool: Pool, namespace: Namespace) -> None:
    """One sequence more, in any epoch of this namespace."""
    pool.sequences += 1
    namespace.users += 1


def publish_in_slices(pool: Pool, seq: Sequence, full_pages: int) -> None:
    """A slice now, what is left with the coming ticks, or before anything else happens to the sequence."""
    if full_pages - seq.published <= SLICE_PAGES:
        publish(pool, seq, full_pages)
    else:
        publish(pool, seq, seq.published + SLICE_PAGES)
        pool.publishing[seq] = full_pages


def publish_some(pool: Pool) -> None:
    """A slice of one commit that was too large."""
    if pool.publishing:
        seq, full_pages = pool.publishing.popitem()
        publish_in_slices(pool, seq, full_pages)


def settle(pool: Pool, seq: Sequence) -> None:
    """Nothing of the sequence is left to publish: what its commit said is so."""
    full_pages = pool.publishing.pop(seq, None)
    if full_pages is not None:
        publish(pool, seq, full_pages)


def publish(pool: Pool, seq: Sequence, full_pages: int) -> None:
    """The first ``full_pages`` pages of the table are complete: into the tree, or shadows of what is there."""
    if seq.root.retired:
        holding.release_source(pool, seq)
    first = seq.published
    size = pool.tree.page_token_bytes
    tokens = bytes(seq.tokens[first * size : full_pages * size])
    shadows = full_pages - first if seq.root.retired else _already_there(pool, seq, tokens)
    new = full_pages - first - shadows
    if shadows:
        pages = seq.pages[first : first + shadows]
        pool.pages.move(pages, PRIVATE, SHADE)
        seq.shadows = seq.shadows.union(pages)
        for page in pages if pool.copying else ():
            pool.copying.pop(page, None)  # its further holders are counted like those of any shadow
        pool.counters["shadow_pages"] += shadows
        before = seq.pages[first - 1] if first else NO_PAGE
        pool.writes.append(Publish(pool.name, pages.tobytes(), True, tokens[: shadows * size], before))
        tokens = tokens[shadows * size :]
    if new:
        pages = seq.pages[first + shadows : full_pages]
        packed = pages.tobytes()
        pool.pages.move(pages, PRIVATE, PUBLISH)
        risen = _raise(pool, seq, tokens, packed) if pool.host is not None else 0
        if risen:
            packed, tokens = packed[risen * PAGE_ID_BYTES :], tokens[risen * size :]
        if packed:
            (before,) = PAGE_ID.unpack_from(seq.node.pages, -PAGE_ID_BYTES) if seq.depth + risen else (NO_PAGE,)
            seq.node = pool.tree.grow(seq.node, tokens, packed)
            pool.writes.append(Publish(pool.name, packed, False, tokens, before))
        if pool.host is not None and pool.config.host_write == "through":
            pool.host.fresh[seq.node] = None
        seq.depth = full_pages
        pool.counters["committed_pages"] += new
        pool.gained = True  # who waits may need fewer pages now
        if pool.copying:
            _sources_published(pool, pages, seq.node)
    seq.published = full_pages
    if pool.flights is not None:
        pool.flights.note(seq)


def _already_there(pool: Pool, seq: Sequence, tokens: bytes) -> int:
    """How many of the pages with these tokens, behind the published ones, the tree has; the path grows over them.

    A path one page longer than the published pages ends with the source of copy_rows; if that is the same page, as
    after the last token of a fully cached prompt, it stays pinned and nothing is split.
    """
    size = pool.tree.page_token_bytes
    there = 0
    if seq.depth > seq.published:
        seq.source = -1
        if seq.node.tokens.endswith(tokens[:size]):
            there = 1
        else:
            holding.let_go(pool, seq, seq.published)
    children = seq.node.children
    if not children or tokens[there * size : (there + 1) * size] not in children:
        return there
    match = pool.tree.match(seq.node, tokens, there * size)
    if match.pages:
        seq.node = pool.pin(match, above=seq.node)
        seq.depth += match.pages
    return there + match.pages


def _raise(pool: Pool, seq: Sequence, tokens: bytes, packed: bytes) -> int:
    """What the host tier has of these tokens is on the device again, in these pages. Returns how many it had."""
    host = pool.host
    assert host is not None
    below = pool.tree.match_host(Match(seq.node, 0, None, 0, []), tokens)
    if not below.pages:
        return 0
    above = seq.node
    seq.node = pool.pin(below, above=above)
    end = below.pages * PAGE_ID_BYTES
    pool.writes.append(Copied(pool.name, host.places(b"".join(below.parts)), packed[:end]))
    for node in pool.tree.path(seq.node, above=above):
        begin = end - node.page_count * PAGE_ID_BYTES
        host.surface(node, packed[begin:end])
        end = begin
    return below.pages


def _sources_published(pool: Pool, pages: array[int], node: Node) -> None:
    """Others still copy rows from pages that have just entered the tree: from now on they hold them there."""
    for place, page in enumerate(pages):
        for sharer in pool.copying.pop(page, ()):
            sharer.source_node = pool.tree.node_at(node, len(pages) - 1 - place)
            pool.tree.hold(sharer.source_node)
            pool.pages.drop(page)


def close(pool: Pool, seq: Sequence, quarantine: list[int] | None = None) -> None:
    """The sequence is over. Cached pages stay cached; its own go back, or into quarantine."""
    _leave(pool, seq, quarantine)
    if len(seq.pages) > seq.published:
        pool.drop(seq.pages[seq.published :], PRIVATE, quarantine)
    if seq.shadows:
        pool.drop(array("i", seq.shadows), SHADOW, quarantine)


def close_all(pool: Pool, sequences: Iterable[Sequence], quarantine: list[int] | None) -> None:
    """The same for many: their own pages go back together, which costs little more than those of one."""
    private, shadows = array("i"), array("i")
    for seq in sequences:
        _leave(pool, seq, quarantine)
        private += seq.pages[seq.published :]
        shadows.extend(seq.shadows)
    pool.drop(private, PRIVATE, quarantine)
    pool.drop(shadows, SHADOW, quarantine)


def _leave(pool: Pool, seq: Sequence, quarantine: list[int] | None) -> None:
    """All that the sequence holds is let go of, but its own pages."""
    if pool.publishing:
        settle(pool, seq)
    if seq.load is not None:
        del seq.load.readers[seq]
        seq.load = None
        pool.arriving.news = True
    holding.let_go(pool, seq, 0, quarantine)
    if pool.flights is not None:
        pool.flights.over(seq)
    pool.sequences -= 1
    namespace = pool.namespaces.of(seq.root)
    namespace.users -= 1
    if not namespace.users:
        pool.namespaces.note(namespace)
