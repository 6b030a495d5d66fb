"""Page states, counts, the free list and counted holders."""

from __future__ import annotations

import random
from collections import Counter

from fuzz.model.allocator import ALLOWED, EVENTS, STATES
from fuzz.pairs.allocator import AllocatorPair
from fuzz.registry import Swarm

OPERATIONS = ["take", "move", "give", "hold", "drop", "wrong"]


class AllocatorTarget:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pair = AllocatorPair(rng.randint(1, 80))
        self._swarm = Swarm(rng, OPERATIONS, always=("take", "give"))
        self.events: Counter[str] = Counter()

    def step(self) -> None:
        getattr(self, f"_{self._swarm.pick()}")()
        self._pair.check()

    def _some(self, state: str) -> list[int]:
        """A random part of the pages in a state that nobody else holds, in random order."""
        pages = [page for page in self._pair.model.pages(state) if self._pair.model.holders.get(page, 1) == 1]
        return self._rng.sample(pages, self._rng.randint(0, len(pages)))

    def _take(self) -> None:
        self._pair.take(self._rng.randint(0, len(self._pair.model.pages("FREE"))))

    def _move(self) -> None:
        moves = [(state, event) for (state, event), after in sorted(ALLOWED.items()) if "FREE" not in (state, after)]
        state, event = self._rng.choice(moves)
        self._pair.move(self._some(state), state, event)

    def _give(self) -> None:
        moves = [move for move, after in sorted(ALLOWED.items()) if after == "FREE"]
        state, event = self._rng.choice(moves)
        self._pair.give(self._some(state), state, event)

    def _held(self) -> list[int]:
        model = self._pair.model
        return [page for page in model.holders if model.state[page] in ("PRIVATE", "SHADOW")]

    def _hold(self) -> None:
        if held := self._held():
            self._pair.hold(self._rng.choice(held), self._rng.randint(1, 3))

    def _drop(self) -> None:
        if held := self._held():
            self._pair.drop(self._rng.choice(held))

    def _wrong(self) -> None:
        state, event, other = self._rng.choice(STATES), self._rng.choice(EVENTS), self._rng.choice(STATES)
        pages = self._some(other)
        if pages and (other != state or (state, event) not in ALLOWED):
            self._pair.wrong_move(pages, state, event)
            self.events["refused"] += 1
