"""What is copied between the tiers and when, told step by step; and each way a copy can go, in every order of events.

After every step ``Tiered`` recounts everything and compares what is in the pages of both tiers with their tokens.
"""

import pytest

from fuzz.pairs.tiered import Tiered
from fuzz.pairs.worker import Held, Worker, code, small_config
from radixkv import commands
from radixkv.allocator.page_states import State
from radixkv.config import Limits
from radixkv.engine import tiering
from radixkv.engine.tiering import PATIENCE_S, REST_S

P = [1, 2, 3, 4]
"""A prompt of four pages."""
Q = [5, 6, 7, 8]


class World:
    """One pool with pages of one token, and a worker. Nothing is copied ahead of need unless told otherwise."""

    def __init__(self, pages, host_pages, page_size=1, limits=None, **pool):
        options = {"reclaim_pages": 0, "host_staging_pages": 0} | pool
        self.pair = Tiered(small_config(pages, page_size, limits, host_pages=host_pages, **options))
        self.worker = Worker(self.pair)
        self.host = self.pair.pool.host
        self.order = self.pair.pool.order

    def request(self, tokens, **options):
        """A reserve that may wait for copies: its reply, or None."""
        return self.worker.try_reserve(tokens, **options)

    def granted(self, worker=None):
        """The late answer to the last request, as a sequence."""
        worker = worker or self.worker
        reply = self.pair.late(worker.session)
        assert isinstance(reply, commands.Reserved), reply
        return Held(worker.next_seq - 1, reply)

    def serve(self, tokens, worker=None, **options):
        """A prompt is reserved, computed and let go of; copies end at once. Returns the cached tokens."""
        worker = worker or self.worker
        reply = worker.try_reserve(tokens, last_page="keep", **options)
        self.pair.finish_all()
        held = Held(worker.next_seq - 1, reply) if reply is not None else self.granted(worker)
        worker.commit(held, len(tokens))
        worker.free(held)
        return held.writable_from

    def where(self, tokens):
        """Cached tokens on the device, and behind those in the host tier."""
        return self.worker.look(tokens)

    def counter(self, name):
        return self.pair.real.snapshot()["counters"][name]

    def copies(self):
        return [(one.copy.to_host, len(one.sources)) for one in self.pair.running.values()]


# -- out and in again --------------------------------------------------------------------------------------------------


def test_a_reserve_that_would_push_out_what_is_nowhere_else_waits_until_it_is_saved():
    world = World(6, 8)
    world.worker.cache(P)
    assert world.request(Q) is None
    assert world.copies() == [(True, 2)]  # two pages were free: two have to leave, the tail
    assert world.where(P) == (4, 0)
    world.pair.finish()
    assert len(world.granted().pages) == 4
    assert world.where(P) == (2, 2)
    assert (world.counter("saved_pages"), world.counter("evicted_pages")) == (2, 0)


def test_what_the_host_tier_has_comes_back_before_a_prompt_is_answered():
    world = World(6, 8)
    world.serve(P)
    world.serve(Q)
    assert world.where(P) == (2, 2)
    assert world.request(P, last_page="keep") is None
    world.pair.finish()  # Q's tail is saved first
    assert world.copies() == [(False, 2)]
    world.pair.finish()
    assert world.granted().writable_from == 4
    assert (world.counter("loaded_pages"), world.where(Q)) == (2, (2, 2))


def test_what_is_in_both_tiers_leaves_the_device_without_a_copy():
    world = World(6, 8, host_staging_pages=2)
    for prompt in (P, Q, P):
        world.serve(prompt)
    world.serve(Q)
    saved = world.counter("saved_pages")
    assert world.serve(P) == 4
    assert world.counter("saved_pages") == saved  # P has never left the host tier, Q neither


def test_a_reserve_for_free_pages_waits_for_nothing():
    world = World(8, 8)
    world.worker.cache(P)
    assert isinstance(world.request(Q), commands.Reserved) and not world.copies()


def test_extends_truncates_and_forks_never_wait_but_drop():
    world = World(6, 8)
    world.worker.cache(P)
    held = world.worker.compute([9])
    assert len(world.worker.extend(held, [5, 6, 7])) == 3
    assert (world.copies(), world.where(P), world.counter("evicted_pages")) == ([], (2, 0), 2)


def test_two_that_need_the_same_of_the_host_tier_are_answered_by_one_load():
    world = World(8, 8)
    world.serve(P)
    world.worker.free(world.worker.reserve([], headroom=4))
    world.serve([*Q, 9, 9])
    other = Worker(world.pair)
    assert world.where(P) == (2, 2)
    free = world.worker.reserve([], headroom=0)
    assert world.request(P, last_page="keep") is None
    assert other.try_reserve(P, last_page="keep") is None
    world.pair.finish_all()
    assert world.granted().pages == world.granted(other).pages
    assert world.counter("loaded_pages") == 2
    world.worker.free(free)


def test_what_has_been_computed_while_it_was_loaded_is_there_once():
    """A patient worker waits for the load, another went without and was quicker."""
    world = World(8, 8)
    world.serve(P)
    world.serve(range(20, 28))
    assert world.where(P) == (0, 4)
    assert world.request(P, last_page="keep") is None
    world.pair.finish()
    assert world.copies() == [(False, 4)]
    hasty = world.worker
    world.host.rests_until = world.pair.now + 1  # so that the next one goes without
    held = hasty.reserve(P)
    hasty.commit(held, 4)  # and these pages are now the device's
    assert world.where(P) == (4, 0)
    assert world.counter("evicted_pages") == 8  # four on the device, and with them what followed in the host tier
    world.pair.finish()
    assert world.granted().pages == held.pages
    assert world.pair.pool.pages.counts[State.FREE] == 4  # what was to be filled


def test_what_is_computed_again_although_the_host_tier_has_it_is_on_both():
    world = World(6, 8)
    world.serve(P)
    world.serve(Q)
    world.host.rests_until = world.pair.now + 1
    held = world.worker.compute(P)
    assert world.where(P) == (4, 0)
    world.worker.free(held)
    assert world.serve(Q) >= 0 and world.counter("loaded_pages") == 0
    assert world.where(P)[1] == 2  # clean: it sank without having been saved again


def test_what_is_computed_again_may_have_been_let_go_of_at_different_times():
    world = World(8, 8)
    world.serve(P)
    world.serve(P[:2])
    world.serve(range(20, 28))
    assert world.where(P) == (0, 4)
    world.host.rests_until = world.pair.now + 1
    held = world.worker.compute([*P, 9])
    assert (world.where([*P, 9]), world.where(P[:2])) == ((5, 0), (2, 0))
    world.worker.free(held)


# -- ahead of need ----------------------------------------------------------------------------------------------------


def test_the_coldest_are_saved_before_anybody_needs_their_pages():
    world = World(12, 8, reclaim_pages=4)
    world.worker.cache(P)
    assert not world.copies()
    world.worker.cache([*Q, 9, 9, 9])  # one page is free now: less than half of four
    assert world.copies() == [(True, 3)]
    world.pair.finish()
    assert isinstance(world.request(range(20, 24)), commands.Reserved)
    assert world.where(P) == (1, 3)


def test_no_more_is_saved_ahead_than_the_host_tier_may_have():
    world = World(12, 2, reclaim_pages=4)
    world.worker.cache(P)
    world.worker.cache([*Q, 9, 9, 9, 9])
    assert world.copies() == [(True, 2)]


def test_write_through_saves_what_has_been_committed_at_once():
    world = World(12, 8, host_write="through")
    held = world.worker.compute(P)
    assert world.copies() == [(True, 4)]
    world.worker.extend(held, [9])
    world.worker.commit(held, 5)
    assert world.copies() == [(True, 4)]  # one at a time
    world.pair.finish()
    assert world.copies() == [(True, 1)]
    world.pair.finish_all()
    world.worker.free(held)
    assert isinstance(world.request(range(20, 32)), commands.Reserved)
    assert world.where([*P, 9]) == (0, 5)


@pytest.mark.parametrize(("speed", "loads"), [(0.0, True), (0.5, True), (1e9, False)])
def test_what_is_quicker_to_compute_is_not_loaded(speed, loads):
    world = World(6, 8)
    world.serve(P)
    world.serve(Q)
    world.request(P, last_page="keep")
    while world.pair.running:  # how fast a load is has to be measured once
        world.pair.do(commands.CopyDone(next(iter(world.pair.running)), True, 1.0))
    world.worker.free(world.granted())
    world.serve(Q)
    loaded = world.counter("loaded_pages")
    world.request(P, last_page="keep", prefill_tokens_per_s=speed)
    world.pair.finish_all()
    assert (world.counter("loaded_pages") > loaded) == loads


# -- prefetch ---------------------------------------------------------------------------------------------------------


def prefetch(world, tokens, namespace=b"model"):
    return world.worker.ask(commands.Prefetch("a", namespace, b"".join(one.to_bytes(4, "little") for one in tokens)))


def test_prefetch_brings_back_what_a_prompt_will_need():
    world = World(8, 8)
    world.serve(P)
    world.serve([*Q, 9, 9, 9])
    assert world.where(P) == (1, 3)
    assert prefetch(world, P) is None
    world.pair.finish_all()
    reply = world.pair.late(world.worker.session)
    assert (reply.device_tokens, reply.host_tokens) == ([4], [0])
    assert isinstance(world.request(P), commands.Reserved)


def test_prefetch_of_what_is_there_or_nowhere_is_answered_at_once():
    world = World(8, 8)
    world.serve(P)
    assert prefetch(world, P).device_tokens == [4]
    assert prefetch(world, Q).device_tokens == [0]
    assert prefetch(world, P, b"unknown").device_tokens == [0]


def test_prefetch_takes_nothing_from_those_who_hold_pages():
    world = World(8, 8)
    world.serve(P)
    world.serve(range(20, 28))
    held = world.worker.reserve(range(20, 26), last_page="keep")
    reply = prefetch(world, P)
    assert (code(reply), reply.details["need"], reply.details["available"]) == ("out_of_pages", 4, 2)
    world.worker.free(held)


# -- who waits --------------------------------------------------------------------------------------------------------


def test_who_waits_for_copies_may_give_up():
    world = World(6, 8)
    world.worker.cache(P)
    assert world.request(Q) is None
    ((_, request),) = [(one.session, one.request) for one in world.pair.pool.fetching.all()]
    world.worker.ask(commands.Cancel(request))
    assert code(world.pair.granted[world.worker.session, request]) == "timeout"
    world.pair.finish_all()
    assert world.where(P) == (4, 0)


def test_a_copy_that_never_ends_is_waited_for_only_so_long():
    """Then what it does not hold is dropped."""
    world = World(8, 8)
    world.worker.cache(P)
    world.worker.cache([9, 9])
    assert world.request(Q) is None
    assert world.copies() == [(True, 2)]
    world.pair.tick(PATIENCE_S - 0.5)
    assert world.pair.late(world.worker.session) is None
    world.pair.tick(0.5)
    assert len(world.granted().pages) == 4
    assert (world.where(P), world.where([9, 9])) == ((4, 0), (0, 0))
    world.pair.finish()
    assert not world.host.copies


def test_a_deadline_comes_before_patience_ends():
    world = World(6, 8)
    world.worker.cache(P)
    body = commands.Reserve("a", 70, b"model", b"".join(one.to_bytes(4, "little") for one in Q))
    assert world.worker.ask(body, deadline=world.pair.now + 1) is None
    world.pair.tick(1.0)
    assert world.pair.late(world.worker.session) is not None


def test_after_so_many_rounds_a_reserve_goes_without(monkeypatch):
    monkeypatch.setattr(tiering, "ROUNDS", 1)
    world = World(6, 8)
    world.serve(P)
    world.serve(Q)
    assert world.request(P, last_page="keep") is None
    world.pair.finish()  # that was its round: what is to be loaded next is not
    assert (world.granted().writable_from, world.copies()) == (2, [])


def test_when_too_many_wait_already_nobody_waits_for_copies():
    world = World(8, 8, limits=Limits(queued=1))
    world.worker.cache(P)
    world.worker.cache([9, 9])
    assert Worker(world.pair).try_reserve(Q) is None
    assert isinstance(world.request([8] * 4), commands.Reserved)
    assert (world.where(P), world.where([9, 9])) == ((4, 0), (0, 0))  # a copy holds the former


def test_who_waits_for_pages_then_waits_for_copies():
    world = World(6, 8)
    world.worker.cache(P)
    held = world.worker.compute([*P, 9, 9])
    assert world.request(Q, wait_s=30.0) is None and not world.copies()
    world.worker.free(held)
    assert world.copies() == [(True, 4)]
    world.pair.finish()
    assert len(world.granted().pages) == 4


def test_pages_that_a_copy_holds_are_waited_for_also_by_who_may_not_wait():
    world = World(4, 8)
    world.serve(P)
    assert world.request([*Q[:2]]) is None
    other = Worker(world.pair)
    assert other.try_reserve([9, 9, 9]) is None
    world.pair.finish_all()
    assert code(world.pair.late(other.session)) == "out_of_pages"  # the first one has two of the four
    assert len(world.granted().pages) == 2


def test_draining_turns_those_away_who_wait_for_copies():
    world = World(6, 8)
    world.worker.cache(P)
    assert world.request(Q) is None
    world.pair.do(commands.Drain())
    assert code(world.pair.late(world.worker.session)) == "draining"
    world.pair.finish_all()


# -- copies that fail -------------------------------------------------------------------------------------------------


def test_after_a_failed_save_cold_pages_are_dropped_for_a_while():
    world = World(6, 8)
    world.worker.cache(P)
    assert world.request(Q) is None
    world.pair.finish(ok=False)
    held = world.granted()
    assert (world.where(P), world.counter("failed_copies"), world.counter("evicted_pages")) == ((2, 0), 1, 2)
    world.worker.commit(held, 4)
    world.worker.free(held)
    assert isinstance(world.request([9] * 4), commands.Reserved) and not world.copies()
    world.pair.now += REST_S
    assert world.request([8] * 2) is None
    assert world.copies() == [(True, 2)]


def test_after_a_failed_load_the_prompt_is_computed_and_the_host_tier_keeps_its_pages():
    world = World(6, 8)
    world.serve(P)
    world.serve(Q)
    assert world.request(P, last_page="keep") is None
    world.pair.finish()
    world.pair.finish(ok=False)
    held = world.granted()
    assert held.writable_from == 2
    world.worker.commit(held, 4)
    assert world.where(P) == (4, 0)


def test_ends_of_copies_that_nobody_knows_change_nothing():
    world = World(6, 8)
    world.worker.cache(P)
    assert world.request(Q) is None
    (copy,) = world.pair.running
    before = world.pair.real.snapshot()
    world.pair.do(commands.CopyDone(copy + 1, True))
    assert world.pair.real.snapshot()["pools"] == before["pools"]
    world.pair.finish()
    before = world.pair.real.snapshot()
    world.pair.do(commands.CopyDone(copy, False))
    assert world.pair.real.snapshot()["pools"] == before["pools"]
    assert world.counter("unknown_copies") == 2


# -- small host tiers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", [0, 1, 4])
def test_a_host_tier_of_one_page_keeps_the_hottest_of_what_leaves(staging):
    """The beginning of a prompt: what continues it is colder."""
    world = World(4, 1, host_staging_pages=staging)
    world.serve(P)
    world.serve(Q)
    assert world.where(P) == (0, 1)
    assert world.counter("evicted_pages") == 3
    assert world.serve(P) == 1
    assert world.where(Q) == (0, 1 if staging else 0)


def test_a_burst_larger_than_the_host_tier_keeps_the_hottest():
    world = World(8, 3, host_staging_pages=8)
    for prompt in (P, Q):
        world.serve(prompt)
    world.serve(range(20, 28))
    assert (world.where(P), world.where(Q)) == ((0, 0), (0, 3))
    world.serve(range(30, 38))
    assert (world.where(Q), world.where(range(20, 28))) == ((0, 0), (0, 3))


# -- every order of events --------------------------------------------------------------------------------------------


class Scene:
    """Pages of two tokens; ``holder`` has the first page of PP; PP's tail is being saved, or loaded.

    ``asker``'s worker waits for that. ``free`` pages are there for what happens meanwhile.
    """

    PP = (1, 1, 2, 2, 3, 3)

    def __init__(self, loading):
        self.world = world = World(7, 6, page_size=2)
        self.pair = world.pair
        self.asker, self.actor = world.worker, Worker(world.pair)
        self.actor.cache(self.PP)
        self.holder = self.actor.compute(self.PP[:3])
        if loading:
            world.request([9] * 10)
            self.pair.finish()
            self.asker.free(world.granted())
            assert world.where(self.PP) == (2, 4)
            assert self.asker.try_reserve(self.PP) is None
        else:
            assert self.asker.try_reserve([9] * 10) is None
        self.copy = next(iter(self.pair.running))
        assert self.pair.running[self.copy].copy.to_host != loading

    def happens(self, event):
        """False: there is nobody any more who could do that."""
        alive = {session.id for session in self.pair.real.sessions.all()}
        if (self.asker if event == "cancel" else self.actor).session not in alive:
            return event in ("nothing", "the asker dies", "the holder dies")
        if event in ("free", "truncate", "fork") and self.holder.seq not in self.pair.sequences(self.actor.session):
            return False
        EVENTS[event](self)
        return True

    def over(self):
        """Everybody leaves; nothing may be left."""
        self.pair.finish_all()
        for session in [one.id for one in self.pair.real.sessions.all()]:
            self.pair.do(commands.EndSession(session, False, "over"))
        self.pair.finish_all()
        pool = self.pair.pool
        assert pool.pages.counts[0] + pool.tree.idle_pages == pool.pages.size
        assert not pool.fetching and not pool.host.copies and not self.pair.real.queued


def _truncate(scene):
    scene.actor.truncate(scene.holder, 1)


def _free(scene):
    scene.actor.free(scene.holder)


def _evict(scene):
    """Somebody takes all that can be had without waiting."""
    held = scene.actor.reserve([])
    while isinstance(scene.actor.try_extend(held, [7, 7]), bytes):
        pass


def _split(scene):
    scene.pair.pool.host.rests_until = scene.pair.now + REST_S
    scene.actor.try_reserve([*scene.PP[:4], 8])


def _compute_again(scene):
    """Somebody who went without the copy computes the same, and lets go of it: runs melt together."""
    scene.pair.pool.host.rests_until = scene.pair.now + REST_S
    reply = scene.actor.try_reserve(scene.PP)
    if isinstance(reply, commands.Reserved):
        held = Held(scene.actor.next_seq - 1, reply)
        scene.actor.commit(held, 6)
        scene.actor.free(held)


def _invalidate(scene):
    scene.actor.invalidate()
    scene.pair.tick(0.0)


def _die(scene, who, mapped):
    scene.pair.do(commands.EndSession(who.session, mapped, "gone"))
    scene.pair.do(commands.MappingGone(who.session))


def _fork(scene):
    scene.actor.step(share=[commands.Share(scene.holder.seq, None, 2, 50)])


def _cancel(scene):
    for one in scene.pair.pool.fetching.all():
        scene.asker.ask(commands.Cancel(one.request))


EVENTS = {
    "nothing": lambda scene: None,
    "free": _free,
    "truncate": _truncate,
    "evict": _evict,
    "split": _split,
    "fork": _fork,
    "compute again": _compute_again,
    "invalidate": _invalidate,
    "the holder dies": lambda scene: _die(scene, scene.actor, True),
    "the asker dies": lambda scene: _die(scene, scene.asker, False),
    "cancel": _cancel,
}
ENDINGS = {
    "well": lambda scene: scene.pair.finish(scene.copy),
    "badly": lambda scene: scene.pair.finish(scene.copy, ok=False),
    "twice": lambda scene: [scene.pair.do(commands.CopyDone(scene.copy, ok)) for ok in (True, False)],
    "late": lambda scene: [scene.pair.tick(PATIENCE_S), scene.pair.finish(scene.copy)],
    "never": lambda scene: [scene.pair.tick(PATIENCE_S), scene.pair.tick(60.0)],
    "unknown first": lambda scene: [scene.pair.do(commands.CopyDone(n, True)) for n in (10**6, scene.copy)],
}


@pytest.mark.parametrize("loading", [False, True], ids=["saving", "loading"])
@pytest.mark.parametrize("first", EVENTS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_whatever_happens_while_a_copy_runs_and_however_it_ends(loading, first, ending):
    scene = Scene(loading)
    EVENTS[first](scene)
    ENDINGS[ending](scene)
    scene.over()


@pytest.mark.parametrize("loading", [False, True], ids=["saving", "loading"])
@pytest.mark.parametrize("first", EVENTS)
def test_and_whatever_happens_next(loading, first):
    for place, second in enumerate(EVENTS):
        scene = Scene(loading)
        if scene.happens(first) and scene.happens(second):
            ENDINGS[list(ENDINGS)[place % len(ENDINGS)]](scene)
        scene.over()
