"""Runs that were given a priority, beside all others in exact LRU.

A run's mark is ``(priority, ends)``: 0 to 100, and the time in ms when that is over; ``()``: ``DEFAULT``, for ever. The
run of the lowest priority leaves first, of equal ones that whose last holder let go longest ago, and only leaves leave.
So a page goes by the highest priority of those that continue it. Those without a mark stay in the LRU's ordered map at
O(1); a mark costs O(log of the runs that have one). (Priorities from 0 to 100 with a duration: as in TensorRT-LLM.)

What is first but has a child that may stay longer is put aside, and comes back, at its old place, when a child leaves:
it may be a leaf now, or is put aside again. So nobody has to know beforehand who stands in whose way.

``PIN`` is the highest priority. It is limited: runs beyond ``pin_limit_pages`` count as one less. Pinned pages leave
when nothing else can, never before: so they starve nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import ClassVar, Generic

from radixkv.errors import BrokenInvariant
from radixkv.evictor.leaves import Leaves
from radixkv.evictor.lru import LRU
from radixkv.evictor.policy import Mark, R, Rank

DEFAULT, PIN = 50, 100
NEVER = 2**62
"""Ends of a mark that has no end."""


class Priorities(Generic[R]):
    """Takes an order over that has had no marks so far. Iterates in the order of eviction."""

    counts_uses: ClassVar[bool] = False

    def __init__(self, usual: LRU[R], pin_limit_pages: int, now_ms: int = 0) -> None:
        self._usual = usual
        self._below: Leaves[R] = Leaves()
        self._above: Leaves[R] = Leaves()
        self._aside: dict[R, None] = {}
        """First when a child stood in the way."""
        self._ending: Leaves[R] = Leaves()
        self._pinned: dict[R, None] = {}
        self._pin_limit = pin_limit_pages
        self._most_pinned = 0
        """As many pages as are pinned, or more: runs may have been cut since they were counted."""
        self._now_ms = now_ms
        self.pins_given_up = 0
        """Pages that left while they were pinned, ever."""

    # -- the hooks ------------------------------------------------------------------------------------------------

    def used(self, path: list[R]) -> None:
        """Of no interest."""

    def add(self, run: R) -> None:
        if run.mark:
            self._enter(run)
        self._file(run)

    def remove(self, run: R) -> None:
        self._take_out(run)
        if run.mark:
            self._leave(run)
        above = run.parent
        if above is not None and above in self._aside:
            del self._aside[above]
            self._file(above)

    def victim(self, pages: int) -> R:
        leaf = self.first()
        assert leaf is not None
        count = leaf.page_count
        if leaf in self._pinned:
            self.pins_given_up += min(pages, count)
        if count <= pages:
            self.remove(leaf)
        return leaf

    def first(self) -> R | None:
        """The leaf that goes next."""
        while True:
            for queue in (self._below, self._usual, self._above):
                run = queue.first()
                if run is not None:
                    break
            else:
                return None
            if not _is_covered(run):
                return run
            self._take_out(run)
            self._aside[run] = None

    # -- time -----------------------------------------------------------------------------------------------------

    def next_end_ms(self) -> int | None:
        """When the next priority is over."""
        run = self._ending.first()
        return None if run is None else run.mark[1]

    def expire(self, now_ms: int, budget: int) -> None:
        """Up to ``budget`` runs whose time is over go back to where they would be without a priority."""
        self._now_ms = now_ms
        while budget > 0 and (run := self._ending.first()) is not None and run.mark[1] <= now_ms:
            budget -= 1
            aside = run in self._aside
            if not aside:
                self._take_out(run)
            self._leave(run)
            run.mark = ()
            if not aside:
                self._file(run)

    # -- pins -----------------------------------------------------------------------------------------------------

    @property
    def pinned_pages(self) -> int:
        return sum(run.page_count for run in self._pinned)

    def pins(self, run: R) -> bool:
        return run in self._pinned

    def _has_room_for(self, pages: int) -> bool:
        if self._most_pinned + pages > self._pin_limit:
            self._most_pinned = self.pinned_pages
        return self._most_pinned + pages <= self._pin_limit

    # -- queues ---------------------------------------------------------------------------------------------------

    def _enter(self, run: R) -> None:
        """Begin to count a mark, unless its time is over."""
        priority, ends = run.mark
        if ends <= self._now_ms:
            run.mark = ()
            return
        if priority == PIN:
            if self._has_room_for(run.page_count):
                self._pinned[run] = None
                self._most_pinned += run.page_count
            else:
                run.mark = (PIN - 1, ends)
        if ends != NEVER:
            self._ending.add((ends,), run)

    def _leave(self, run: R) -> None:
        self._ending.discard(run)
        if run in self._pinned:
            del self._pinned[run]
            self._most_pinned -= run.page_count

    def _file(self, run: R) -> None:
        if run.mark:
            self._queue(run.mark).add(_rank(run), run)
        else:
            self._usual.add(run)

    def _take_out(self, run: R) -> None:
        if run in self._aside:
            del self._aside[run]
        elif run.mark:
            self._queue(run.mark).remove(run)
        else:
            self._usual.remove(run)

    def _queue(self, mark: Mark) -> Leaves[R]:
        return self._below if mark[0] < DEFAULT else self._above

    # -- all of them ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._below) + len(self._usual) + len(self._above) + len(self._aside)

    def __iter__(self) -> Iterator[R]:
        """What would come one by one if each that comes left; looks at no more than is asked for."""
        gone: set[R] = set()
        aside: set[R] = set()
        leaves: list[tuple[Rank, int, R]] = []
        queues = chain(self._below, self._usual, self._above)
        ahead = next(queues, None)
        while ahead is not None or leaves:
            if leaves and (ahead is None or leaves[0][0] < _rank(ahead)):
                run = heappop(leaves)[2]
            else:
                assert ahead is not None
                run, ahead = ahead, next(queues, None)
                if not gone.issuperset(_children(run)):
                    aside.add(run)
                    continue
            yield run
            gone.add(run)
            above = run.parent
            if above is not None and (above in aside or above in self._aside) and gone.issuperset(_children(above)):
                heappush(leaves, (_rank(above), len(gone), above))

    def check(self) -> None:
        runs = list(self)
        if len(runs) != len(self) or len(set(runs)) != len(runs):
            raise BrokenInvariant("I7", "a run can never be evicted, or is filed twice")
        if any(_rank(run)[0] >= DEFAULT for run in self._below) or any(_rank(run)[0] <= DEFAULT for run in self._above):
            raise BrokenInvariant("I7", "a run is filed under another priority")
        if any(run.mark for run in self._usual):
            raise BrokenInvariant("I7", "a run with a priority is filed as if it had none")
        for run in self._aside:
            if not _is_covered(run):
                raise BrokenInvariant("I7", "a leaf has been put aside")
        ending = {run for run in runs if run.mark and run.mark[1] != NEVER}
        if ending != set(self._ending):
            raise BrokenInvariant("I7", "nobody would end a priority when its time is over")
        if self._pinned.keys() != {run for run in runs if run.mark and run.mark[0] == PIN}:
            raise BrokenInvariant("I24", "what is pinned and what is counted as pinned differ")
        if not self.pinned_pages <= self._most_pinned <= self._pin_limit:
            raise BrokenInvariant("I24", f"{self.pinned_pages} pages are pinned, at most {self._pin_limit} may be")


def _rank(run: R) -> Rank:
    return (run.mark[0] if run.mark else DEFAULT, run.stamp)


def _children(run: R) -> Iterator[R]:
    """Those on the same tier: below a run on the device there may be some that only the host tier has."""
    return (child for child in (run.children or {}).values() if bool(child.pages) == bool(run.pages))


def _is_covered(run: R) -> bool:
    return run.children is not None and next(_children(run), None) is not None
