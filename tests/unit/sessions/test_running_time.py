"""A daemon that stood still for minutes: nobody's lease is over, whatever the clock says."""

from __future__ import annotations

import pytest

from radixkv.sessions.registry import Registry
from radixkv.sessions.running_time import RunningTime

LEASE_S, STEP_S = 60.0, 5.0
MINUTES = 60.0


class World:
    """A registry, and the clock that its daemon reads."""

    def __init__(self) -> None:
        self.time = RunningTime(STEP_S, now=1000.0)
        self.registry: Registry = Registry(limit=4, keep_replies=4, lease_s=LEASE_S)
        self.silent = self.registry.open(1, b"t" * 16, "silent")

    def run(self, seconds: float) -> None:
        """The daemon runs: its loop turns at least once a step."""
        end = self.time.now + seconds
        while self.time.now < end:
            self.pass_(min(STEP_S, end - self.time.now))

    def pass_(self, seconds: float) -> None:
        """The clock goes on, and the daemon's loop turns once."""
        self.time.advance(self.time.now + seconds)
        self.registry.running_s = self.time.seconds

    def lapsed(self) -> bool:
        return self.registry.lapsed(besides=0) is self.silent


def test_what_the_daemon_runs_counts() -> None:
    world = World()
    world.run(LEASE_S)
    assert not world.lapsed()
    world.run(0.1)
    assert world.lapsed()


@pytest.mark.parametrize("minutes", [1, 10, 24 * 60])
def test_what_it_stands_still_counts_as_one_step(minutes: int) -> None:
    world = World()
    world.run(30.0)
    world.pass_(minutes * MINUTES)
    assert world.time.seconds == 30.0 + STEP_S
    assert not world.lapsed()
    world.run(LEASE_S - 30.0 - STEP_S)
    assert not world.lapsed(), "the rest of its lease is still to come"
    world.run(0.1)
    assert world.lapsed()


def test_a_sign_of_life_that_lay_unread_counts_when_it_is_read() -> None:
    """Stopped ten times, with a heartbeat waiting each time: requests are read before anybody is judged."""
    world = World()
    for _ in range(20):
        world.time.advance(world.time.now + 2 * MINUTES)
        world.registry.find(1, 1)
        world.registry.running_s = world.time.seconds
        assert not world.lapsed()
