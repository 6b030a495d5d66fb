"""One request's tokens and pages, as the daemon sees them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from msgspec import Struct

from radixkv.commands import Retain
from radixkv.tree.node import Node, Packed, Root
from radixkv.types import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.engine.host import Copying


class Sequence(Struct, eq=False):
    """One request. Its page table: ``published`` immutable pages (cached or shadow), then private ones with headroom.

    Attributes:
        pool, session, id: the pool's name, the session (0 while in transit) and the sequence's id in it.
        tokens: packed; ``bytes`` until it first grows.
        pages: the page table.
        committed: complete tokens, counted from 0; ``committed // page_size <= published``.
        shared: leading pages not charged to the session: what it shared when it was made, as far as still kept.
        node, depth: the tree path that is pinned and its length in pages. It equals the tokens up to there, also
            where the table has shadows. It is one page longer than ``published`` while the path's last page is the
            source of copy_rows.
        source, source_node: the page whose rows are still to be copied into ``pages[published]``, -1: none. It is
            held by the path (depth > published), by a second pin (source_node) or by a counted hold.
        retain: the priorities of the pages that it lets go of.
        since_s: running time when it was made, as of the last tick.
        load, loading: the copy that fills part of the page table, and which entries; until it has ended they are
            neither cached nor shadows, and of the path only what comes before them is on the device.
        lost: that copy has failed for good: nothing is left of the sequence but private pages, until it is freed.
    """

    pool: str
    session: int
    id: int
    root: Root
    node: Node
    tokens: Packed
    pages: array[int]
    depth: int = 0
    shared: int = 0
    published: int = 0
    cached: int = 0
    committed: int = 0
    shadows: frozenset[int] = frozenset()
    source: int = -1
    source_node: Node | None = None
    retain: tuple[Retain, ...] = ()
    since_s: float = 0.0
    load: Copying | None = None
    loading: range = range(0)
    lost: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def counts_source(self) -> bool:
        """The source of copy_rows is held by count: neither the path nor a second pin reaches over it."""
        return self.source >= 0 and self.source_node is None and self.depth <= self.published

    @property
    def charged(self) -> int:
        return len(self.pages) - self.shared
