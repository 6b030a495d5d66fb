"""``allocator.PagePool`` beside a dict of states."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from fuzz.model.allocator import AllocatorModel
from fuzz.model.mismatch import expect, require
from radixkv.allocator.page_pool import PagePool
from radixkv.allocator.page_states import Event, State
from radixkv.errors import BrokenInvariant


class AllocatorPair:
    def __init__(self, pages: int) -> None:
        self.real = PagePool(pages)
        self.model = AllocatorModel(pages)

    def take(self, count: int) -> list[int]:
        pages = self.real.take(count).tolist()
        expect("I1", "pages taken", len(pages), count)
        require("I3", self.model.can(pages, "FREE", "TAKE"), f"took {pages}, which are not all free")
        self.model.move(pages, "FREE", "TAKE")
        return pages

    def give(self, pages: Sequence[int], state: str, event: str) -> None:
        """Pages in ``state`` become free, as an array or as a list."""
        packed = self.real.give(pages, State[state], Event[event])
        expect("I1", "packed ids", packed, array("i", pages).tobytes())
        self.model.move(list(pages), state, event)

    def move(self, pages: Sequence[int], state: str, event: str) -> None:
        self.real.move(array("i", pages), State[state], Event[event])
        self.model.move(list(pages), state, event)

    def wrong_move(self, pages: list[int], state: str, event: str) -> None:
        """A change that the table does not allow, or pages none of which is where it is said: caught, nothing moves."""
        before = bytes(self.real.states), list(self.real.counts), self.real.free.ids()
        try:
            self.real.move(array("i", pages), State[state], Event[event])
        except BrokenInvariant as broken:
            require("I3", broken.name in ("I1", "I3"), f"caught as {broken.name}")
        else:
            require("I3", False, f"{event} of pages {pages} said to be {state} went through")
        expect("I28", "counts after a refused change", self.real.counts, before[1])
        expect("I28", "free list after a refused change", self.real.free.ids(), before[2])

    def hold(self, page: int, times: int) -> None:
        self.real.hold(page, times)
        self.model.holders[page] += times

    def drop(self, page: int) -> None:
        """One holder of a private or shadow page lets go; the last one gives it back."""
        last = self.real.drop(page)
        self.model.holders[page] -= 1
        expect("I2", f"page {page} was dropped by its last holder", last, self.model.holders[page] == 0)
        if last:
            self.give([page], self.model.state[page], "RELEASE")

    def check(self) -> None:
        states = {page: State(code).name for page, code in enumerate(self.real.states)}
        expect("I1", "states", states, self.model.state)
        expect("I1", "counts", {state.name: self.real.counts[state] for state in State}, self.model.counts())
        expect("I3", "free list", sorted(self.real.free.ids()), self.model.pages("FREE"))
        extra = {page: holders - 1 for page, holders in self.model.holders.items() if holders > 1}
        expect("I2", "further holders", self.real.extra_holders, extra)
