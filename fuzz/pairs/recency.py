"""``evictor.LRU`` beside a list."""

from __future__ import annotations

from fuzz.model.evictor import RecencyModel
from fuzz.model.mismatch import expect
from radixkv.evictor.lru import LRU


class RecencyPair:
    def __init__(self) -> None:
        self.real: LRU[int] = LRU()
        self.model = RecencyModel()

    def add(self, key: int) -> None:
        self.real.add(key)
        self.model.add(key)

    def remove(self, key: int) -> None:
        self.real.remove(key)
        self.model.remove(key)

    def check(self) -> None:
        expect("I7", "order of eviction", list(self.real), self.model.order)
        expect("I24", "length", len(self.real), len(self.model.order))
        if self.model.order:
            expect("I7", "next victim", self.real.front(), self.model.front())
            expect("I7", "membership", self.model.order[-1] in self.real, True)
