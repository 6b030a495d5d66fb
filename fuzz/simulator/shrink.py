"""From a world that fails to the smallest that still does: fewer workers, fewer kinds of faults, fewer steps.

Whatever is taken away changes what is drawn afterwards, so each smaller setup is tried under a few keys. ``replay`` is
what one of them does, told event by event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fuzz.simulator.odds import FAULTS
from fuzz.simulator.stage import HABITS, TIERS, Setup
from fuzz.simulator.world import World

KEYS = 4
"""How many keys a smaller setup is tried under."""
RUNS_MAX = 200


@dataclass(frozen=True)
class Failing:
    """A setup, the step at which it fails, and how."""

    setup: Setup
    steps: int
    error: BaseException

    @property
    def name(self) -> str:
        return str(getattr(self.error, "name", None) or type(self.error).__name__)


def run(setup: Setup, steps: int, world: list[World] | None = None) -> Failing | None:
    """Take so many steps, then let everything end. ``world``: where to put it, for whoever wants to look at it."""
    made = World(setup)
    if world is not None:
        world.append(made)
    done = 0
    try:
        while done < steps:
            done += 1
            made.step()
        made.wind_down()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return Failing(setup, done, error)
    return None


def shrink(found: Failing) -> Failing:
    """The smallest that was found to break the same thing."""
    left = RUNS_MAX
    smaller = True
    while smaller and left > 0:
        smaller = False
        for setup in _smaller(found.setup):
            left -= 1
            again = run(setup, found.steps)
            if again is not None and again.name == found.name and again.steps <= found.steps:
                found, smaller = again, True
                break
            if left <= 0:
                break
    return found


def _smaller(setup: Setup) -> Iterator[Setup]:
    keys = [setup.key, *(f"{setup.key}.{number}" for number in range(1, KEYS))]
    for workers in range(1, setup.workers or 4):
        for key in keys:
            yield replace(setup, workers=workers, key=key)
    for name in (*FAULTS, *HABITS, TIERS):
        if name not in setup.off:
            for key in keys[: KEYS // 2]:
                yield replace(setup, off=setup.off | {name}, key=key)


def command(found: Failing) -> str:
    """The line that runs it again."""
    setup = found.setup
    workers = f" --workers {setup.workers}" if setup.workers else ""
    without = f" --without {','.join(sorted(setup.off))}" if setup.off else ""
    return f"python -m fuzz.simulator {setup.key} --steps {found.steps}{workers}{without}"


def report(found: Failing, events: int = 40) -> str:
    """How it can be run again, and what led to it."""
    world: list[World] = []
    again = run(found.setup, found.steps, world) or found
    history = "\n".join(list(world[0].stage.history)[-events:])
    return f"{history}\n{again.name} broken at step {again.steps}: {again.error}\n  again: {command(again)}"
