"""All that is told, in its order, is all that can be found: engines under fuzz, beside a naive router."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable

import pytest

from fuzz.pairs.recovery import Odds, RecoveryPair, Tables
from fuzz.pairs.told import blocks_of
from fuzz.targets.engine import EngineTarget, random_config
from fuzz.targets.tiers import TiersTarget
from radixkv import commands
from radixkv.allocator.page_states import CACHED
from radixkv.config import PoolConfig
from radixkv.engine.recover import recover
from radixkv.hashing import chain, namespace_root
from radixkv.ipc.event_ledger import Cleared, Event, Ledger, Removed, Sizes, Slice, Stored
from tests.unit.ipc.routing import Router

TINY = Sizes(tokens=3, hashes=2, swept=5, sorted=4)
"""Every slice is small."""


def flat(slices: Iterable[Slice]) -> list[Event]:
    return [event for events in slices for event in events]


class Told:
    """A ledger and a router for each pool of an engine, compared with the engine after every command."""

    def __init__(self, pools: tuple[PoolConfig, ...], sizes: Sizes = TINY) -> None:
        self.ledgers = {pool.name: Ledger(pool, sizes) for pool in pools}
        self.routers = {pool.name: Router() for pool in pools}
        self.seen: Counter[str] = Counter()

    def hear(self, outcome: commands.Outcome) -> None:
        for write in outcome.writes:
            if not isinstance(write, commands.SessionRecord):
                self._hear(write.pool, flat(self.ledgers[write.pool].fold(write)), type(write).__name__)
                if self.ledgers[write.pool].sweeping:
                    self._hear(write.pool, self.ledgers[write.pool].sweep(), "sweep")
        for name, ledger in self.ledgers.items():
            while ledger.sweeping:
                self._hear(name, ledger.sweep(), "sweep")

    def _hear(self, pool: str, events: list[Event], why: str) -> None:
        self.routers[pool].hear(events)
        self.seen.update(f"{type(event).__name__} {getattr(event, 'tier', '')} by {why}" for event in events)

    def compare(self, engine: object) -> None:
        for name, router in self.routers.items():
            assert router.blocks == blocks_of(engine.pools[name])  # type: ignore[attr-defined]

    def compare_everything(self) -> None:
        """A new router that hears of everything at once knows the same."""
        for name, router in self.routers.items():
            late = Router()
            late.hear(flat(self.ledgers[name].everything()))
            assert late.blocks == router.blocks


def drive(seed: int, steps: int) -> Counter[str]:
    """A random day of an engine with a host tier. Returns which events came of which writes."""
    target = TiersTarget(random.Random(seed))
    told, do = Told(target.pair.config.pools, TINY._replace(swept=5 if seed % 2 else 1000)), target.pair.do

    def heard(command: commands.Command) -> commands.Outcome:
        outcome = do(command)
        told.hear(outcome)
        told.compare(target.pair.real)
        return outcome

    target.pair.do = heard  # type: ignore[method-assign]
    for step in range(steps):
        target.step()
        if step % 25 == 0:
            told.compare_everything()
    told.compare_everything()
    return told.seen


def test_two_tiers() -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        print(f"seed {seed}")
        seen += drive(seed, 250)
    assert set(seen) >= {
        "Stored GPU by Publish", "Stored GPU by Copied", "Stored CPU by Copied", "Removed GPU by Assign",
        "Removed GPU by Retire", "Removed CPU by Retire", "Removed GPU by sweep", "Removed CPU by sweep",
    }, seen  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_restarts(seed: int) -> None:
    """After each the ledger begins with what the table says."""
    rng = random.Random(seed)
    target = EngineTarget(rng, pair := RecoveryPair(random_config(rng), rng, Odds(command=0.0)))
    told, do = Told(pair.config.pools), pair.do

    def heard(command: commands.Command) -> commands.Outcome:
        outcome = do(command)
        told.hear(outcome)
        told.compare(pair.real)
        return outcome

    pair.do = heard  # type: ignore[method-assign]
    for _ in range(6):
        for _ in range(60):
            target.step()
        pair.restart()
        told = Told(pair.config.pools)
        images = pair.tables.found(pair.tables.raw(), set()).images
        for name, ledger in told.ledgers.items():
            ledger.restore(images[name], images[name].states == CACHED)
            told.routers[name].hear(flat(ledger.everything()))
        told.compare(pair.real)


@pytest.mark.parametrize("seed", range(6))
def test_a_restart_of_two_tiers(seed: int) -> None:
    """What the next daemon finds in the table is what it tells first."""
    target = TiersTarget(random.Random(seed))
    config, do = target.pair.config, target.pair.do
    (pool,) = config.pools
    tables = Tables(config)

    def stored(command: commands.Command) -> commands.Outcome:
        outcome = do(command)
        for write in outcome.writes:
            tables.apply(write)
        return outcome

    target.pair.do = stored  # type: ignore[method-assign]
    for _ in range(6):
        for _ in range(40):
            target.step()
        engine, writes = recover(config, ("boot", "cache"), tables.found(tables.raw(), set()))
        after = Tables(config)
        os.pwrite(after.writers[pool.name].fd, tables.raw()[pool.name], 0)
        for write in writes:
            after.apply(write)
        image = after.found(after.raw(), set()).images[pool.name]
        ledger, router = Ledger(pool), Router()
        ledger.restore(image, image.states == CACHED)
        router.hear(flat(ledger.everything()))
        assert router.blocks == blocks_of(engine.pools[pool.name])


@pytest.mark.parametrize("seed", range(8))
def test_everything_is_told_as_it_was_however_long_it_takes(seed: int) -> None:
    """Some at a time, while the engine goes on: blocks leave before their turn, and their places are used again."""
    target = TiersTarget(random.Random(seed))
    told, do = Told(target.pair.config.pools), target.pair.do
    (name,) = told.ledgers

    def heard(command: commands.Command) -> commands.Outcome:
        outcome = do(command)
        told.hear(outcome)
        return outcome

    target.pair.do = heard  # type: ignore[method-assign]
    for _ in range(8):
        for _ in range(20):
            target.step()
        wanted, late = {tier: dict(blocks) for tier, blocks in told.routers[name].blocks.items()}, Router()
        telling = told.ledgers[name].everything()
        for events in telling:
            late.hear(events)
            target.step()
        assert late.blocks == wanted


def test_who_stops_listening_costs_nothing() -> None:
    ledger = Ledger(PoolConfig(pages=8))
    telling = ledger.everything()
    next(telling)
    assert len(ledger._tellings) == 1
    del telling
    assert not ledger._tellings


def test_what_an_invalidation_did_away_with_never_returns_under_its_name() -> None:
    pool = PoolConfig(pages=8)
    ledger, names = Ledger(pool), []
    for epoch in range(3):
        flat(ledger.fold(commands.NamespaceRecord(pool.name, 0, epoch, b"n", epoch)))
        flat(ledger.fold(commands.Assign(pool.name, bytes(4), 1, 0, epoch)))
        (stored,) = flat(ledger.fold(commands.Publish(pool.name, bytes(4), False, bytes(4 * pool.spec.page_size))))
        assert isinstance(stored, Stored)
        names.append(stored.hashes)
    assert len(set(names)) == 3


def test_large_events_are_told_as_several() -> None:
    pool = PoolConfig(pages=8)
    size = pool.spec.page_size * 4
    ledger = Ledger(pool, TINY._replace(tokens=8))
    pages = b"".join(n.to_bytes(4, "little") for n in range(3))
    hashes = chain(namespace_root(b"n", 0), bytes(3 * size), size)
    flat(ledger.fold(commands.NamespaceRecord(pool.name, 0, 0, b"n")))
    events = flat(ledger.fold(commands.Publish(pool.name, pages, False, bytes(3 * size))))
    assert [(event.parent, event.hashes) for event in events if isinstance(event, Stored)] == [
        (b"", hashes[:16]), (hashes[:16], hashes[16:32]), (hashes[16:32], hashes[32:])
    ]  # fmt: skip
    assert [type(event) for event in flat(ledger.everything())] == [Cleared, Stored, Stored, Stored]
    gone = flat(ledger.fold(commands.Retire(pool.name, pages)))
    assert gone == [Removed("GPU", hashes[:32]), Removed("GPU", hashes[32:])]
    assert not flat(ledger.fold(commands.Retire(pool.name, pages)))
