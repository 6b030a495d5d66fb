"""Worlds of workers, daemons and networks that fail, one after the other."""

from __future__ import annotations

import random
from collections import Counter

from fuzz.simulator import shrink
from fuzz.simulator.stage import Setup
from fuzz.simulator.world import World

LIVES = 1000
"""Steps of one world. With the last one everything ends, and nothing may be left."""


class SimulatorTarget:
    def __init__(self, rng: random.Random) -> None:
        self._world = World(_setup(rng))
        self._left = LIVES
        self.events: Counter[str] = self._world.stage.events

    def step(self) -> None:
        self._world.step()
        self._left -= 1
        if not self._left:
            self._world.wind_down()


def smallest(rng: random.Random, steps: int) -> str:
    """The world of this source, which fails within so many steps, as small as it can be made: how to run it again."""
    found = shrink.run(_setup(rng), steps)
    return shrink.report(shrink.shrink(found)) if found else "it did not fail again"


def _setup(rng: random.Random) -> Setup:
    return Setup(f"{rng.getrandbits(64):016x}")
