"""Exact LRU in which namespaces have floors and caps: how many pages each has, and whose page leaves for whom.

Each namespace has an order of its own. The next to leave is the oldest of their fronts, but

* for a namespace at its cap one of its own, also while there are free pages;
* of a namespace that has no more than its floor none, unless it asks itself.

What a namespace has are all pages that were taken for it, in whatever state, until they are free again. Only pools with
a floor or a cap have this; a victim costs a look at each namespace that has idle pages.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import merge
from typing import ClassVar, Generic

from radixkv.errors import BrokenInvariant
from radixkv.evictor.lru import LRU
from radixkv.evictor.policy import R

NOBODY = -1


class Shares(Generic[R]):
    counts_uses: ClassVar[bool] = False

    def __init__(self, pool_pages: int, floor: int, cap: int, space_of: Callable[[R], int]) -> None:
        """``floor``, ``cap``: pages of each namespace, 0: none. ``space_of`` says which one a run belongs to."""
        self._floor = floor
        self._cap = cap
        self._space_of = space_of
        self._orders: dict[int, LRU[R]] = {}
        self._runs: dict[R, tuple[int, int]] = {}
        """Of each idle run the namespace, and how many pages it counts for."""
        self._last: R | None = None
        self._owners = array("i", [NOBODY]) * pool_pages
        """Of each page the namespace that has it."""
        self.pages: Counter[int] = Counter()
        """Pages that a namespace has."""
        self.idle: Counter[int] = Counter()
        """Those of them that nobody holds."""

    # -- who has what ---------------------------------------------------------------------------------------------

    def taken(self, pages: array[int], space: int) -> None:
        for page in pages:
            self._owners[page] = space
        self.pages[space] += len(pages)

    def given(self, pages: array[int]) -> None:
        """They are nobody's now; some may have been before (of an earlier daemon's time)."""
        for page in pages:
            space = self._owners[page]
            if space != NOBODY:
                self._owners[page] = NOBODY
                self.pages[space] -= 1

    def owner(self, page: int) -> int:
        return self._owners[page]

    # -- how much there is ----------------------------------------------------------------------------------------

    def limit(self, room: int, space: int, frozen: bool) -> int:
        """How many of ``room`` pages, free or idle, are left to a namespace. ``frozen``: nothing can be evicted."""
        if not frozen:
            room -= sum(self._protected(other) for other in self._orders if other != space)
        if self._cap:
            room = min(room, self._cap - self.pages[space] + (0 if frozen else self.idle[space]))
        return room

    def excess(self, space: int, more: int) -> int:
        """How many pages it would have over its cap with so many more."""
        return self.pages[space] + more - self._cap if self._cap else 0

    def _protected(self, space: int) -> int:
        """Idle pages that its floor keeps from others."""
        return self.idle[space] - max(0, min(self.idle[space], self.pages[space] - self._floor))

    # -- the order of eviction --------------------------------------------------------------------------------------

    def used(self, path: list[R]) -> None:
        """Of no interest."""

    def add(self, run: R) -> None:
        last = self._last  # runs of one path come leaf to root
        known = self._runs.get(last) if last is not None and last.parent is run else None
        space = known[0] if known else self._space_of(run)
        self._last = run
        self._orders.setdefault(space, LRU()).add(run)
        self._count(run, space, run.page_count)

    def remove(self, run: R) -> None:
        space = self._runs[run][0]
        self._orders[space].remove(run)
        self._forget(run)

    def resized(self, run: R) -> None:
        """A run may have been cut at its beginning, without having been taken out."""
        if run in self._runs:
            self._count(run, self._runs[run][0], run.page_count)

    def victim_for(self, space: int, pages: int) -> tuple[R, int]:
        """The leaf of which next pages go, so that a namespace can have ``pages`` more; and how many of them."""
        excess = self.excess(space, pages)
        if excess > 0:
            return self._take(space, min(pages, excess))
        best: R | None = None
        whose = most = 0
        for other, order in self._orders.items():
            may_go = pages if other == space or not self._floor else self.pages[other] - self._floor
            leaf = order.first() if may_go > 0 else None
            if leaf is not None and (best is None or leaf.stamp < best.stamp):
                best, whose, most = leaf, other, may_go
        assert best is not None
        return self._take(whose, min(pages, most))

    def victim(self, pages: int) -> R:
        """The oldest of all, whoever has it."""
        leaf = next(iter(self))
        return self._take(self._runs[leaf][0], pages)[0]

    def _take(self, space: int, pages: int) -> tuple[R, int]:
        leaf = self._orders[space].victim(pages)
        count = min(pages, leaf.page_count)
        if count == leaf.page_count:
            self._forget(leaf)
        else:
            self._count(leaf, space, leaf.page_count - count)
        return leaf, count

    def _count(self, run: R, space: int, pages: int) -> None:
        self.idle[space] += pages - self._runs.get(run, (space, 0))[1]
        self._runs[run] = (space, pages)

    def _forget(self, run: R) -> None:
        space, pages = self._runs.pop(run)
        self.idle[space] -= pages
        if self._last is run:
            self._last = None
        if not len(self._orders[space]):
            del self._orders[space]

    # -- all of them ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        for order in self._orders.values():
            order.check()
        counted: Counter[int] = Counter()
        for run in self:
            counted[self._space_of(run)] += run.page_count
        if +counted != +self.idle:
            raise BrokenInvariant("I24", f"idle pages by namespace {+self.idle}, counted {+counted}")
        owned = Counter(space for space in self._owners if space != NOBODY)
        if +owned != +self.pages:
            raise BrokenInvariant("I24", f"pages by namespace {+self.pages}, counted {+owned}")

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[R]:
        yield from merge(*self._orders.values(), key=lambda run: run.stamp)
