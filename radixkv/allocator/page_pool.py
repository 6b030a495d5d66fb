"""The pages of one tier as numbers: which state each is in, how many of each, which are free, who else holds one.

A page in the tree is held through its node. A page outside it (private or shadow) has one holder, the sequence whose
table it is in; only further ones (forks with a shadow page, children that still copy rows) are counted here, so that
the usual page costs a byte.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixkv.allocator.free_list import FreeList
from radixkv.allocator.page_states import FREE, ILLEGAL, NEXT, TAKE, Event, State
from radixkv.errors import BrokenInvariant

_FEW = 24
"""Below this many pages a plain loop is faster than numpy's fixed cost."""


class PagePool:
    """Page ids 0..pages-1 of one tier; never bytes of theirs."""

    def __init__(self, pages: int) -> None:
        self.size = pages
        self.states = bytearray(pages)
        self._states = np.frombuffer(self.states, np.uint8)
        self.counts = [0] * len(State)
        self.counts[FREE] = pages
        self.free = FreeList(range(pages))
        self.extra_holders: dict[int, int] = {}

    def restore(self, states: NDArray[np.uint8]) -> None:
        """Begin with pages in these states instead of all FREE."""
        self._states[:] = states
        self.counts = np.bincount(states, minlength=len(State)).tolist()
        self.free = FreeList(np.flatnonzero(states == FREE).tolist())

    def take(self, count: int, event: int = TAKE) -> array[int]:
        """``count`` free pages, now private (or what ``event`` makes of them). There are as many, the caller knows."""
        pages = self.free.take(count)
        self.move(pages, FREE, event)
        return pages

    def give(self, pages: Sequence[int] | array[int], state: int, event: int) -> bytes:
        """Pages in ``state`` become free by ``event``. Returns their packed ids."""
        ids = pages if type(pages) is array else array("i", pages)
        if len(ids) >= _FEW and len(set(ids)) < len(ids):  # fewer are looked at one by one, which finds it
            raise BrokenInvariant("I3", f"of {len(ids)} pages to give back one is named twice")
        self.move(ids, state, event)
        packed = ids.tobytes()
        self.free.give(packed)
        return packed

    def move(self, pages: array[int], before: int, event: int) -> None:
        """All ``pages`` are in state ``before``; ``event`` happens to them. Anything else is a bug (I1, I3)."""
        after = NEXT[event][before]
        if after == ILLEGAL:
            raise BrokenInvariant("I1", f"a {State(before).name} page cannot {Event(event).name}")
        count = len(pages)
        if count < _FEW:
            states = self.states
            for page in pages:
                if states[page] != before:
                    raise BrokenInvariant("I3", f"page {page} is {State(states[page]).name}, not {State(before).name}")
                states[page] = after
        else:
            ids = np.frombuffer(pages, np.int32)
            if self._states.take(ids).tobytes() != bytes((before,)) * count:
                raise BrokenInvariant("I3", f"of {count} pages not all are {State(before).name}")
            self._states[ids] = after
        counts = self.counts
        counts[before] -= count
        counts[after] += count

    def hold(self, page: int, times: int = 1) -> None:
        """``times`` more holders of a private or shadow page."""
        self.extra_holders[page] = self.extra_holders.get(page, 0) + times

    def drop(self, page: int) -> bool:
        """One holder of a private or shadow page lets go. True if it was the last one."""
        extra = self.extra_holders.get(page)
        if extra is None:
            return True
        if extra == 1:
            del self.extra_holders[page]
        else:
            self.extra_holders[page] = extra - 1
        return False
