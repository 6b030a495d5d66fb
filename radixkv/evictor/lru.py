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
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LRU(Generic[K]):
    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def add(self, key: K) -> None:
        self._order[key] = None

    def remove(self, key: K) -> None:
        del self._order[key]

    def front(self) -> K:
        return next(iter(self._order))

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: K) -> bool:
        return key in self._order

    def __iter__(self) -> Iterator[K]:
        return iter(self._order)
