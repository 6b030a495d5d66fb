"""What the next daemon finds in two tiers. The long random histories are the fuzzer's ("tiers-torn")."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from fuzz.model.packing import pack_pages, pack_tokens
from fuzz.pairs.recovery import Odds
from fuzz.pairs.tiered_recovery import TieredRecovery
from fuzz.pairs.worker import Held, Worker, small_config
from fuzz.registry import run
from fuzz.targets.catalogue import FUZZERS
from radixkv import commands
from radixkv.config import PAGES_MAX, KVSpec, PoolConfig
from radixkv.device.descriptors import CACHED, FREE, PRIVATE
from radixkv.engine.engine import Engine
from radixkv.engine.invariants import check
from radixkv.errors import ConfigError

P, Q, R = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
"""Prompts of four pages."""


class World:
    """One pool with pages of one token, a worker, and the table cut at every store of every command."""

    def __init__(self, pages: int, host_pages: int, odds: Odds | None = None, **pool: Any) -> None:
        config = small_config(pages, 1, host_pages=host_pages, **{"reclaim_pages": 0, "host_staging_pages": 0} | pool)
        self.pair = TieredRecovery(config, random.Random(3), odds or Odds(command=1.0, tears=3))
        self.worker = Worker(self.pair)

    @property
    def host(self):
        return self.pair.pool.host

    def serve(self, tokens, worker=None) -> int:
        """A prompt is computed and let go of; copies end at once. Returns the tokens that were found."""
        worker = worker or self.worker
        reply = worker.try_reserve(tokens, last_page="keep")
        self.pair.finish_all()
        reply = reply or self.pair.late(worker.session)
        assert isinstance(reply, commands.Reserved), reply
        seq = worker.next_seq - 1
        assert worker.step(commit=[commands.Commit(seq, len(tokens))]).commit == [None]
        assert worker.step(free=[commands.Free(seq)]).free == [None]
        return reply.writable_from_tokens

    def fill(self, pages: int) -> None:
        """So many pages are handed out and come back free: what was cached in them is in the host tier."""
        reply = self.worker.try_reserve(range(1000, 1000 + pages))
        self.pair.finish_all()
        self.worker.free(Held(self.worker.next_seq - 1, reply or self.pair.late(self.worker.session)))

    def where(self, tokens) -> tuple[int, int]:
        return self.worker.look(tokens)

    @property
    def writer(self):
        return self.pair.tables.writers["a"]

    def found(self) -> Engine:
        """What a daemon would find in the table as it is now, whatever has been done to it."""
        return self.pair._recovered(self.pair._raw())[0]

    def served(self, tokens) -> tuple[int, int]:
        """The same of what would be found: tokens on the device, and behind those in the host tier."""
        reply = (
            self.found()
            .step(commands.Request(0, 0, 1, 1e9, commands.Lookup("a", b"model", [pack_tokens(tokens)])), 0.0)
            .reply
        )
        assert isinstance(reply, commands.LookedUp)
        return reply.device_tokens[0], reply.host_tokens[0]


def test_random_histories_cut_at_every_store() -> None:
    report = run(FUZZERS["tiers-torn"], seed=random.randrange(2**32), steps=1200)
    assert report.events["cut"] > 30 and report.events["restart"] > 2


def test_both_tiers_are_found_again_and_serve_on() -> None:
    world = World(4, 8)
    world.serve(P)
    world.serve(Q)
    world.pair.restart()
    assert (world.where(P), world.where(Q)) == ((0, 4), (4, 0))
    assert world.serve(P) == 4, "loaded, with the right bytes: the pair looks at them"
    assert (world.where(P), world.where(Q)) == ((4, 0), (0, 4))
    assert world.serve([*Q[:3], 50]) == 3, "a prompt goes on behind what was saved and loaded"
    world.pair.restart()
    assert (world.where([*Q[:3], 50]), world.where(Q)) == ((4, 0), (3, 1))


def test_runs_of_the_host_tier_hang_below_those_of_the_device() -> None:
    """A prompt half of which has left the device, and a branch that is on the device: links go from tier to tier."""
    world = World(4, 8)
    world.serve(P)
    world.serve([*P[:2], 21, 22])
    assert world.where(P) == (2, 2)
    world.pair.restart()
    assert (world.where(P), world.where([*P[:2], 21, 22])) == ((2, 2), (4, 0))
    assert world.serve(P) == 4


def test_who_dies_while_saving_has_saved_nothing() -> None:
    world = World(4, 8)
    world.serve(P)
    assert world.worker.try_reserve(Q, wait_s=9.0) is None
    assert [one.copy.to_host for one in world.pair.running.values()] == [True]
    world.pair.restart()
    assert world.where(P) == (4, 0)
    assert world.host.pages.counts[0] == 8 and world.pair.pool.pages.counts[0] == 0


def test_who_dies_while_loading_has_loaded_nothing() -> None:
    world = World(8, 8)
    for prompt in (P, Q, R):
        world.serve(prompt)
    assert world.where(P) == (0, 4)
    world.worker.try_reserve(P, wait_s=9.0)
    world.pair.finish()  # room is made
    assert [one.copy.to_host for one in world.pair.running.values()] == [False]
    world.pair.restart()
    assert world.where(P) == (0, 4)
    assert world.pair.pool.pages.counts[0] == 4, "what was being filled is nobody's"
    assert world.serve(P) == 4


def test_the_order_of_the_host_tier_comes_back() -> None:
    world = World(4, 8)
    for prompt in (P, Q, R):
        world.serve(prompt)
    assert world.serve(P) == 4
    assert world.serve([30, 31, 32, 33]) == 0
    world.pair.restart()
    assert (world.where(Q), world.where(R), world.where(P)) == ((0, 0), (0, 4), (0, 4))
    world.serve(Q)
    assert (world.where(R), world.where(P)) == ((0, 0), (0, 4)), "of the two R had been let go of first"


def test_what_was_being_loaded_counts_again() -> None:
    """While it leaves, others come into the host tier in its place. If it does not leave, the coldest are too much."""
    world = World(4, 4, host_staging_pages=8)
    world.serve(P)
    world.serve(Q)
    world.worker.try_reserve(P, wait_s=9.0)
    world.pair.finish()  # Q is saved, P being loaded
    assert world.host.only_pages == 8 and world.host.limit == 4
    world.pair.restart()
    assert (world.where(P), world.where(Q)) == ((0, 0), (0, 4))


def test_a_page_whose_parent_is_in_the_host_tier_alone_is_not_served_from_the_device() -> None:
    """Nothing on the device may hang below what is not. Of clean pages that were being given back, the first went."""
    world = World(4, 8, host_write="through")
    world.serve(P)
    world.pair.finish_all()
    assert world.pair.pool.pages.counts[2] == 4 and world.host.pages.counts[2] == 4, "they are in both tiers"
    writer = world.writer
    (second,) = np.flatnonzero(writer._serials[:4] == 2)
    assert world.served(P) == (4, 0)
    writer.apply(commands.Retire("a", pack_pages([int(second)])))
    assert world.served(P) == (1, 3)
    check(world.found())
    counts = world.found().pools["a"].pages.counts
    assert (counts[FREE], counts[CACHED]) == (3, 1), "the device pages behind it are free"
    host = 4 + np.flatnonzero(writer._serials[4:] == 3)
    writer.apply(commands.Retire("a", pack_pages(host.tolist())))
    assert world.served(P) == (1, 1), "the third is on the device alone, out of reach"


def test_links_rest_on_serials_and_not_on_contents() -> None:
    """Two pages with the same tokens: what follows the one does not follow the other."""
    world = World(8, 4, Odds(command=0.0))
    world.serve(P)
    world.serve([Q[0], *P[1:]])
    writer = world.writer
    second, fourth = (int(np.flatnonzero(writer._serials == serial)[0]) for serial in (2, 8))
    writer.apply(commands.Retire("a", pack_pages([second])))
    assert writer._tokens[fourth].tobytes() == pack_tokens([P[3]])
    assert (world.served(P), world.served([Q[0], *P[1:]])) == ((1, 0), (4, 0))


def test_what_a_load_has_filled_proves_no_old_claim() -> None:
    """A worker is late; meanwhile its page has left the device, and the same tokens are loaded into it again."""
    world = World(4, 8, Odds(command=0.0))
    late = Worker(world.pair)
    held = late.compute(P)
    claim = world.pair._claim(world.pair.sequences(late.session)[held.seq])
    pair = world.pair
    pair.running.clear()
    pair.real, writes = pair._recovered(pair._raw())
    pair.pool = pair.real.pools["a"]
    pair._stored(writes)
    for session in (world.worker.session, late.session):
        assert pair._step(commands.RejoinSession(session, session.to_bytes(16, "little"))) == commands.Done()
        pair.epochs[session] = 2
    pair._step(pair.request(world.worker.session, commands.Resume([])))
    pair.do(commands.Tick(100.0))
    world.serve(Q)
    assert world.where(P) == (0, 4)
    world.serve(P)
    assert world.where(P) == (4, 0)
    reply = pair._step(pair.request(late.session, commands.Resume([claim])))
    assert isinstance(reply, commands.Resumed)
    refused = reply.results[0]
    assert isinstance(refused, commands.Failure) and refused.code == "session_lost"


def test_what_is_being_saved_is_claimed_like_any_cached_page() -> None:
    world = World(4, 8, Odds(command=0.0))
    late = Worker(world.pair)
    held = late.compute(P)
    claim = world.pair._claim(world.pair.sequences(late.session)[held.seq])
    pair = world.pair
    pair.real, writes = pair._recovered(pair._raw())
    pair.pool = pair.real.pools["a"]
    pair._stored(writes)
    for session in (world.worker.session, late.session):
        pair._step(commands.RejoinSession(session, session.to_bytes(16, "little")))
        pair.epochs[session] = 2
    pair._step(pair.request(world.worker.session, commands.Resume([])))
    pair.do(commands.Tick(100.0))
    assert world.worker.try_reserve(Q, wait_s=9.0) is None and len(pair.running) == 1
    reply = pair._step(pair.request(late.session, commands.Resume([claim])))
    assert isinstance(reply, commands.Resumed) and reply.results == [commands.Kept(4, 4)]
    pair.finish_all()
    assert world.where(P) == (4, 0)


def test_the_copy_of_what_is_being_loaded_stays_although_it_is_on_the_device_again() -> None:
    """Computed anew by somebody who cannot wait, while it is loaded for another; then the host tier is short."""
    world = World(8, 4, Odds(command=0.0))
    world.serve(P)
    world.serve(Q)
    world.serve(R)
    assert world.where(P) == (0, 4)
    assert world.worker.ask(commands.Prefetch("a", b"model", pack_tokens(P))) is None
    while next(iter(world.pair.running.values())).copy.to_host:
        world.pair.finish()
    seq = world.worker.reserve([], headroom=0)
    world.worker.try_extend(seq, P)
    reading = [page for page, state in enumerate(world.host.pages.states) if state == 5]
    assert len(reading) == 4
    world.host._uncover_some(1)
    assert [world.host.pages.states[page] for page in reading] == [5] * 4
    world.pair.finish_all()


@pytest.mark.parametrize("count", [1, 40])
def test_a_record_that_is_copied_is_whole_last(count: int) -> None:
    """Before the state word is stored it is what it was: free in the host tier, private on the device."""
    world = World(64, 64, Odds(command=0.0))
    tokens = list(range(count))
    world.worker.compute(tokens)
    writer = world.writer
    pages, there = list(range(count)), list(range(64, 64 + count))
    writer.apply(commands.Stamp("a", pack_pages(pages), 9))
    writer.apply(commands.Copied("a", pack_pages(pages), pack_pages(there)))
    image = world.pair.tables.found(world.pair.tables.raw(), set()).images["a"]
    assert image.sound[there].all() and (image.states[there] == CACHED).all()
    for name in ("stamps", "namespaces", "epochs", "serials", "parent_serials", "tokens"):
        assert (getattr(image, name)[there] == getattr(image, name)[pages]).all(), name
    assert not image.generations[there].any() and not image.owners[there].any()
    writer.apply(commands.Assign("a", pack_pages([63]), 0, 0, 1))
    writer.apply(commands.Copied("a", pack_pages(there[:1]), pack_pages([63])))
    image = world.pair.tables.found(world.pair.tables.raw(), set()).images["a"]
    assert image.sound[63] and image.states[63] == CACHED and image.generations[63] == 1
    assert image.serials[63] == image.serials[0]


def test_places_of_both_tiers_fit_a_page_id() -> None:
    spec = KVSpec(1, 1, 1, page_size=1)
    with pytest.raises(ConfigError, match="host_pages"):
        PoolConfig("a", spec, pages=10, host_pages=PAGES_MAX - 9)
    assert PoolConfig("a", spec, pages=10, host_pages=PAGES_MAX - 10).host_pages == PAGES_MAX - 10
    assert PRIVATE == 1


# -- sequences that were granted before their pages were there ------------------------------------------------------


@pytest.mark.parametrize("ended", [False, True], ids=["loading", "loaded, and not told"])
def test_who_had_pages_that_were_still_loading_has_lost_them_and_nobody_else_has(ended: bool) -> None:
    """Cut at every store: nobody ever serves such a page (``TieredRecovery``)."""
    world = World(10, 12)
    world.serve(P)
    world.fill(10)
    kept = world.worker.compute([13, 14])
    early = world.worker.reserve([*P, 15], early=True)
    assert world.pair.sequences(world.worker.session)[early.seq].loading == range(4)
    if ended:
        world.pair.finish()
    world.pair.restart()
    left = set(world.pair.sequences(world.worker.session))
    assert left == ({kept.seq, early.seq} if ended else {kept.seq})
    assert world.pair.events["lost while loading"] == (0 if ended else 1)
    assert world.where(P) == ((4, 0) if ended else (0, 4))
    assert world.serve([*P, 16]) == 4


def test_shadows_that_a_load_has_left_go_on_with_the_next_daemon() -> None:
    world = World(10, 12)
    other = world.worker.reserve(P)
    world.serve(P)
    world.fill(6)
    early = world.worker.reserve([*P, 15], early=True)
    world.worker.commit(other, 4)
    world.pair.finish()
    world.pair.restart()
    seq = world.pair.sequences(world.worker.session)[early.seq]
    assert seq.shadows == frozenset(early.pages[:4])
    world.worker.commit(early, 5)
    assert world.where([*P, 15]) == (5, 0)
