"""Priorities and pins through the engine: free, truncate, forks, sources, handoffs, time, refusals, two tiers.

Every step is compared with the naive model, page marks and victims included.
"""

import pytest

from fuzz.model.packing import unpack_pages
from fuzz.pairs.watched import Watched
from fuzz.pairs.worker import Worker, code, small_pair, workers
from radixkv import commands

A, B, C, D = ([token] * 4 for token in (1, 2, 3, 4))


def keep(priority, for_s=None, start=0, end=None):
    return commands.Retain(priority, for_s, start, end)


def cache(worker, prompt, *retain, namespace=b"model"):
    worker.free(worker.compute(prompt, namespace, retain=list(retain)))


def snapshot(pair):
    return pair.real.snapshot()["pools"]["a"]


def marks(pair):
    return {page: mark for page, mark in _marks(pair.real).items() if mark}


def _marks(engine):
    found = {}
    for run in engine.pools["a"].order:
        found.update(dict.fromkeys(unpack_pages(bytes(run.pages)), run.mark))
    return found


def test_a_prompt_of_high_priority_outlives_later_ones():
    _, one = workers(4, 1)
    cache(one, [*A, *B], keep(80))
    for token in range(20, 30):
        cache(one, [token] * 4)
    assert one.lookup([*A, *B]) == 8


def test_a_range_of_tokens_is_kept_by_the_first_token_of_a_page():
    pair, one = workers(8, 1)
    cache(one, [*A, *B, *C], keep(80, end=5), keep(20, start=5))
    priorities = [mark[0] for mark in marks(pair).values()]
    assert sorted(priorities) == [20, 80, 80]


def test_generated_tokens_have_their_range_too():
    pair, one = workers(8, 1)
    held = one.compute(A, retain=[keep(20, start=4)])
    one.extend(held, [*B, *C])
    one.commit(held, 12)
    one.free(held)
    assert [mark[0] for mark in marks(pair).values()] == [20, 20]


def test_truncate_says_the_priority_of_what_it_cuts_off():
    pair, one = workers(8, 1)
    held = one.compute([*A, *B], retain=[keep(20)])
    one.truncate(held, 4)
    assert len(marks(pair)) == 1
    one.free(held)
    assert len(marks(pair)) == 2


def test_forks_and_adopters_say_what_was_said():
    pair, one, two = workers(16, 2)
    held = one.compute([*A, *B, 5], retain=[keep(20, 10.0)])
    (child,) = one.fork(held, at=8)
    one.free(held)
    assert not marks(pair)
    one.ask(commands.Handoff(child.seq, b"t" * 16, 100.0))
    adopted = two.ask(commands.Adopt("a", b"t" * 16, 9))
    assert isinstance(adopted, commands.Adopted)
    pair.tick(3.0)
    two.step(free=[commands.Free(9)])
    assert set(marks(pair).values()) == {(20, round((pair.now + 10.0) * 1000))}


def test_a_copied_page_of_a_full_hit_is_said_too():
    pair, one = workers(8, 1)
    cache(one, [*A, *B])
    held = one.reserve([*A, *B], retain=[keep(80)])
    assert held.copy_rows
    one.free(held)
    assert len(marks(pair)) == 2


def test_the_time_counts_from_the_last_release_and_ends_by_itself():
    pair, one = workers(4, 1)
    assert code(one.try_reserve(A, retain=[keep(100, 3.0)])) == "limit_exceeded"  # 4 pages: an eighth is none
    pair, one = workers(8, 1, pin_limit_pages=8)
    cache(one, A, keep(100, 3.0))
    assert snapshot(pair)["pinned_pages"] == 1
    assert pair.real.next_deadline() == pytest.approx(pair.now + 3.0)
    pair.tick(2.0)
    cache(one, A, keep(100, 3.0))
    pair.tick(2.9)
    assert snapshot(pair)["pinned_pages"] == 1
    pair.tick(0.1)
    assert (snapshot(pair)["pinned_pages"], marks(pair), pair.real.next_deadline()) == (0, {}, None)


def test_rk_035_pins_starve_nobody():
    """A pool full of pins serves a request for all of it, and tells what it took."""
    pair, one, two = workers(8, 2, pin_limit_pages=8)
    cache(one, [*A, *B, *C, *D, *A, *B, *C, *D], keep(100, 1000.0))
    assert snapshot(pair)["pinned_pages"] == snapshot(pair)["evictable_pages"] == 8
    two.reserve(range(100, 132))
    assert snapshot(pair)["pinned_pages"] == 0
    assert pair.real.snapshot()["counters"]["pins_given_up"] == 8


def test_no_more_is_pinned_than_may_be():
    pair, one = workers(32, 1)
    assert pair.config.pools[0].pin_limit_pages == 4
    refused = one.try_reserve(range(20), retain=[keep(100, 9.0)])
    assert (code(refused), refused.details) == ("limit_exceeded", {"asked": 5, "pinned_pages": 0, "limit": 4})
    with_end = one.try_reserve(range(20), retain=[keep(100, 9.0, end=16)])
    assert isinstance(with_end, commands.Reserved)
    alone = Watched(32)  # whom the limit meets is not foretold: not beside the model
    engine, worker = alone.engine, Worker(alone)
    cache(worker, range(8), keep(100, 9.0))
    cache(worker, range(100, 108), keep(100, 9.0))
    refused = worker.try_reserve(range(200, 204), retain=[keep(100, 9.0)])
    assert (code(refused), refused.details["pinned_pages"]) == ("limit_exceeded", 4)
    cache(worker, range(8), keep(100, 9.0))  # to pin again what is pinned is no more
    held = [worker.reserve(range(8), retain=[keep(100, 9.0)]), worker.reserve(range(300, 312))]
    assert isinstance(worker.try_reserve(range(400, 408), retain=[keep(100, 9.0)]), commands.Reserved)
    worker.commit(held[0], 8)
    worker.step(free=[commands.Free(worker.next_seq - 1, 8), commands.Free(held[0].seq)])
    assert engine.snapshot()["pools"]["a"]["pinned_pages"] == 4
    assert sorted(mark[0] for mark in _marks(engine).values() if mark) == [99, 99, 100, 100, 100, 100]


@pytest.mark.parametrize(
    ("retain", "wanted"),
    [
        ([keep(100)], "bad_request"),
        ([keep(10, start=4), keep(20)], "bad_request"),
        ([keep(10, end=8), keep(20, start=4)], "bad_request"),
        ([keep(10, start=4, end=3)], "bad_request"),
        ([keep(10, start=index, end=index + 1) for index in range(65)], "limit_exceeded"),
    ],
)
def test_what_is_refused(retain, wanted):
    pair, one = workers(8, 1)
    assert code(one.try_reserve(A, retain=retain)) == wanted
    assert snapshot(pair)["sequences"] == 0


@pytest.mark.parametrize("policy", ["lfu", "fifo", "s3fifo"])
def test_other_policies_refuse_by_name(policy):
    refused = Worker(small_pair(8, policy=policy)).try_reserve(A, retain=[keep(80)])
    assert (code(refused), refused.details) == ("bad_request", {"policy": policy})


def test_who_never_asks_has_the_plain_order():
    pair, one = workers(8, 1)
    cache(one, A)
    assert pair.real.pools["a"].priorities is None
    cache(one, B, keep(50))
    assert marks(pair) == {}


def test_a_priority_goes_with_the_pages_from_tier_to_tier():
    driven = Watched(4, host_pages=4, reclaim_pages=0)
    worker = Worker(driven)
    cache(worker, [*A, *B], keep(80))
    cache(worker, [*C, *D])
    first = worker.try_reserve(range(100, 108))
    assert first is None
    driven.finish()
    assert worker.look([*A, *B]) == (8, 0)
    assert worker.look([*C, *D]) == (0, 8)
    for number in range(3):  # the host tier has four pages: those of the lower priority go from it first
        worker.step(free=[commands.Free(worker.next_seq - 1, 8)])
        assert worker.try_reserve(range(200 + 10 * number, 208 + 10 * number)) is None
        driven.finish()
    assert worker.look([*A, *B]) == (8, 0)
