"""Short seeded runs of the fuzzers: the part of them that every change has to pass, and every mutant must not."""

import pytest

from fuzz.registry import run
from fuzz.targets.catalogue import FUZZERS

SEED = 7
STEPS = {
    "allocator": 1000,
    "sessions": 3000,
    "wire": 2000,
    "tree": 3000,
    "evictor": 3000,
    "priorities": 3000,
    "engine": 8000,
    "tiers": 2000,
    "two-tiers": 400,
    "recovery": 1600,
    "tiers-torn": 1000,
    "events": 900,
    "simulator": 10_000,
}


@pytest.mark.parametrize("name", STEPS)
def test_nothing_is_found(name):
    assert run(FUZZERS[name], SEED, STEPS[name]).steps == STEPS[name]


def test_no_fuzzer_is_left_out():
    assert set(STEPS) == set(FUZZERS)
