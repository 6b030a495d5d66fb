"""An engine with two tiers on a real descriptor table, with deaths of the daemon and its copier in between."""

from __future__ import annotations

import random

from fuzz.pairs.tiered_recovery import TieredRecovery
from fuzz.targets.tiers import TiersTarget, random_config


class TieredRecoveryTarget(TiersTarget):
    pair: TieredRecovery

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, TieredRecovery(random_config(rng), rng))
        self._restarts = rng.choice((0.01, 0.03, 0.1))

    def step(self) -> None:
        if self._rng.random() < self._restarts:
            self.pair.restart()
            self._count_moves()
        super().step()
