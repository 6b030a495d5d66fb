"""What can be fuzzed, and how one run goes.

A target takes steps; each step does one random thing to a real part, to its model, and compares both. The same seed
gives the same steps, so a failure is replayed by the line that the run prints.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


class Target(Protocol):
    """One thing under fuzz. ``events`` counts what has happened, for the smoke run's quotas."""

    events: Counter[str]

    def step(self) -> None:
        """One random operation, compared and checked. Raises on any difference."""


@dataclass(frozen=True)
class Fuzzer:
    """``start`` makes a fresh target from a source of randomness; ``lives`` is how many steps one target lasts.

    ``wanted``: what must have happened in a smoke run, and how often, for it to mean anything. ``smallest``: what to
    say of a target, made from such a source, that fails within so many steps.
    """

    name: str
    about: str
    start: Callable[[random.Random], Target]
    lives: int = 400
    smoke_steps: int = 4000
    wanted: Mapping[str, int] = field(default_factory=dict)
    smallest: Callable[[random.Random, int], str] | None = None


class Failed(Exception):
    """A run that found something. Knows how to say it again."""

    def __init__(self, fuzzer: str, seed: int, step: int, error: BaseException) -> None:
        self.invariant = getattr(error, "name", None) or type(error).__name__
        self.fuzzer, self.seed, self.step, self.error = fuzzer, seed, step, error
        super().__init__(
            f"{self.invariant} broken: {error}\n"
            f"  fuzzer {fuzzer}, seed {seed}, step {step}\n"
            f"  again: python -m fuzz {fuzzer} --seed {seed} --steps {step + 1}"
        )


def shrunk(fuzzer: Fuzzer, failed: Failed) -> str:
    """The failure once more, as small as it can be made; "" if that cannot be tried."""
    if fuzzer.smallest is None:
        return ""
    return fuzzer.smallest(source(fuzzer, failed.seed, failed.step), failed.step % fuzzer.lives + 1)


def source(fuzzer: Fuzzer, seed: int, step: int) -> random.Random:
    """The randomness of the target that takes this step."""
    return random.Random(f"{fuzzer.name}/{seed}/{step // fuzzer.lives}")


@dataclass
class Report:
    """What one run did."""

    steps: int = 0
    events: Counter[str] = field(default_factory=Counter)


def run(fuzzer: Fuzzer, seed: int, steps: int) -> Report:
    """Take ``steps`` steps, with a new target (and new odds) every ``fuzzer.lives``. Raises Failed."""
    report = Report()
    target: Target | None = None
    for step in range(steps):
        try:
            if target is None or step % fuzzer.lives == 0:
                target = fuzzer.start(source(fuzzer, seed, step))
            target.step()
        except Exception as error:
            raise Failed(fuzzer.name, seed, step, error) from error
        report.steps += 1
        if (step + 1) % fuzzer.lives == 0 or step + 1 == steps:
            report.events.update(target.events)
    return report


class Swarm:
    """Random odds for a set of operations: some are switched off, the others differ by orders of magnitude."""

    def __init__(
        self,
        rng: random.Random,
        operations: list[str],
        always: tuple[str, ...] = (),
        odds: dict[str, float] | None = None,
    ) -> None:
        """``always``: never switched off. ``odds``: factors for what is needed more often or would end everything."""
        self._rng = rng
        self._operations = operations
        self._weights = []
        for name in operations:
            off = name not in always and rng.random() < 0.2
            self._weights.append(0.0 if off else 10 ** rng.uniform(-1.0, 1.0) * (odds or {}).get(name, 1.0))

    def pick(self) -> str:
        return self._rng.choices(self._operations, self._weights)[0]
