"""Each policy of eviction as a number or two for every page, and the leaf with the lowest one leaves.

A page is whatever the model calls its pages by. An order asks a ``Cache`` how they lie to each other; it is told
when a holder lets go of a path, when a page is evicted, when one leaves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from xxhash import xxh3_64_intdigest

P = TypeVar("P", bound=Hashable)

SMALL, MAIN = 0, 1


class Cache(Protocol[P]):
    page_size: int

    def parent(self, page: P) -> P | None:
        """The page before this one."""

    def children(self, page: P) -> list[P]:
        """The cached pages right behind this one."""

    def depth(self, page: P) -> int: ...

    def prefix(self, page: P) -> tuple[int, bytes]:
        """The number of the page's root and its packed tokens with all before them, which a ghost goes by."""


class Order(Generic[P]):
    """LRU: the page let go longest ago. The others rank by something else, and then by this."""

    def __init__(self, cache: Cache[P], pool_pages: int) -> None:
        self.cache = cache
        self.pool_pages = pool_pages
        self.stamp: dict[P, int] = {}
        """When nobody held the page any more."""

    def let_go(self, path: list[P], idle: Iterable[P], stamp: int) -> None:
        """One holder lets go of ``path``, first page first; nobody holds those in ``idle`` now."""
        for page in idle:
            self.stamp[page] = stamp

    def recovered(self, page: P, stamp: int) -> None:
        """The page was there before this daemon; all that is known of it is its stamp."""
        self.stamp[page] = stamp

    def rank(self, page: P) -> tuple[int, ...]:
        return (self.stamp[page],)

    def mark(self, page: P) -> tuple[int, ...]:
        """What is remembered of the page beyond its last release; () before its first one."""
        return ()

    def victim(self, idle: set[P]) -> P:
        """Of the pages that nobody holds the one that leaves next."""
        return self._lowest([page for page in idle if not self.cache.children(page)])

    def _lowest(self, leaves: list[P]) -> P:
        return min(leaves, key=lambda page: (*self.rank(page), -self.cache.depth(page)))

    def evicted(self, page: P) -> None:
        """``page`` leaves because its turn has come."""

    def forget(self, page: P) -> None:
        """``page`` leaves, for whatever reason."""
        self.stamp.pop(page, None)


class LFU(Order[P]):
    """The page of which holders have let go least often since it came in."""

    def __init__(self, cache: Cache[P], pool_pages: int) -> None:
        super().__init__(cache, pool_pages)
        self.uses: dict[P, int] = {}

    def let_go(self, path: list[P], idle: Iterable[P], stamp: int) -> None:
        super().let_go(path, idle, stamp)
        for page in path:
            self.uses[page] = self.uses.get(page, 0) + 1

    def recovered(self, page: P, stamp: int) -> None:
        super().recovered(page, stamp)
        self.uses[page] = 1

    def rank(self, page: P) -> tuple[int, ...]:
        return (self.uses[page], self.stamp[page])

    def mark(self, page: P) -> tuple[int, ...]:
        return (self.uses[page],) if page in self.uses else ()

    def forget(self, page: P) -> None:
        super().forget(page)
        self.uses.pop(page, None)


class FIFO(Order[P]):
    """The page that was let go for the first time longest ago."""

    def __init__(self, cache: Cache[P], pool_pages: int) -> None:
        super().__init__(cache, pool_pages)
        self.first: dict[P, int] = {}

    def let_go(self, path: list[P], idle: Iterable[P], stamp: int) -> None:
        super().let_go(path, idle, stamp)
        for page in idle:
            self.first.setdefault(page, stamp)

    def recovered(self, page: P, stamp: int) -> None:
        super().recovered(page, stamp)
        self.first[page] = stamp

    def rank(self, page: P) -> tuple[int, ...]:
        return (self.first[page],)

    def mark(self, page: P) -> tuple[int, ...]:
        return (self.first[page],) if page in self.first else ()

    def forget(self, page: P) -> None:
        super().forget(page)
        self.first.pop(page, None)


class Priorities(Order[P]):
    """The page of the lowest priority, among equals the one let go longest ago. See docs/eviction.md."""

    DEFAULT, PIN = 50, 100

    def __init__(self, cache: Cache[P], pool_pages: int) -> None:
        super().__init__(cache, pool_pages)
        self.said: dict[P, tuple[int, int]] = {}
        """Priority, and when it is over."""
        self.now = 0
        self.pins_allowed = True

    def say(self, page: P, priority: int, ends: int) -> None:
        """A holder that lets go of the page says so."""
        self.said[page] = (priority, ends)

    def let_go(self, path: list[P], idle: Iterable[P], stamp: int) -> None:
        idle = list(idle)
        super().let_go(path, idle, stamp)
        for page in idle:
            priority, ends = self.said.get(page, (self.DEFAULT, 0))
            if priority == self.PIN and not self.pins_allowed:
                self.said[page] = (priority - 1, ends)

    def rank(self, page: P) -> tuple[int, ...]:
        return (*(self.mark(page)[:1] or (self.DEFAULT,)), self.stamp[page])

    def mark(self, page: P) -> tuple[int, ...]:
        priority, ends = self.said.get(page, (self.DEFAULT, 0))
        return () if priority == self.DEFAULT or ends <= self.now else (priority, ends)

    def forget(self, page: P) -> None:
        super().forget(page)
        self.said.pop(page, None)


class S3FIFO(Order[P]):
    """Two queues and a ghost; see docs/eviction.md for the rules."""

    def __init__(self, cache: Cache[P], pool_pages: int) -> None:
        super().__init__(cache, pool_pages)
        self.place: dict[P, tuple[int, int]] = {}
        """Queue, and place in it."""
        self.uses: dict[P, int] = {}
        self.ghost: list[int] = [0] * pool_pages
        self.newcomers = 0
        self.main_places = 0

    def let_go(self, path: list[P], idle: Iterable[P], stamp: int) -> None:
        super().let_go(path, idle, stamp)
        new = [page for page in path if page not in self.place]
        for page in path:
            if page not in new:
                self.uses[page] = min(3, self.uses[page] + 1)
        if not new:
            return
        tag = self._tag(new[0])
        if self.ghost[tag % self.pool_pages] == tag:
            place = self._end_of_main()
        else:
            self.newcomers += len(new)
            place = (SMALL, self.newcomers)
        for page in new:
            self.place[page], self.uses[page] = place, 0

    def recovered(self, page: P, stamp: int) -> None:
        super().recovered(page, stamp)
        self.newcomers = max(self.newcomers, stamp)
        self.place[page], self.uses[page] = (SMALL, stamp), 0

    def victim(self, idle: set[P]) -> P:
        chances = 0
        while True:
            page = self._oldest(idle)
            queue, uses = self.place[page][0], self.uses[page]
            if uses <= (1 if queue == SMALL else 0):
                return page
            chances += 1
            group = self._group(page, idle)
            if chances > 32:
                self.uses.update(dict.fromkeys(group, 0))
                continue
            self.place.update(dict.fromkeys(group, self._end_of_main()))
            self.uses.update(dict.fromkeys(group, 0 if queue == SMALL else uses - 1))

    def rank(self, page: P) -> tuple[int, ...]:
        return self.place[page]

    def mark(self, page: P) -> tuple[int, ...]:
        return (*self.place[page], self.uses[page]) if page in self.place else ()

    def evicted(self, page: P) -> None:
        if self.place[page][0] == SMALL:
            tag = self._tag(page)
            self.ghost[tag % self.pool_pages] = tag

    def forget(self, page: P) -> None:
        super().forget(page)
        self.place.pop(page, None)
        self.uses.pop(page, None)

    def _oldest(self, idle: set[P]) -> P:
        leaves = [page for page in idle if not self.cache.children(page)]
        small = [page for page in leaves if self.place[page][0] == SMALL]
        main = [page for page in leaves if self.place[page][0] == MAIN]
        if small and main:
            oldest = self._lowest(small)
            crowded = self.newcomers - self.place[oldest][1] >= max(1, self.pool_pages // 10)
            return oldest if crowded else self._lowest(main)
        return self._lowest(small or main)

    def _group(self, page: P, idle: set[P]) -> list[P]:
        """The page and those before it in the same place, used as often, without another continuation."""
        group = [page]
        same = (self.place[page], self.uses[page])
        above = self.cache.parent(page)
        while above is not None and above in idle and len(self.cache.children(above)) == 1:
            if (self.place[above], self.uses[above]) != same:
                break
            group.append(above)
            above = self.cache.parent(above)
        return group

    def _end_of_main(self) -> tuple[int, int]:
        self.main_places += 1
        return MAIN, self.main_places

    def _tag(self, page: P) -> int:
        """Of the page and up to 256 tokens before it."""
        root, tokens = self.cache.prefix(page)
        return xxh3_64_intdigest(tokens[-4 * (self.cache.page_size + 256) :], seed=root)


ORDERS = {"lru": Priorities, "lfu": LFU, "fifo": FIFO, "s3fifo": S3FIFO}
