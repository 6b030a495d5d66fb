"""The fuzzers themselves: replayable, loud, and able to see a planted bug."""

import random
import subprocess
import sys

import pytest

from fuzz import canary, smoke
from fuzz.registry import Failed, Fuzzer, Swarm, run
from fuzz.targets.catalogue import FUZZERS


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "fuzz", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", FUZZERS)
def test_each_fuzzer_finds_nothing_and_does_the_same_again(name):
    first, again = run(FUZZERS[name], seed=123, steps=600), run(FUZZERS[name], seed=123, steps=600)
    assert first.steps == 600
    assert first.events == again.events


@pytest.mark.parametrize("bird", [bird for bird in canary.CANARIES if bird.steps == canary.STEPS], ids=lambda b: b.name)
def test_each_planted_bug_is_found_by_name(bird):
    found, step = canary.found_by(bird)
    assert found in bird.finds and step < canary.STEPS


def test_a_failure_says_invariant_seed_and_step_and_fails_again_there():
    bird = next(bird for bird in canary.CANARIES if bird.name == "double-free")
    with bird.plant(), pytest.raises(Failed) as first:
        run(FUZZERS["engine"], seed=5, steps=4000)
    failed = first.value
    assert f"{failed.invariant} broken" in str(failed) and f"seed 5, step {failed.step}" in str(failed)
    with bird.plant(), pytest.raises(Failed) as again:
        run(FUZZERS["engine"], seed=5, steps=failed.step + 1)
    assert (again.value.step, again.value.invariant) == (failed.step, failed.invariant)
    assert run(FUZZERS["engine"], seed=5, steps=failed.step + 1).steps == failed.step + 1


class Bomb:
    """A target that goes off at its third step."""

    def __init__(self, rng):
        self.events = {}
        self.left = 3

    def step(self):
        self.left -= 1
        if not self.left:
            raise ZeroDivisionError("boom")


def test_a_crash_is_a_finding_too():
    with pytest.raises(Failed) as crash:
        run(Fuzzer("bomb", "goes off", Bomb), seed=1, steps=10)
    assert (crash.value.invariant, crash.value.step) == ("ZeroDivisionError", 2)


def test_the_command_lists_runs_and_refuses():
    listed = command("list")
    assert listed.returncode == 0 and {line.split()[0] for line in listed.stdout.splitlines()} == set(FUZZERS)
    ran = command("sessions", "--seed", "3", "--steps", "50")
    assert ran.returncode == 0 and "50 steps" in ran.stdout
    assert command("no-such-fuzzer").returncode == 2


def test_smoke_names_what_was_met_too_seldom(monkeypatch, capsys):
    engine = Fuzzer("engine", "", FUZZERS["engine"].start, smoke_steps=50, wanted=FUZZERS["engine"].wanted)
    monkeypatch.setattr(smoke, "FUZZERS", {"engine": engine})
    assert smoke.smoke(seed=0) is False
    assert "merge" in capsys.readouterr().out.split("too few to mean anything: ")[1]


def test_a_swarm_switches_some_operations_off_but_not_those_that_are_always_needed():
    names = [f"op{number}" for number in range(20)]
    mixes = []
    for seed in range(5):
        swarm = Swarm(random.Random(seed), names, always=("op0", "op1"))
        mixes.append({swarm.pick() for _ in range(5000)})
    assert all({"op0", "op1"} <= mix for mix in mixes)
    assert any(mix < set(names) for mix in mixes) and len({frozenset(mix) for mix in mixes}) > 1
