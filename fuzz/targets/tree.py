"""Splits, merges, holders and exact eviction order of the prefix tree."""

from __future__ import annotations

import random

from fuzz.pairs.tree import Holder, TreePair
from fuzz.registry import Swarm
from fuzz.targets.words import Words
from radixkv.config import POLICIES

OPERATIONS = ["look", "hold", "publish", "release", "lift", "fork", "evict", "clear", "root", "queries"]

ALWAYS = ("hold", "publish", "release")
ODDS = {"hold": 3.0, "release": 2.0, "evict": 0.5, "clear": 0.05}


class TreeTarget:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        size = rng.randint(1, 4)
        self._pair = TreePair(size, rng.choice(POLICIES), rng.randint(1, 40))
        self._most = rng.randint(1, 40)
        self._words = Words(rng, size, rng.randint(1, 12))
        self._swarm = Swarm(rng, OPERATIONS, ALWAYS, ODDS)
        self.events = self._pair.events
        self._pair.add_root()

    def step(self) -> None:
        getattr(self, f"_{self._swarm.pick()}")()
        self._pair.check()

    def _root_number(self) -> int:
        return self._rng.randrange(len(self._pair.roots))

    def _holder(self) -> Holder | None:
        return self._rng.choice(self._pair.holders) if self._pair.holders else None

    def _look(self) -> None:
        self._pair.look(self._root_number(), self._words.prompt(), self._rng.randrange(9))

    def _hold(self) -> None:
        if len(self._pair.holders) < self._most:
            holder = self._pair.hold(self._root_number(), self._words.prompt())
            if self._rng.random() < 0.5:
                self._pair.publish(holder, self._words.pages(self._rng.randint(0, 3)))

    def _publish(self) -> None:
        if holder := self._holder():
            self._pair.publish(holder, self._words.pages(self._rng.randint(0, 4)))

    def _release(self) -> None:
        if holder := self._holder():
            self._pair.release(holder)

    def _back(self, holder: Holder) -> int:
        return self._rng.randint(0, len(holder.path[1]) // self._pair.page_size)

    def _lift(self) -> None:
        if holder := self._holder():
            self._pair.lift(holder, self._back(holder))

    def _fork(self) -> None:
        holder = self._holder()
        if holder and len(self._pair.holders) < self._most:
            self._pair.fork(holder, self._back(holder), self._rng.randint(0, 3))
            self.events["fork"] += 1

    def _evict(self) -> None:
        self._pair.evict(self._rng.choice((0, 1, 1, 2, 3, 100)))

    def _clear(self) -> None:
        self._pair.clear_away(self._rng.randrange(100))

    def _root(self) -> None:
        if len(self._pair.roots) < 3:
            self._pair.add_root()

    def _queries(self) -> None:
        if holder := self._holder():
            self._pair.check_queries(holder, self._back(holder))
