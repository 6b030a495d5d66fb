"""The whole engine with a chain hash that nearly always collides: matching must stay exact."""

from __future__ import annotations

import random

from fuzz.targets.engine import EngineTarget
from fuzz.weak import weak_hash


class WeakHashTarget(EngineTarget):
    def __init__(self, rng: random.Random) -> None:
        with weak_hash():
            super().__init__(rng)

    def step(self) -> None:
        with weak_hash():
            super().step()
