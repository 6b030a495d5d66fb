"""A full cache at work: each policy of eviction over prompts of which some come again and again."""

from __future__ import annotations

import random

from fuzz.pairs.tree import Holder, TreePair
from fuzz.registry import Swarm
from radixkv.config import POLICIES

OPERATIONS = ["ask", "again", "longer", "release", "lift", "fork"]
ODDS = {"ask": 4.0, "again": 4.0, "longer": 2.0, "release": 2.0, "lift": 0.5, "fork": 0.3}


class EvictorTarget:
    """``policy`` may be given, else it is drawn."""

    def __init__(self, rng: random.Random, policy: str | None = None) -> None:
        self._rng = rng
        size = rng.randint(1, 2)
        self.pair = TreePair(size, policy or rng.choice(POLICIES), rng.choice((1, 4, rng.randint(4, 60))))
        self._most = rng.randint(1, 12)
        self._variety = rng.choice((2, 8, 100))
        self._asked: list[list[int]] = []
        self._favourites = rng.choice((1, 5, 50))
        self._waits = rng.choice((0.02, 0.2, 0.6))
        """How often a prompt is held beyond the step that brought it."""
        self._swarm = Swarm(rng, OPERATIONS, always=("ask", "again"), odds=ODDS)
        self.events = self.pair.events
        self.pair.add_root()

    def step(self) -> None:
        getattr(self, f"_{self._swarm.pick()}")()
        self.pair.check()

    def _holder(self) -> Holder | None:
        return self._rng.choice(self.pair.holders) if self.pair.holders else None

    def _admit(self, prompt: list[int]) -> None:
        holder = self.pair.hold(0, prompt)
        self._grow(holder, prompt[len(holder.path[1]) :])
        self._asked = [*self._asked[-self._favourites :], prompt]
        if self._rng.random() > self._waits or len(self.pair.holders) > 8:
            self.pair.release(holder)

    def _grow(self, holder: Holder, tokens: list[int]) -> None:
        """As many full pages of ``tokens`` as there is room for once what nobody holds has made way."""
        pages = min(len(tokens) // self.pair.page_size, self.pair.room())
        self.pair.evict(pages - self.pair.free())
        self.pair.publish(holder, tokens[: pages * self.pair.page_size])

    def _pages(self, count: int) -> list[int]:
        """Tokens of ``count`` pages; with few to choose from they are often the same."""
        return [self._rng.randrange(self._variety) for _ in range(count * self.pair.page_size)]

    def _ask(self) -> None:
        """A prompt that may begin like one before."""
        before = self._rng.choice(self._asked) if self._asked and self._rng.random() < 0.6 else []
        before = before[: self._rng.randint(0, len(before) // self.pair.page_size) * self.pair.page_size]
        self._admit((before + self._pages(self._rng.randint(1, self._most)))[: self._most * self.pair.page_size])

    def _again(self) -> None:
        if self._asked:
            self._admit(self._asked[int(len(self._asked) * self._rng.random() ** 2)])

    def _longer(self) -> None:
        if holder := self._holder():
            self._grow(holder, self._pages(self._rng.randint(1, 3)))

    def _release(self) -> None:
        if holder := self._holder():
            self.pair.release(holder)

    def _back(self, holder: Holder) -> int:
        return self._rng.randint(0, len(holder.path[1]) // self.pair.page_size)

    def _lift(self) -> None:
        if holder := self._holder():
            self.pair.lift(holder, self._back(holder))

    def _fork(self) -> None:
        if holder := self._holder():
            self.pair.fork(holder, self._back(holder), 1)
