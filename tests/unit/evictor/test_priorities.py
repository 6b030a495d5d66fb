"""Priorities in the order of eviction: what the fuzzer compares with a naive model, told by cases; and its recount."""

import random

import pytest

from fuzz.pairs.priorities import PrioritiesPair, Said
from fuzz.registry import run
from fuzz.targets.catalogue import FUZZERS
from radixkv.errors import BrokenInvariant
from radixkv.evictor.leaves import Leaves


def pair_of(pages=16, pins=True):
    pair = PrioritiesPair(1, pages, pins)
    pair.add_root()
    return pair


def use(pair, prompt, *said):
    """Compute a prompt, a page a token, and let go of it."""
    holder = pair.hold(0, prompt)
    pair.retain[holder] = list(said)
    pair.publish(holder, prompt[len(holder.path[1]) :])
    pair.release(holder)
    pair.check()


def left(pair):
    return sorted(path[1] for path in pair.model.pages)


def all_of(priority, for_ms=None, first=0, last=100):
    return Said(first, last, priority, for_ms)


def test_the_lowest_priority_leaves_first_and_among_equals_the_oldest():
    pair = pair_of()
    for token, priority in ((1, 90), (2, 50), (3, 10), (4, 90), (5, 10)):
        use(pair, [token], all_of(priority))
    gone = []
    for _ in range(5):
        before = left(pair)
        pair.evict(1)
        pair.check()
        gone += [path[0] for path in before if path not in left(pair)]
    assert gone == [3, 5, 2, 1, 4]


def test_what_is_before_a_page_of_high_priority_stays_as_long():
    pair = pair_of()
    use(pair, [1, 2, 3, 4], all_of(10, last=2), all_of(90, first=2, last=3), all_of(10, first=3))
    use(pair, [7, 8])
    pair.evict(3)  # 4 has a low priority and is a leaf; 1 and 2 have too, and are none
    assert left(pair) == [(1,), (1, 2), (1, 2, 3)]
    pair.evict(2)
    pair.check()
    assert left(pair) == [(1,)]


def test_when_its_time_is_over_a_page_is_where_it_would_be_without():
    pair = pair_of()
    use(pair, [1], all_of(100, for_ms=10))
    use(pair, [2])
    pair.pass_time(9, 10)
    assert pair.priorities.pinned_pages == 1
    pair.pass_time(1, 10)
    assert pair.priorities.pinned_pages == 0
    pair.evict(1)
    assert left(pair) == [(2,)]


def test_time_passes_in_slices():
    pair = pair_of(100)
    for token in range(50):
        use(pair, [token], all_of(90, for_ms=5))
    pair.priorities.expire(5, 20)
    assert pair.priorities.next_end_ms() == 5
    pair.priorities.expire(5, 30)
    assert pair.priorities.next_end_ms() is None


def test_what_the_last_one_says_counts_and_who_says_nothing_changes_nothing():
    pair = pair_of()
    use(pair, [1], all_of(90))
    use(pair, [2])
    use(pair, [1])
    pair.evict(1)
    assert left(pair) == [(1,)]
    use(pair, [2])
    use(pair, [1], all_of(0))
    pair.evict(1)
    assert left(pair) == [(2,)]


def test_pins_beyond_the_limit_are_no_pins():
    pair = pair_of(pins=False)
    use(pair, [1], all_of(100, for_ms=100))
    assert pair.priorities.pinned_pages == 0
    (run,) = pair.order
    assert run.mark == (99, 100)


def test_pinned_pages_leave_when_nothing_else_can_and_are_counted():
    pair = pair_of(3)
    use(pair, [1, 2], all_of(100, for_ms=100))
    use(pair, [3], all_of(99))
    pair.evict(1)
    assert (left(pair), pair.priorities.pins_given_up) == ([(1,), (1, 2)], 0)
    pair.evict(1)
    assert (left(pair), pair.priorities.pins_given_up, pair.priorities.pinned_pages) == ([(1,)], 1, 1)
    pair.check()


def test_a_limit_is_kept_whatever_happens():
    """The limit goes by runs, so the naive model does not foretell whom it meets; the recount says it is kept."""
    rng = random.Random(5)
    for _ in range(30):
        pair = pair_of(12)
        pair.priorities._pin_limit = limit = rng.randint(0, 6)
        held = []
        for _ in range(60):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 5))]
            holder = pair.hold(0, prompt)
            if rng.random() < 0.6:
                pair.retain[holder] = [all_of(100, for_ms=rng.choice((3, 1000)))]
            missing = prompt[len(holder.path[1]) :][: pair.room()]
            while pair.free() < len(missing):
                leaf = pair.order.victim(1)
                gone = pair.real.trim(leaf, 1)
                path = next(p for p, page in pair.model.pages.items() if page == int.from_bytes(gone, "little"))
                pair.model.order.forget(path)
                del pair.model.pages[path]
            pair.publish(holder, missing)
            held.append(holder)
            if len(held) > rng.randint(0, 3):
                pair.release(held.pop(rng.randrange(len(held))))
            pair.pass_time(rng.choice((0, 1)), 100)
            pair.order.check()
            assert pair.priorities.pinned_pages <= limit


def test_the_fuzzer_for_a_while():
    report = run(FUZZERS["priorities"], 1, 3000)
    assert min(report.events["said"], report.events["evict"], report.events["gave way"]) > 10


# -- the recount --------------------------------------------------------------------------------------------------


def damaged():
    pair = pair_of()
    use(pair, [1, 2], all_of(20, last=1), all_of(100, for_ms=50, first=1))
    use(pair, [3])
    order = pair.priorities
    assert order.first().tokens == bytes([3, 0, 0, 0])  # 1 is put aside: 2 is pinned
    return order


BREAKS = [
    ("I7", lambda order: order._above.add((100, 1), order.first())),
    ("I7", lambda order: (order._below.add((20, 1), order.first()), order._usual.remove(order.first()))),
    ("I7", lambda order: order._ending.__init__()),
    ("I24", lambda order: order._pinned.clear()),
    ("I24", lambda order: setattr(order, "_most_pinned", 0)),
    ("I24", lambda order: setattr(order, "_pin_limit", 0)),
    ("I7", lambda order: order._aside.update({next(iter(order._above)): None}) or setattr(order, "_above", Leaves())),
]


@pytest.mark.parametrize("number", range(len(BREAKS)))
def test_each_check_is_broken_on_purpose(number):
    order = damaged()
    order.check()
    name, spoil = BREAKS[number]
    spoil(order)
    with pytest.raises(BrokenInvariant) as caught:
        order.check()
    assert caught.value.name == name
