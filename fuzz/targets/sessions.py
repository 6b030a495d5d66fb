"""Who is there, who is silent for too long, and which requests were answered already."""

from __future__ import annotations

import random
from collections import Counter

from fuzz.pairs.sessions import SessionsPair
from fuzz.registry import Swarm

OPERATIONS = ["open", "find", "end", "ask", "time"]


class SessionsTarget:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._limit = rng.randint(1, 6)
        self._pair = SessionsPair(self._limit, keep=rng.randint(1, 8), lease_s=rng.uniform(0.1, 10))
        self._swarm = Swarm(rng, OPERATIONS, always=("open", "ask"))
        self._next_session = 1
        self._newest: dict[int, int] = {}
        self.events: Counter[str] = Counter()

    def step(self) -> None:
        getattr(self, f"_{self._swarm.pick()}")()
        self._pair.check()

    def _somebody(self) -> int:
        return self._rng.randint(max(0, self._next_session - 8), self._next_session)

    def _open(self) -> None:
        self._pair.open(self._next_session)
        self._next_session += 1

    def _find(self) -> None:
        self._pair.find(self._somebody(), self._rng.choice((1, 1, 1, 0, 2)))

    def _end(self) -> None:
        self._pair.end(self._somebody())

    def _ask(self) -> None:
        """Mostly the next id, else one that was skipped, was answered or is far away."""
        if not self._pair.model.open:
            return
        who = self._rng.choice(sorted(self._pair.model.open))
        newest = self._newest.get(who, 0)
        step = self._rng.choice((1, 1, 1, 2, 5, 0, -1, -2, -5, -40, -1023, -1024, -1025, 1023, 1024, 5000))
        request = max(1, newest + step)
        self._newest[who] = max(newest, request)
        self._pair.ask(who, request)

    def _time(self) -> None:
        self._pair.pass_time(self._rng.choice((0.0, 0.05, 1.0, 9.0)))
