"""Failures that comparable systems have had with a second tier, as small scenarios: storms, and races of copies.

After every step ``Tiered`` recounts everything, compares what is in the pages of both tiers with their tokens, and
lets nobody touch what a copy reads or writes. A copy is "slow" until the test ends it. Pages have 4 tokens.
"""

import random

import pytest

from fuzz.pairs.tiered import Tiered
from fuzz.pairs.worker import Held, Worker, code, refused_for_pages, small_config
from radixkv import commands
from radixkv.allocator.page_states import State
from radixkv.engine.tiering import PATIENCE_S, REST_S

P, Q, R, S = (list(range(first, first + 16)) for first in (100, 200, 300, 400))
"""Prompts of four pages."""
OTHER = b"another namespace"


class World:
    """One pool; nothing is copied ahead of need unless told otherwise."""

    def __init__(self, pages, host_pages, **pool):
        self.pair = Tiered(small_config(pages, host_pages=host_pages, **{"reclaim_pages": 0} | pool))
        self.engine = self.pair.real
        self.worker = Worker(self.pair)

    def counts(self, host=False):
        """States that at least one page is in."""
        pages = self.pair.pool.host.pages if host else self.pair.pool.pages
        return {state.name.lower(): pages.counts[state] for state in State if pages.counts[state]}

    def counter(self, name):
        return self.engine.snapshot()["counters"][name]

    def copies(self):
        """Of the copies that run, the oldest first: whether it is a save, and of how many pages."""
        return [(one.copy.to_host, len(one.sources)) for one in self.pair.running.values()]

    def serve(self, tokens, **options):
        """A prompt is reserved, computed and let go of. Copies end at once."""
        reply = self.worker.try_reserve(tokens, last_page="keep", **options)
        self.pair.finish_all()
        held = self.granted() if reply is None else Held(self.worker.next_seq - 1, reply)
        self.worker.commit(held, len(tokens))
        self.worker.free(held)

    def granted(self, worker=None):
        """What a request that had to wait was answered with."""
        worker = worker or self.worker
        reply = self.pair.late(worker.session)
        assert isinstance(reply, commands.Reserved), reply
        return Held(worker.next_seq - 1, reply)

    def look(self, tokens):
        """Cached tokens on the device, and behind those in the host tier."""
        return self.worker.look(tokens)

    def free_up(self, pages):
        """Fill so many pages with what is then thrown away: they are free."""
        self.serve(range(900, 900 + 4 * pages), namespace=OTHER)
        self.worker.invalidate(OTHER)


def cached_in_host(pages, host_pages, *prompts, **pool):
    """These prompts are in the host tier alone, the others' pages on the device are free."""
    world = World(pages, host_pages, **pool)
    for prompt in prompts:
        world.serve(prompt)
    world.free_up(pages)
    assert world.counts() == {"free": pages}
    return world


# -- who leaves -----------------------------------------------------------------------------------------------------


def test_rk_043_a_slot_that_a_load_has_emptied_is_used_before_anything_is_dropped():
    prompts = [[number] * 4 for number in range(4)]
    world = cached_in_host(3, 4, *prompts)
    assert [world.look(prompt) for prompt in prompts] == [(0, 4)] * 4
    evicted = world.counter("evicted_pages")
    cold = [50] * 4
    for prompt in (cold, prompts[0], [51] * 4, [52] * 4):  # the last of them pushes the first out
        world.serve(prompt)
    assert [world.look(prompt) for prompt in (*prompts, cold)] == [(4, 0), *[(0, 4)] * 4]
    assert world.counter("evicted_pages") == evicted


# -- sources and targets of a running copy are nobody else's -----------------------------------------------------------


@pytest.mark.parametrize("ok", [True, False])
def test_rk_044_what_is_being_loaded_stays_in_the_host_tier_until_it_is_there(ok):
    world = cached_in_host(4, 2, P[:8])
    other = Worker(world.pair)
    assert world.worker.try_reserve(P[:8], last_page="keep") is None
    assert world.copies() == [(False, 2)]
    other.cache(Q[:8])
    assert other.try_reserve(R[:8]) is not None, "no room to save: what is cold is dropped, nobody waits"
    assert world.counts(host=True) == {"saving": 2}
    assert world.look(Q[:8]) == (0, 0)
    world.pair.finish(ok=ok)
    held = world.granted()
    if ok:
        assert (held.writable_from, world.look(P[:8])) == (8, (8, 0))
    else:
        assert (held.cached, world.look(P[:8])) == (0, (0, 8)), "computed again; the host tier still has it"
        assert world.counts(host=True) == {"cached": 2}


def test_rk_045_of_two_that_leave_at_once_one_is_whole_in_the_host_tier():
    world = World(4, 2)
    world.serve(P[:8])
    world.serve(Q[:8])
    assert world.worker.try_reserve(R) is None
    assert world.copies() == [(True, 2)]
    world.pair.finish()
    assert len(world.granted().pages) == 4
    assert (world.look(P[:8]), world.look(Q[:8])) == ((0, 0), (0, 8))
    assert world.counter("evicted_pages") == 2


def test_rk_046_what_could_not_be_saved_is_gone_and_nobody_says_otherwise():
    """The host tier is full of pages that are being loaded."""
    world = cached_in_host(6, 2, R[:8])
    world.worker.cache(P)
    other = Worker(world.pair)
    assert other.try_reserve(R[:8], last_page="keep") is None
    assert world.copies() == [(False, 2)]
    assert len(world.worker.reserve(S[:8]).pages) == 2
    assert world.look(P) == (8, 0), "the end of it is gone, not in the host tier"
    world.pair.finish()
    assert world.look(P) == (8, 0)


@pytest.mark.parametrize("end", ["cancel", "bye", "killed"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("ok", [True, False])
def test_rk_049_who_waited_for_copies_is_gone_and_they_end_in_any_order(end, order, ok):
    """A load and a save; each is told twice, and one that nobody has begun."""
    world = cached_in_host(4, 4, P[:8])
    world.worker.cache(Q[:8])
    loading, saving = Worker(world.pair), Worker(world.pair)
    assert loading.try_reserve(P[:8]) is None
    assert saving.try_reserve(R[:8]) is None
    assert world.copies() == [(False, 2), (True, 2)]
    for worker in (loading, saving):
        request = world.pair._next_request[worker.session]
        if end == "cancel":
            worker.ask(commands.Cancel(request))
        elif end == "bye":
            worker.ask(commands.Bye())
        else:
            world.pair.do(commands.EndSession(worker.session, mapped=True, reason="killed"))
        assert code(world.pair.granted[worker.session, request]) == ("timeout" if end == "cancel" else "session_lost")
    assert world.counts() == {"loading": 2, "saving": 2}
    copies = list(world.pair.running)
    for place in order:
        for _ in range(2):
            world.pair.do(commands.CopyDone(copies[place], ok))
    world.pair.do(commands.CopyDone(999, ok=True))
    assert world.counter("unknown_copies") == 3
    assert world.counts() == ({"cached": 4} if ok else {"cached": 2, "free": 2})
    assert world.look(P[:8]) == ((8, 0) if ok else (0, 8))
    assert world.look(Q[:8]) == (8, 0)


def test_rk_051_a_copy_never_takes_what_has_come_into_its_pages_since():
    """What is being saved is purged: its pages are nobody's until the copy has ended, and then no copy is kept."""
    world = World(4, 4)
    world.worker.cache(P)
    first, second = Worker(world.pair), Worker(world.pair)
    assert first.try_reserve(R[:8]) is None
    assert world.copies() == [(True, 2)]
    world.worker.invalidate()
    assert world.look(P) == (0, 0)
    assert second.try_reserve(Q[:8], OTHER) is None
    world.pair.finish_all()
    for worker in (first, second):
        worker.commit(world.granted(worker), 8)
    world.pair.tick(1.0)  # what is purged comes back in slices
    assert world.look(P) == (0, 0)
    assert world.counts(host=True) == {"free": 4}
    assert world.counts() == {"cached": 4}


def test_rk_052_a_copy_counts_when_it_is_complete_not_when_it_is_asked_for():
    """Write-through and a copier that dies on the way."""
    world = World(8, 8, host_write="through")
    prompts = [list(range(first, first + 16)) for first in range(1000, 1500, 100)]
    known = 0
    for number, prompt in enumerate(prompts):
        held = world.worker.try_reserve(prompt, last_page="keep")
        if held is None:  # room comes with the ends of copies; the first of all dies
            world.pair.finish(ok=bool(known))
            known += 1
            world.pair.tick(REST_S)
            world.pair.finish_all()
            held = world.pair.late(world.worker.session)
        assert isinstance(held, commands.Reserved)
        seq = Held(world.worker.next_seq - 1, held)
        world.worker.commit(seq, 16)
        world.worker.free(seq)
        running = sum(pages for to_host, pages in world.copies() if to_host)
        complete = world.counts(host=True).get("cached", 0)
        on_host = sum(world.look(other)[1] for other in prompts[: number + 1])
        assert on_host <= 4 * complete, f"{running} pages are on their way and do not count"
    world.pair.finish_all()
    found = [world.look(prompt) for prompt in prompts]
    assert all(device + host <= 16 for device, host in found)
    cached = sum(device + host for device, host in found) // 4
    assert world.counter("evicted_pages") == 4 * len(prompts) - cached
    assert cached >= 8


def test_rk_053_a_second_life_has_other_pages_than_what_is_copied_of_the_first():
    world = World(4, 4)
    held = world.worker.compute(P[:8])
    world.worker.free(held)
    other = Worker(world.pair)
    assert other.try_reserve(R[:12]) is None
    (copy,) = world.pair.running.values()
    other.ask(commands.Cancel(world.pair._next_request[other.session]))
    again = world.worker.reserve(Q[:8])
    assert not set(again.pages) & set(copy.sources)
    world.worker.commit(again, 8)
    before = world.look(Q[:8])
    world.pair.finish()
    assert world.look(Q[:8]) == before == (8, 0)
    assert world.look(P[:8]) == (8, 0), "saved, and still on the device"


def test_rk_054_two_hundred_ends_in_the_middle_of_a_copy_leave_nothing_behind():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    world = World(8, 8)
    for turn in range(200):
        mine = Worker(world.pair)
        prompt = [turn * 10 + n for n in range(8)]
        reply = mine.try_reserve(prompt)
        if reply is None and rng.random() < 0.5:
            _end_some(world, rng)
            reply = world.pair.late(mine.session)
        if isinstance(reply, commands.Reserved) and rng.random() < 0.7:
            mine.commit(Held(mine.next_seq - 1, reply), 8)
        for _ in range(rng.randrange(3)):
            _end_some(world, rng)
        world.pair.do(commands.EndSession(mine.session, mapped=True, reason="killed"))
        if rng.random() < 0.5:
            _end_some(world, rng)
        world.pair.do(commands.MappingGone(mine.session))
        world.pair.now += rng.choice((0.0, REST_S))
    world.pair.finish_all()
    assert not world.pair.pool.host.copies
    assert set(world.counts()) <= {"free", "cached"}
    assert set(world.counts(host=True)) <= {"free", "cached"}
    assert world.counter("saved_pages") > 0
    assert (world.pair.pool.sequences, world.engine.queued) == (0, 0)


def _end_some(world, rng):
    if world.pair.running:
        world.pair.finish(rng.choice(list(world.pair.running)), ok=rng.random() < 0.8)


def test_rk_056_no_time_limit_ends_a_copy():
    """Whoever asked for it has lapsed, others are short, its patience is over: what is being filled is nobody's."""
    world = cached_in_host(4, 4, P[:8])
    loading, looking, greedy = Worker(world.pair), Worker(world.pair), Worker(world.pair)
    assert loading.try_reserve(P[:8]) is None
    (copy,) = world.pair.running.values()
    world.pair.tick(1.5)
    assert looking.look(P[:8]) == (0, 8), "not on the device yet"
    world.pair.tick(PATIENCE_S)
    given = world.granted(loading)
    assert given.cached == 0 and not set(given.pages) & set(copy.targets), "it goes without"
    for _ in range(3):
        world.pair.tick(9.0)
        for worker in (world.worker, looking, greedy):
            worker.ask(commands.Heartbeat())
    assert greedy.try_reserve(R[:8]) is None
    ended = world.pair.tick(PATIENCE_S).ended
    assert ended == [loading.session], "the silent one gives way, but its process could still write to what it had"
    refused_for_pages(world.pair.late(greedy.session), need=2, available=0)
    assert world.counts() == {"quarantined": 2, "loading": 2}
    world.pair.finish()
    assert world.look(P[:8]) == (8, 0)


@pytest.mark.parametrize("moves", [1_500, pytest.param(10_000, marks=pytest.mark.long)])
def test_rk_057_random_moves_in_two_full_tiers_keep_both_counts(moves):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    world = World(4, 4)
    held = []
    for _ in range(moves):
        _move(world, held, rng)
        pool = world.engine.snapshot()["pools"]["a"]
        for counts in (pool["pages"], pool["host_pages"]):
            assert sum(counts.values()) == 4 and min(counts.values()) >= 0
    seen = world.engine.snapshot()["counters"]
    assert min(seen["saved_pages"], seen["loaded_pages"], seen["failed_copies"], seen["evicted_pages"]) > 0


def _move(world, held, rng):
    choice = rng.random()
    if world.pair.running and choice < 0.5:
        world.pair.finish(rng.choice(list(world.pair.running)), ok=rng.random() < 0.9)
    elif held and choice < 0.7:
        seq = held.pop(rng.randrange(len(held)))
        world.worker.commit(seq, seq.tokens)
        world.worker.free(seq)
    elif choice < 0.95:
        prompt = [rng.randrange(4)] * 4 * rng.randint(1, 3)
        reply = world.worker.try_reserve(prompt, last_page="keep")
        if reply is None:
            world.worker.ask(commands.Cancel(world.pair._next_request[world.worker.session]))
        elif isinstance(reply, commands.Reserved):
            held.append(Held(world.worker.next_seq - 1, reply))
            held[-1].tokens = len(prompt)
    else:
        world.pair.now += REST_S
