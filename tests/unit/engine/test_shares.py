"""Floors and caps of namespaces: whose page leaves for whom, recounted after every step."""

import random
from array import array

import pytest

from fuzz.pairs.watched import Watched
from fuzz.pairs.worker import Worker, code
from radixkv import commands
from radixkv.config import PoolConfig
from radixkv.engine.pool import namespace_of
from radixkv.errors import BrokenInvariant, ConfigError
from radixkv.evictor.shares import Shares

TENANTS = (b"one", b"two", b"three")


def pool_of(pages=8, floor=0, cap=0, namespaces=4, page_size=4):
    pair = Watched(
        pages, page_size=page_size, namespaces=namespaces, namespace_floor_pages=floor, namespace_cap_pages=cap
    )
    return pair, pair.engine.pools["a"].shares, Worker(pair)


def prompt(number, pages):
    return [token for page in range(pages) for token in [number * 100 + page] * 4]


def has(pair, name):
    space = pair.engine.pools["a"].namespaces.find(name)
    return 0 if space is None else pair.engine.pools["a"].shares.pages[space.id]


def test_rk_040_a_floor_and_a_cap_keep_a_busy_namespace_from_starving_another():
    """A fills the pool, then writes twenty times as much as B: B keeps its two pages, A stays at six of eight."""
    pair, _, worker = pool_of(8, floor=2, cap=6)
    worker.cache(prompt(1, 4), b"A")
    worker.cache(prompt(2, 4), b"A")
    assert has(pair, b"A") == 6
    hits = []
    for second in range(30):
        held = worker.compute(prompt(900, 2), b"B")
        hits.append(held.cached)
        worker.free(held)
        for number in range(20):
            worker.cache(prompt(10 + second * 20 + number, 4), b"A")
            assert has(pair, b"A") <= 6
            assert has(pair, b"B") == 2
    assert hits == [0] + [7] * 29


def test_without_bounds_the_same_load_starves_it():
    pair = Watched(8)
    worker = Worker(pair)
    worker.cache(prompt(900, 2), b"B")
    for number in range(20):
        worker.cache(prompt(10 + number, 4), b"A")
    assert worker.lookup(prompt(900, 2), b"B") == 0


def test_at_its_cap_a_namespace_evicts_its_own_though_others_are_free():
    pair, _, worker = pool_of(16, cap=4)
    worker.cache(prompt(1, 2), b"A")
    worker.cache(prompt(2, 2), b"A")
    worker.cache(prompt(3, 3), b"A")
    assert has(pair, b"A") == 4
    assert [worker.lookup(prompt(n, 3), b"A") for n in (1, 2, 3)] == [0, 4, 12]
    assert pair.engine.snapshot()["pools"]["a"]["pages"]["free"] == 12


def test_what_is_held_counts_and_what_does_not_fit_is_told():
    pair, _, worker = pool_of(16, cap=4)
    held = worker.reserve(prompt(1, 3), b"A")
    refused = worker.try_reserve(prompt(2, 2), b"A")
    assert (code(refused), refused.details["available"], refused.details["never_fits"]) == ("out_of_pages", 1, False)
    refused = worker.try_reserve(prompt(2, 5), b"A")
    assert refused.details["never_fits"]
    assert code(worker.try_extend(held, headroom=8)) == "out_of_pages"
    worker.extend(held, headroom=4)
    assert worker.try_reserve(prompt(2, 2), b"A", wait_s=9.0) is None
    worker.free(held)
    assert len(pair.late) == 1


def test_a_floor_is_no_obstacle_to_its_owner_and_none_beyond_it():
    pair, _, worker = pool_of(8, floor=2)
    for number in range(2):
        worker.cache(prompt(number, 2), b"A")
    worker.cache(prompt(9, 4), b"B")
    worker.cache(prompt(10, 6), b"B")  # all but A's floor
    assert (has(pair, b"A"), has(pair, b"B")) == (2, 6)
    refused = worker.try_reserve(prompt(11, 7), b"B")
    assert (refused.details["available"], refused.details["never_fits"]) == (6, False)
    worker.cache(prompt(12, 8), b"A") if has(pair, b"B") <= 2 else None
    worker.cache(prompt(12, 6), b"A")
    assert (has(pair, b"A"), has(pair, b"B")) == (6, 2)


def test_pages_in_quarantine_count_until_they_are_free():
    pair, _, worker = pool_of(8, cap=4)
    other = Worker(pair)
    other.reserve(prompt(1, 3), b"A")
    pair.do(commands.EndSession(other.session, mapped=True, reason="killed"))
    assert has(pair, b"A") == 3
    assert code(worker.try_reserve(prompt(2, 2), b"A")) == "out_of_pages"
    pair.do(commands.MappingGone(other.session))
    assert has(pair, b"A") == 0


def test_priorities_are_refused():
    _, _, worker = pool_of(8, cap=4)
    assert code(worker.try_reserve([1], retain=[commands.Retain(80)])) == "bad_request"


@pytest.mark.parametrize(
    "settings",
    [
        {"namespace_floor_pages": 3, "namespaces": 4},
        {"namespace_floor_pages": 2, "namespace_cap_pages": 1, "namespaces": 2},
        {"namespace_cap_pages": 4, "policy": "lfu"},
        {"namespace_cap_pages": 4, "host_pages": 4},
        {"namespace_cap_pages": 9},
    ],
)
def test_what_cannot_be_configured(settings):
    with pytest.raises(ConfigError, match=r"pool\."):
        PoolConfig(pages=8, **settings)


class Drive:
    """Random verbs of two sessions in three namespaces; every victim is compared with a look at all idle runs."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        pages, self.size = rng.randint(6, 14), rng.choice((1, 2))
        self.floor = rng.randint(0, pages // 4)
        self.cap = rng.choice((0, rng.randint(max(1, self.floor), pages))) if self.floor else rng.randint(1, pages)
        self.pair, self.shares, _ = pool_of(pages, self.floor, self.cap, page_size=self.size)
        self.workers = [Worker(self.pair), Worker(self.pair)]
        self.held, self.victims = [], 0
        self._victim_for, self.shares.victim_for = self.shares.victim_for, self.victim_for

    def victim_for(self, space, pages):
        """The oldest leaf of all that may go for this namespace."""
        over = bool(self.cap) and self.shares.pages[space] + pages > self.cap
        mine = [run for run in self.shares if not run.children and namespace_of(run) == space]
        others = [
            run for run in self.shares
            if not run.children and namespace_of(run) != space and self.shares.pages[namespace_of(run)] > self.floor
        ]  # fmt: skip
        expected = min(run.stamp for run in (mine if over else mine + others))
        leaf, count = self._victim_for(space, pages)
        assert (leaf.stamp, over and namespace_of(leaf) != space) == (expected, False)
        self.victims += 1
        return leaf, count

    def step(self):
        before = {name: has(self.pair, name) for name in TENANTS}
        asking = self.reserve() if self.rng.random() < 0.5 or not self.held else self.another()
        for name in TENANTS:
            assert not self.cap or has(self.pair, name) <= self.cap
            assert name == asking or has(self.pair, name) >= min(before[name], self.floor)
        if len(self.held) > 4:
            self.free(*self.held.pop(0))

    def reserve(self):
        rng, worker, asking = self.rng, self.rng.choice(self.workers), self.rng.choice(TENANTS)
        tokens = [rng.randint(0, 2) for _ in range(rng.randint(0, 6 * self.size))]
        options = {"last_page": rng.choice(("copy", "keep", "drop")), "headroom": rng.randint(0, self.size)}
        reply = worker.try_reserve(tokens, asking, **options)
        if isinstance(reply, commands.Reserved):
            self.held.append((worker, worker.next_seq - 1, asking, len(tokens)))
        return asking

    def another(self):
        worker, seq, asking, length = self.held.pop(self.rng.randrange(len(self.held)))
        match self.rng.choice(("commit", "free", "free", "cut", "extend", "fork")):
            case "commit":
                worker.step(commit=[commands.Commit(seq, length)])
            case "cut":
                cut = self.rng.randint(0, length)
                (done,) = worker.step(truncate=[commands.Truncate(seq, cut)]).truncate
                length = length if isinstance(done, commands.Failure) else cut
            case "extend":
                worker.step(extend=[commands.Extend(seq, headroom=self.rng.randint(0, 2 * self.size))])
            case "fork":
                worker.next_seq += 1
                worker.step(share=[commands.Share(seq, None, 1, worker.next_seq - 1)])
                worker.step(free=[commands.Free(worker.next_seq - 1)])
            case "free":
                self.free(worker, seq, asking, length)
                return asking
        self.held.append((worker, seq, asking, length))
        return asking

    def free(self, worker, seq, _asking, length):
        worker.step(free=[commands.Free(seq, self.rng.choice((0, length)))])


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_whatever_happens(seed):
    """No cap is passed, nobody pushes another below its floor, and of all that may go the oldest goes."""
    drive = Drive(seed)
    for _ in range(500):
        drive.step()
    assert drive.victims > 20


def test_the_next_daemon_counts_anew():
    """Pages found by a scan count for their namespaces."""
    pair, _, worker = pool_of(8, floor=1, cap=6)
    worker.cache(prompt(1, 3), b"A")
    order = pair.engine.pools["a"].order
    fresh = Shares(8, 1, 6, namespace_of)
    for run in order:
        fresh.add(run)
        fresh.taken(array("i", bytes(run.pages)), namespace_of(run))
    fresh.check()
    assert (+fresh.pages, +fresh.idle) == (+order.pages, +order.idle)


# -- the recount --------------------------------------------------------------------------------------------------


def test_each_check_of_the_order_is_broken_on_purpose():
    for spoil in (
        lambda shares: shares.idle.update({0: 1}),
        lambda shares: shares.pages.update({0: 1}),
    ):
        _, shares, worker = pool_of(8, cap=4)
        worker.cache(prompt(1, 2), b"A")
        shares.check()
        spoil(shares)
        with pytest.raises(BrokenInvariant) as caught:
            shares.check()
        assert caught.value.name == "I24"
