"""Sequences that are granted while their pages are being loaded: every order of what may happen before the copy ends.

After every step ``Tiered`` recounts everything, compares what is in the pages of both tiers with their tokens, and
holds each answer to what is really there of the pages that it names. Pages have one token, and three layers.
"""

from dataclasses import replace

import pytest

from fuzz.model.packing import unpack_pages
from fuzz.pairs.tiered import Tiered
from fuzz.pairs.worker import Held, Worker, code, small_config
from radixkv import commands
from radixkv.allocator.page_states import State
from radixkv.config import Limits
from radixkv.engine.tiering import PATIENCE_S, REST_S, ROUNDS

P = [1, 2, 3, 4]
"""A prompt of four pages."""
END = 9
"""A token that nobody has cached."""
LAYERS = 3


class World:
    """A pool of ten pages, all free; P is in the host tier. Two workers."""

    def __init__(self, limits=None, cached=(P,), pages=10, **pool):
        config = small_config(pages, 1, limits, **{"host_pages": 12, "reclaim_pages": 0} | pool)
        (only,) = config.pools
        config = replace(config, pools=(replace(only, spec=replace(only.spec, layers=LAYERS)),))
        self.pair = Tiered(config)
        self.one, self.two = Worker(self.pair), Worker(self.pair)
        for prompt in cached:
            self.one.cache(prompt)
        self.fill(pages)
        self.host = self.pair.pool.host
        self.pages = self.pair.pool.pages

    def fill(self, pages):
        """So many pages are handed out and come back free: what was cached in them is in the host tier."""
        reply = self.one.try_reserve([1000 + n for n in range(pages)])
        self.pair.finish_all()
        reply = reply or self.pair.late(self.one.session)
        self.one.free(Held(self.one.next_seq - 1, reply))

    def early(self, tokens=(*P, END), worker=None, **options):
        """A reserve that does not wait for its pages: the sequence, and which of them are loading."""
        held = (worker or self.one).reserve(tokens, early=True, **options)
        return held, self.loading(held, worker)

    def loading(self, held, worker=None):
        """As the engine knows it; the pair has compared the answer with what copies fill."""
        return list(self.pair.sequences((worker or self.one).session)[held.seq].loading)

    def wait(self, held, layer=None, worker=None):
        return (worker or self.one).ask(commands.WaitLoaded(held.seq, layer))

    def late(self, worker=None):
        return self.pair.late((worker or self.one).session)

    def granted(self, worker=None):
        """The late answer to the last reserve, as a sequence."""
        return Held((worker or self.one).next_seq - 1, self.late(worker))

    def load(self):
        """The number of the one copy that runs."""
        (copy,) = self.pair.running
        return copy

    def counter(self, name):
        return self.pair.real.snapshot()["counters"][name]

    def fail(self, times=1):
        """The copier dies; before each further death it rests."""
        for _ in range(times):
            self.pair.finish(ok=False)
            self.pair.tick(REST_S)


ALL_THERE = commands.Loaded(LAYERS)


# -- the answer -----------------------------------------------------------------------------------------------------


def test_a_hit_on_host_pages_is_answered_when_the_load_has_begun():
    world = World()
    held, loading = world.early()
    assert loading == [0, 1, 2, 3] and held.cached == 4 and held.writable_from == 4
    assert world.counter("hit_tokens") == 4
    world.pair.finish()
    assert world.wait(held) == ALL_THERE
    world.one.commit(held, 5)
    assert world.one.look([*P, END]) == (5, 0)


def test_without_the_flag_a_reserve_waits_and_nothing_is_loading():
    world = World()
    assert world.one.try_reserve([*P, END]) is None
    world.pair.finish()
    reply = world.late()
    assert reply.loading == commands.NO_RANGE and reply.cached_tokens == 4


def test_what_is_on_the_device_comes_before_what_is_loading():
    world = World(cached=([1, 2], P))
    first = world.one.reserve([1, 2, END], early=True)
    world.pair.finish()
    held, loading = world.early(worker=world.two)
    assert loading == [2, 3] and held.cached == 4
    assert held.pages[:2] == first.pages[:2]


def test_an_early_reserve_saves_what_has_to_leave_before_it_loads():
    world = World(pages=6)
    world.one.cache([5, 6, 7])
    assert world.one.try_reserve([*P, END], early=True) is None, "two pages that are nowhere else have to leave"
    assert world.pair.running[world.load()].copy.to_host
    world.pair.finish()
    reply = world.late()
    assert reply.loading == (0, 4), "granted when the load has begun"


@pytest.mark.parametrize(("last_page", "loading", "cached"), [("keep", 4, 3), ("copy", 3, 3), ("drop", 3, 3)])
def test_of_a_prompt_that_is_cached_to_its_end_the_last_page_is_computed_unless_it_is_kept(last_page, loading, cached):
    """Its rows could not be copied: they are not there."""
    world = World()
    held = world.one.reserve(P, early=True, last_page=last_page)
    assert len(world.loading(held)) == loading
    assert (held.cached, held.copy_rows) == (cached, [])
    world.pair.finish()
    world.one.commit(held, 4)
    assert world.one.look(P) == (4, 0)


def test_a_prompt_whose_last_page_alone_is_in_the_host_tier_waits_for_it():
    world = World(cached=([1], [1, 2]))
    world.one.reserve([1, END], early=True)
    world.pair.finish()
    assert world.two.try_reserve([1, 2], early=True) is None
    world.pair.finish()
    assert world.late(world.two).loading == commands.NO_RANGE


def test_what_does_not_pay_is_not_loaded_early_either():
    world = World(host_load_min_tokens=5)
    held, loading = world.early()
    assert loading == [] and held.cached == 0


# -- waiting --------------------------------------------------------------------------------------------------------


def test_layers_are_told_as_they_come():
    world = World()
    held, _ = world.early()
    assert world.wait(held, 0) is None
    world.pair.progress(world.load(), 1)
    assert world.late() == commands.Loaded(1, (0, 4))
    assert world.wait(held, 0) == commands.Loaded(1, (0, 4)), "known already"
    assert world.wait(held, 1) is world.wait(held, 2) is world.wait(held) is None
    world.pair.progress(world.load(), 2)
    assert world.late() == commands.Loaded(2, (0, 4))
    world.pair.finish()
    assert world.late() == ALL_THERE
    assert world.pair.real.queued == 0
    assert world.wait(held, 1) == ALL_THERE


def test_a_layer_that_does_not_exist_is_refused():
    world = World()
    held, _ = world.early()
    assert code(world.wait(held, LAYERS)) == "bad_request"
    assert code(world.one.ask(commands.WaitLoaded(77))) == "stale_handle"
    assert code(world.wait(held, worker=world.two)) == "stale_handle"


def test_who_waits_too_long_is_told_so_and_the_load_goes_on():
    world = World()
    held, _ = world.early()
    assert world.one.ask(commands.WaitLoaded(held.seq), world.pair.now + 2.0) is None
    assert world.pair.real.next_deadline() == world.pair.now + 2.0
    world.pair.tick(3.0)
    assert code(world.late()) == "timeout"
    world.pair.finish()
    assert world.wait(held) == ALL_THERE


def test_no_more_wait_than_may():
    world = World(Limits(queued=1))
    held, _ = world.early()
    assert world.wait(held) is None
    assert code(world.wait(held)) == "limit_exceeded"


def test_a_wait_is_taken_back():
    world = World()
    held, _ = world.early()
    assert world.wait(held) is None
    request = world.pair._next_request[world.one.session]
    assert world.one.ask(commands.Cancel(request)) == commands.Done()
    assert code(world.late()) == "timeout"


def test_who_waits_for_a_sequence_that_is_freed_is_told_so():
    world = World()
    held, _ = world.early()
    assert world.wait(held) is None
    world.one.free(held)
    assert code(world.late()) == "stale_handle"


def test_draining_lets_a_load_be_waited_for():
    world = World()
    held, _ = world.early()
    assert world.wait(held) is None
    world.pair.do(commands.Drain())
    world.pair.finish()
    assert world.late() == ALL_THERE


def test_progress_of_what_nobody_knows_is_counted():
    world = World()
    held, _ = world.early()
    load = world.load()
    world.pair.progress(99, 1)
    world.pair.finish()
    world.pair.progress(load, 1)
    assert world.counter("unknown_copies") == 2
    assert world.wait(held) == ALL_THERE


# -- others ---------------------------------------------------------------------------------------------------------


def test_others_see_the_prefix_where_it_was():
    world = World()
    world.early()
    assert world.two.look([*P, END]) == (0, 4)
    assert world.two.try_reserve([*P, END]) is None, "who may not be early waits for the copy"
    world.pair.finish()
    assert world.late(world.two).cached_tokens == 4


def test_another_early_one_shares_the_pages():
    world = World()
    held, _ = world.early()
    other = world.two.reserve([*P, 8, 8], early=True)
    assert other.pages[:4] == held.pages[:4] and len(world.pair.running) == 1
    part = world.two.reserve([1, 2, END], early=True)
    assert part.pages[:2] == held.pages[:2] and world.loading(part, world.two) == [0, 1]
    assert world.wait(held) is world.wait(other, worker=world.two) is world.wait(part, 0, worker=world.two) is None
    world.pair.progress(world.load(), 1)
    assert world.late(world.two) == commands.Loaded(1, (0, 2))
    world.one.free(held)
    world.pair.finish()
    assert world.late(world.two) == ALL_THERE
    world.two.commit(other, 6)
    assert world.two.look([*P, 8, 8]) == (6, 0)


def test_an_early_one_joins_a_load_that_somebody_else_waits_for():
    world = World()
    assert world.one.try_reserve([*P, END]) is None
    held, loading = world.early(worker=world.two)
    assert loading == [0, 1, 2, 3] and world.wait(held, 0, world.two) is None
    world.pair.finish()
    assert world.late(world.two) == ALL_THERE
    assert world.granted().pages[:4] == held.pages[:4]


def test_what_a_running_load_does_not_bring_is_waited_for():
    world = World(cached=(P,))
    world.one.reserve([1, 2, END], early=True)
    assert world.two.try_reserve([*P, END], early=True) is None
    world.pair.finish()
    assert world.late(world.two).loading == (2, 2)


def computed_by_another(pages):
    """A world in which worker 2 has computed the first pages of P and not said so, and two sequences of worker 1 have
    them early."""
    world = World(cached=())
    other = world.two.reserve(P[:pages])
    world.one.cache(P)
    world.fill(10 - pages)
    held, loading = world.early()
    again, _ = world.early([*P, 8])
    assert loading == [0, 1, 2, 3] and len(world.pair.running) == 1
    return world, other, held, again


@pytest.mark.parametrize("pages", [2, 4])
def test_what_another_has_committed_meanwhile_is_the_runs_and_what_was_loaded_are_shadows(pages):
    world, other, held, again = computed_by_another(pages)
    world.two.commit(other, pages)
    assert world.two.look(P) == (pages, 4 - pages)
    world.pair.finish()
    assert world.two.look(P) == (4, 0)
    assert world.pages.counts[State.SHADOW] == pages
    for seq in (held, again):
        assert world.wait(seq) == ALL_THERE
        world.one.commit(seq, 5)
    compact = unpack_pages(world.one.ask(commands.Compact(held.seq)).page_table)
    assert compact[:pages] == other.pages and compact[pages:4] == held.pages[pages:4]
    assert world.pages.counts[State.SHADOW] == pages, "the other one has them still"
    world.one.free(again)
    assert world.pages.counts[State.SHADOW] == 0


def test_who_joins_when_another_has_committed_the_beginning_gets_his_pages_and_the_rest_of_the_load():
    world, other, held, _ = computed_by_another(2)
    world.two.commit(other, 2)
    third, loading = world.early([*P, 5], worker=world.two)
    assert loading == [2, 3]
    assert third.pages[:4] == other.pages + held.pages[2:4]
    world.pair.finish()
    world.two.commit(third, 5)
    assert world.two.look([*P, 5]) == (5, 0)


def test_shadows_of_early_ones_stay_until_the_last_has_let_go():
    world, other, held, again = computed_by_another(4)
    world.two.commit(other, 4)
    world.pair.finish()
    world.two.free(other)
    world.one.free(held)
    assert world.pages.counts[State.SHADOW] == 4
    world.one.free(again)
    assert world.pages.counts[State.SHADOW] == 0


def test_pages_that_another_has_made_needless_and_nobody_reads_are_free():
    world, other, held, again = computed_by_another(4)
    world.one.free(held)
    world.one.free(again)
    world.two.commit(other, 4)
    world.pair.finish()
    assert world.pages.counts[State.SHADOW] == 0 and world.pages.counts[State.LOADING] == 0


def test_an_invalidated_prefix_is_loaded_to_its_end_and_read_by_who_has_it():
    world = World()
    held, _ = world.early()
    world.two.invalidate()
    assert world.two.look(P) == (0, 0)
    world.pair.finish()
    assert world.wait(held) == ALL_THERE
    world.one.free(held)
    world.pair.tick(1.0)
    assert world.pages.counts[State.FREE] == 10 and world.host.pages.counts[State.FREE] == world.host.pages.size


# -- verbs while pages are loading ----------------------------------------------------------------------------------


def test_what_publishes_or_passes_pages_is_refused_until_they_are_there():
    world = World()
    held, _ = world.early()
    seq = held.seq
    done = world.one.step(
        commit=[commands.Commit(seq, 5)],
        truncate=[commands.Truncate(seq, 4)],
        share=[commands.Share(seq, None, 1, 50)],
        copied=[seq],
    )
    for answer in (*done.commit, *done.truncate, *done.share, *done.copied):
        assert code(answer) == "bad_request"
    assert code(world.one.ask(commands.Compact(seq))) == "bad_request"
    assert code(world.one.ask(commands.Handoff(seq, bytes(16), 5.0))) == "bad_request"
    world.pair.progress(world.load(), LAYERS - 1)
    assert code(world.one.step(commit=[commands.Commit(seq, 5)]).commit[0]) == "bad_request"
    world.one.extend(held, [8], headroom=1)
    world.pair.finish()
    world.one.commit(held, 6)
    assert world.one.look([*P, END, 8]) == (6, 0)


def test_a_commit_with_the_free_of_a_loading_one_is_refused_and_the_free_is_not():
    world = World()
    held, _ = world.early()
    (answer,) = world.one.step(free=[commands.Free(held.seq, 5)]).free
    assert code(answer) == "bad_request"
    world.pair.finish()
    assert world.one.look([*P, END]) == (4, 0)
    assert world.pages.counts[State.FREE] == 6


@pytest.mark.parametrize("end", ["free", "bye", "killed"])
def test_a_load_goes_on_when_who_has_its_pages_is_over(end):
    world = World()
    held, _ = world.early()
    assert world.wait(held) is None
    if end == "free":
        world.one.free(held)
    elif end == "bye":
        world.one.ask(commands.Bye())
    else:
        world.pair.do(commands.EndSession(world.one.session, True, "killed"))
    assert world.pages.counts[State.LOADING] == 4
    world.pair.finish()
    assert world.two.look(P) == (4, 0)
    world.pair.do(commands.MappingGone(world.one.session))
    assert world.pages.counts[State.FREE] == 6
    assert world.pair.real.snapshot()["pools"]["a"]["evictable_pages"] == 4


@pytest.mark.parametrize("freed_first", [True, False], ids=["freed while loading", "freed afterwards"])
def test_priorities_are_said_of_pages_that_were_loading(freed_first):
    world = World(pin_limit_pages=4)
    held, _ = world.early(retain=[commands.Retain(100, 60.0, 1, 3), commands.Retain(0, None, 3, 4)])
    if freed_first:
        world.one.free(held)
        world.pair.finish()
    else:
        world.pair.finish()
        world.one.free(held)
    assert world.pair.pool.priorities.pinned_pages == 2
    assert world.one.look(P) == (4, 0)
    world.one.free(world.one.reserve([77] * 7))
    assert world.one.look(P)[0] == 3, "the last one leaves first"


# -- failures -------------------------------------------------------------------------------------------------------


def test_a_load_that_fails_is_begun_again_and_nobody_notices():
    world = World()
    held, _ = world.early()
    first = world.load()
    assert world.wait(held) is None
    world.pair.progress(first, 1)
    world.pair.finish(ok=False)
    assert world.load() != first and world.pair.real.queued == 1
    assert world.wait(held, 0) == commands.Loaded(1, (0, 4)), "what was there is"
    world.pair.finish()
    assert world.late() == ALL_THERE
    assert (world.counter("failed_copies"), world.counter("unknown_copies")) == (1, 0)
    world.one.commit(held, 5)


def test_the_end_of_an_earlier_try_is_nobodys():
    world = World()
    held, _ = world.early()
    first = world.load()
    world.pair.finish(ok=False)
    world.pair.do(commands.CopyDone(first, True))
    assert world.counter("unknown_copies") == 1
    assert world.wait(held) is None


def test_from_the_second_time_on_it_rests_before_it_is_begun_again():
    world = World()
    world.early()
    world.pair.finish(ok=False)
    assert len(world.pair.running) == 1, "at once"
    world.pair.finish(ok=False)
    assert not world.pair.running
    assert world.pair.real.next_deadline() == world.pair.now + REST_S
    world.pair.tick(REST_S / 2)
    assert not world.pair.running
    world.pair.tick(REST_S / 2)
    assert len(world.pair.running) == 1


def lost(world, held):
    """The load fails until it is given up."""
    for _ in range(ROUNDS + 1):
        if not world.pair.running:
            break
        world.fail()
    assert not world.pair.running and not world.host.copies
    return world.wait(held)


def test_a_load_that_fails_for_good_loses_those_who_have_its_pages_and_nobody_else():
    world = World(cached=(P, [5]))
    other = world.two.compute([6, 6])
    held, _ = world.early()
    again, _ = world.early([*P, 8], worker=world.two)
    assert world.wait(held, 0) is None
    assert world.wait(held, 1) is None
    world.pair.progress(world.load(), 1)
    began = world.pair.now
    assert code(lost(world, held)) == "copy_failed"
    assert PATIENCE_S <= world.pair.now - began <= PATIENCE_S + 2 * REST_S
    assert code(world.late()) == "copy_failed", "who waited is told"
    assert code(world.wait(again, worker=world.two)) == "copy_failed"
    assert world.two.look([*P, END]) == (0, 4), "back where it was"
    world.two.commit(world.two.fork(other)[0], 2)
    done = world.one.step(
        commit=[commands.Commit(held.seq, 5)],
        truncate=[commands.Truncate(held.seq, 4)],
        extend=[commands.Extend(held.seq, b"")],
        share=[commands.Share(held.seq, None, 1, 50)],
    )
    for answer in (*done.commit, *done.truncate, *done.extend, *done.share):
        assert code(answer) == "copy_failed"
    assert code(world.one.ask(commands.Handoff(held.seq, bytes(16), 5.0))) == "copy_failed"
    world.one.free(held)
    world.two.free(again)
    assert world.pages.counts[State.LOADING] == 0
    world.pair.tick(REST_S)
    fresh, _ = world.early()
    world.pair.finish()
    assert world.wait(fresh) == ALL_THERE


def test_private_pages_of_a_lost_sequence_are_its_own_until_it_is_freed():
    world = World()
    held, _ = world.early(headroom=2)
    lost(world, held)
    assert world.pages.counts[State.PRIVATE] == 3
    world.one.free(held)
    assert world.pages.counts[State.FREE] == 10


def test_what_another_has_computed_stays_his_when_the_load_fails_for_good():
    world, other, held, again = computed_by_another(2)
    world.two.commit(other, 2)
    assert code(lost(world, held)) == code(world.wait(again)) == "copy_failed"
    assert world.two.look(P) == (2, 2)
    world.two.extend(other, [3, 7])
    world.two.commit(other, 4)


def test_a_load_without_readers_is_not_begun_again():
    world = World()
    held, _ = world.early()
    world.one.free(held)
    world.pair.finish(ok=False)
    assert not world.pair.running and world.two.look(P) == (0, 4)


def test_a_load_whose_readers_have_left_while_it_rests_is_loaded_all_the_same():
    world = World()
    held, _ = world.early()
    world.fail(2)
    world.one.free(held)
    world.pair.finish()
    assert world.two.look(P) == (4, 0)
