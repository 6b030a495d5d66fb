"""A full cache at work in which prompts have priorities, for a time or for ever."""

from __future__ import annotations

import itertools
import random

from fuzz.pairs.priorities import PrioritiesPair, Said
from fuzz.pairs.tree import Holder
from fuzz.registry import Swarm
from fuzz.targets.evictor import ODDS, OPERATIONS, EvictorTarget

TIME_ODDS = {**ODDS, "time": 1.0, "clear": 0.1}


class PrioritiesTarget(EvictorTarget):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, "lru")
        self.pair: PrioritiesPair = PrioritiesPair(
            rng.randint(1, 2), rng.choice((4, rng.randint(4, 60))), rng.random() < 0.7
        )
        self.events = self.pair.events
        self.pair.add_root()
        self._swarm = Swarm(rng, [*OPERATIONS, "time", "clear"], always=("ask", "again"), odds=TIME_ODDS)
        self._says = rng.choice((0.1, 0.5, 0.9))
        """How often a prompt comes with priorities."""
        self._levels = rng.choice(((0, 100), (0, 49, 50, 51, 99, 100), (20, 80), tuple(range(101))))

    def _admit(self, prompt: list[int]) -> None:
        holder = self.pair.hold(0, prompt)
        if self._rng.random() < self._says:
            self.pair.retain[holder] = self._ranges(len(prompt) // self.pair.page_size)
        self._grow(holder, prompt[len(holder.path[1]) :])
        self._asked = [*self._asked[-self._favourites :], prompt]
        if self._rng.random() > self._waits or len(self.pair.holders) > 8:
            self.pair.release(holder)

    def _ranges(self, pages: int) -> list[Said]:
        cuts = sorted(self._rng.randint(0, pages + 1) for _ in range(self._rng.choice((0, 1, 2))))
        ends = [0, *cuts, self._rng.choice((pages, 10**6))]
        return [
            Said(first, last, self._rng.choice(self._levels), self._rng.choice((None, 0, 1, 5, 100)))
            for first, last in itertools.pairwise(ends)
            if self._rng.random() < 0.8
        ]

    def _time(self) -> None:
        self.pair.pass_time(self._rng.choice((0, 1, 1, 4, 50)), self._rng.choice((1, 1000)))

    def _clear(self) -> None:
        self.pair.clear_away(self._rng.randint(0, 100))

    def _fork(self) -> None:
        if holder := self._holder():
            self.pair.fork(holder, self._back(holder), 1)
            made: Holder = self.pair.holders[-1]
            if holder in self.pair.retain:
                self.pair.retain[made] = self.pair.retain[holder]
