"""Exact page-granular, leaf-first LRU with O(1) per touch: one ordered map and four rules.

R1  A node is stamped when its last holder lets go. The stamp is an order counter, not a clock.
R2  Only nodes with no holder are in the map; they enter at its end, leaf to root.
R3  At a split the tail keeps its object and its place; the new head is pinned by the same command.
R4  Two nodes are merged only if their stamps are equal.

So each child precedes its parent, the front is always an evictable leaf, and its tail pages go first, as many as are
needed. R2 is this file; R1, R3 and R4 are ``tree/prefix_tree.py``. (Ordered map for recency: as in every LRU; that a
tree needs no heap of leaves for exact order follows from the rules and is checked against a naive model by fuzz.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import ClassVar, Generic

from radixkv.errors import BrokenInvariant
from radixkv.evictor.policy import R
from radixkv.types import PAGE_ID_BYTES


class LRU(Generic[R]):
    """Of the leaves the one whose last holder let go longest ago. Iterates in the order of eviction. Needs no marks."""

    counts_uses: ClassVar[bool] = False

    def __init__(self) -> None:
        self._order: OrderedDict[R, None] = OrderedDict()

    def used(self, path: list[R]) -> None:
        """Of no interest."""

    def add(self, run: R) -> None:
        self._order[run] = None

    def remove(self, run: R) -> None:
        del self._order[run]

    def victim(self, pages: int) -> R:
        leaf = next(iter(self._order))
        if len(leaf.pages) <= pages * PAGE_ID_BYTES:
            del self._order[leaf]
        return leaf

    def check(self) -> None:
        seen: set[R] = set()
        for run in self._order:
            seen.add(run)
            if any(child not in seen for child in (run.children or {}).values()):
                raise BrokenInvariant("I7", "a parent would be evicted before its child")
        stamps = [run.stamp for run in self._order]
        if stamps != sorted(stamps):
            raise BrokenInvariant("I7", "the order of eviction is not that of the releases")

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[R]:
        return iter(self._order)
