"""Exact page-granular, leaf-first LRU with O(1) per touch: one ordered map and four rules.

R1  A node is stamped when its last holder lets go. The stamp is an order counter, not a clock.
R2  Only nodes with no holder are in the map; they enter at its end, leaf to root.
R3  At a split the tail keeps its object and its place; the new head is pinned by the same command.
R4  Two nodes are merged only if their stamps are equal.

So each child precedes its parent, the front is always an evictable leaf, and its tail pages go first, as many as are
needed. R2 is this file; R1, R3 and R4 are ``tree/prefix_tree.py``. (Ordered map for recency: as in every LRU; that a
tree needs no heap of leaves for exact order follows from the rules and is checked against a naive model by fuzz.)

A run that a copy between tiers has held comes back with the stamp that it had: it was not used. Such runs wait in a
heap beside the map, by stamp and in the order in which they came, leaf to root. The victim is the older of the two
fronts; of equal ones the map's, for whoever has a child in the heap was held with it and is in the heap behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from typing import ClassVar, Generic

from radixkv.errors import BrokenInvariant
from radixkv.evictor.leaves import Leaves
from radixkv.evictor.policy import R


class LRU(Generic[R]):
    """Of the leaves the one whose last holder let go longest ago. Iterates in the order of eviction. Needs no marks."""

    counts_uses: ClassVar[bool] = False

    def __init__(self) -> None:
        self._order: OrderedDict[R, None] = OrderedDict()
        self._returned: Leaves[R] = Leaves()
        self._newest = 0

    def used(self, path: list[R]) -> None:
        """Of no interest."""

    def add(self, run: R) -> None:
        if run.stamp < self._newest:
            self._returned.add((run.stamp,), run)
        else:
            self._newest = run.stamp
            self._order[run] = None

    def remove(self, run: R) -> None:
        try:
            del self._order[run]
        except KeyError:
            self._returned.remove(run)

    def first(self) -> R | None:
        """The leaf that goes next."""
        leaf = next(iter(self._order), None)
        returned = self._returned.first()
        if leaf is None or (returned is not None and returned.stamp < leaf.stamp):
            return returned
        return leaf

    def victim(self, pages: int) -> R:
        leaf = self.first()
        assert leaf is not None
        if leaf.page_count <= pages:
            self.remove(leaf)
        return leaf

    def check(self) -> None:
        stamps = [run.stamp for run in self._order]
        if stamps != sorted(stamps):
            raise BrokenInvariant("I7", "the order of eviction is not that of the releases")
        seen: set[R] = set()
        for run in self:
            seen.add(run)
            if any(child not in seen for child in (run.children or {}).values() if self._is_ours(child, run)):
                raise BrokenInvariant("I7", "a parent would be evicted before its child")

    @staticmethod
    def _is_ours(child: R, run: R) -> bool:
        """On the same tier: what only the host tier has is no matter to the order of the device's pages."""
        return bool(child.pages) == bool(run.pages)

    def __len__(self) -> int:
        return len(self._order) + len(self._returned)

    def __iter__(self) -> Iterator[R]:
        yield from merge(self._order, self._returned, key=lambda run: run.stamp)
