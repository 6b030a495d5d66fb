"""The engine's usual day on a real descriptor table, with deaths of the daemon in between."""

from __future__ import annotations

import random

from fuzz.pairs.recovery import RecoveryPair
from fuzz.targets.engine import EngineTarget, random_config


class RecoveryTarget(EngineTarget):
    pair: RecoveryPair

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, RecoveryPair(random_config(rng), rng))
        self._restarts = rng.choice((0.01, 0.03, 0.1))

    def step(self) -> None:
        if self._rng.random() < self._restarts:
            self.pair.restart()
        super().step()
