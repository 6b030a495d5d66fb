"""Recency alone: the ordered map against a list."""

from __future__ import annotations

import random
from collections import Counter

from fuzz.pairs.recency import RecencyPair
from fuzz.registry import Swarm


class EvictorTarget:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pair = RecencyPair()
        self._keys = rng.randint(1, 40)
        self._swarm = Swarm(rng, ["add", "wake", "evict"], always=("add",))
        self.events: Counter[str] = Counter()

    def step(self) -> None:
        order = self._pair.model.order
        match self._swarm.pick():
            case "add":
                idle = [key for key in range(self._keys) if key not in order]
                if idle:
                    self._pair.add(self._rng.choice(idle))
            case "wake":
                if order:
                    self._pair.remove(self._rng.choice(order))
            case _:
                if order:
                    self._pair.remove(self._pair.model.front())
        self._pair.check()
