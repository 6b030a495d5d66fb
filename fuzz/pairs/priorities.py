"""The tree in an order with priorities beside the naive model: victims, marks and the whole order foretold."""

from __future__ import annotations

from dataclasses import dataclass

from fuzz.model.orders import Priorities as Naive
from fuzz.model.tree import Path
from fuzz.pairs.tree import Holder, TreePair
from radixkv.evictor.lru import LRU
from radixkv.evictor.priorities import DEFAULT, NEVER, PIN, Priorities
from radixkv.tree.node import Node


@dataclass(frozen=True)
class Said:
    """Of the pages ``first`` to ``last`` (not with it) of a path: their priority for so many ms (None: for ever)."""

    first: int
    last: int
    priority: int
    for_ms: int | None


class PrioritiesPair(TreePair):
    """Time is counted in ms. ``pins``: whether there may be any."""

    def __init__(self, page_size: int, pool_pages: int, pins: bool) -> None:
        super().__init__(page_size, "lru", pool_pages)
        self.now = 0
        self.retain: dict[Holder, list[Said]] = {}
        self.naive: Naive[Path] = Naive(self.model, pool_pages)
        self.naive.pins_allowed = pins
        self.model.order = self.naive
        self.order = self.priorities = Priorities(LRU[Node](), pool_pages if pins else 0)

    def pass_time(self, ms: int, budget: int) -> None:
        """What is over is, for real in slices of ``budget`` runs."""
        self.now += ms
        self.naive.now = self.now
        self.priorities.expire(self.now, budget)
        for _ in range(len(self.priorities)):
            if (end := self.priorities.next_end_ms()) is not None and end <= self.now:
                self.priorities.expire(self.now, budget)

    def mark(self, node: Node) -> tuple[int, ...]:
        """Held runs are told that their time is over when nobody holds them."""
        return node.mark if node.mark and node.mark[1] > self.now else ()

    def _say(self, holder: Holder, depth: int) -> None:
        pages = self.model.upward(holder.path)
        for said in self.retain.get(holder, ()):
            first, last = max(said.first, depth), min(said.last, len(pages))
            if first >= last:
                continue
            ends = NEVER if said.for_ms is None else self.now + said.for_ms
            for node in self.real.stretch(holder.node, len(pages) - last, last - first):
                node.mark = () if said.priority == DEFAULT else (said.priority, ends)
            for page in pages[first:last]:
                self.naive.say(page, said.priority, ends)
            self.events["said"] += 1

    def check(self) -> None:
        super().check()
        self.events["gave way"] = self.priorities.pins_given_up
        pinned = sum(1 for path in self.model.idle() if self.naive.mark(path)[:1] == (PIN,))
        if self.priorities.pinned_pages != pinned:
            raise AssertionError(f"{self.priorities.pinned_pages} pages are pinned, the model says {pinned}")
