"""The table of page states, the free list and counted holders."""

from array import array

import pytest

from fuzz.model.allocator import ALLOWED
from fuzz.pairs.allocator import AllocatorPair
from radixkv.allocator.free_list import FreeList
from radixkv.allocator.page_pool import PagePool
from radixkv.allocator.page_states import TRANSITIONS, Event, State
from radixkv.errors import BrokenInvariant


def test_the_table_is_what_the_protocol_says():
    written = {(state.name, event.name): after.name for (state, event), after in TRANSITIONS.items()}
    assert written == ALLOWED


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_what_is_not_in_the_table_raises_and_nothing_happens(state, event):
    pool = PagePool(4)
    pool.states[0] = state
    pool.counts[State.FREE] -= 1
    pool.counts[state] += 1
    before = bytes(pool.states), list(pool.counts)
    if (state, event) in TRANSITIONS:
        pool.move(array("i", [0]), state, event)
        assert pool.states[0] == TRANSITIONS[state, event]
    else:
        with pytest.raises(BrokenInvariant, match="I1"):
            pool.move(array("i", [0]), state, event)
        assert (bytes(pool.states), pool.counts) == before


@pytest.mark.parametrize("count", [2, 30])
def test_a_page_given_back_twice_in_one_batch_is_caught(count):
    pool = PagePool(40)
    pages = pool.take(count)
    pages.append(pages[0])
    with pytest.raises(BrokenInvariant, match="I3"):
        pool.give(pages, State.PRIVATE, Event.RELEASE)


def test_a_page_given_back_twice_in_two_batches_is_caught():
    pool = PagePool(4)
    pages = pool.take(2)
    pool.give(pages, State.PRIVATE, Event.RELEASE)
    with pytest.raises(BrokenInvariant, match="I3"):
        pool.give(pages, State.PRIVATE, Event.RELEASE)


@pytest.mark.parametrize("count", [0, 1, 23, 24, 60])
def test_small_and_large_batches_are_counted_alike(count):
    pair = AllocatorPair(64)
    pages = pair.take(count)
    pair.check()
    pair.move(pages, "PRIVATE", "PUBLISH")
    pair.check()
    pair.give(pages, "CACHED", "EVICT")
    pair.check()


def test_the_free_list_gives_what_came_back_last_and_every_page_once():
    free = FreeList(range(5))
    assert free.take(3).tolist() == [0, 1, 2]
    free.give(array("i", [1, 0]).tobytes())
    assert sorted(free.take(4).tolist()) == [0, 1, 3, 4]
    assert len(free) == 0 and free.take(0).tolist() == []


def test_a_shared_page_comes_back_with_its_last_holder():
    pair = AllocatorPair(2)
    (page,) = pair.take(1)
    pair.hold(page, 2)
    for holders_left in (2, 1):
        pair.drop(page)
        pair.check()
        assert pair.real.states[page] == State.PRIVATE and pair.model.holders[page] == holders_left
    pair.drop(page)
    pair.check()
    assert pair.real.states[page] == State.FREE and pair.real.extra_holders == {}
