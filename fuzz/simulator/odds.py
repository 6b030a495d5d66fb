"""What may happen in a world, and how often. Swarm testing: odds differ wildly between worlds, some faults are off."""

from __future__ import annotations

import random
from itertools import accumulate

PROGRESS: dict[str, float] = {
    "thread": 40.0, "keeper": 4.0, "serve": 40.0, "attend": 8.0, "device": 20.0, "time": 1.0, "start": 3.0,
    "wake": 1.0, "spawn": 2.0,
}  # fmt: skip
"""What has to happen for anything to happen, with its usual odds."""
FAULTS: dict[str, float] = {
    "lapse": 0.1, "stop": 0.05, "fork": 0.2, "heir_ends": 0.05, "kill_worker": 0.06, "bye": 0.03,
    "break": 0.03, "doom": 0.05, "kill_daemon": 0.02, "unknown_copy": 0.05,
}  # fmt: skip
"""What may be missing in a world, or be a hundred times as frequent as in another. The shrinker switches them off."""
COPIER = 6.0
"""The copier's, where there is one."""
OFF = 0.25
"""How often a fault is missing."""


class Odds:
    """Draws what is tried next."""

    def __init__(self, rng: random.Random, off: frozenset[str], copier: bool) -> None:
        """Drawn in full before any is switched off, so that the others stay as they are."""
        odds = {name: usual * 10 ** rng.uniform(-0.3, 0.3) for name, usual in PROGRESS.items()}
        odds["device"] *= rng.choice((1.0, 0.1, 0.02))
        odds["thread"] *= rng.choice((1.0, 1.0, 0.2))
        for name, usual in FAULTS.items():
            drawn = usual * 10 ** rng.uniform(-1.0, 1.0)
            missing = rng.random() < OFF
            odds[name] = 0.0 if missing or name in off else drawn
        if copier:
            odds["copier"] = COPIER * odds["device"] / PROGRESS["device"]
        self._names = list(odds)
        self._weights = list(accumulate(odds.values()))

    def pick(self, rng: random.Random) -> str:
        return rng.choices(self._names, cum_weights=self._weights)[0]
