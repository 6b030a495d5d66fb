"""Exact LRU where runs come back that nobody has used: what a copy between tiers has held keeps its place."""

import random

import pytest

from radixkv.errors import BrokenInvariant
from radixkv.evictor.lru import LRU
from radixkv.tree.node import Node


def run(stamp, parent=None, pages=1):
    """Of pages of one token; a child has its stamp for a key."""
    made = Node(parent, b"t" * 4 * pages, b"p" * 4 * pages)
    made.stamp = stamp
    if parent is not None:
        parent.children = {**(parent.children or {}), bytes([stamp]): made}
    return made


def order(lru):
    """All of it, by taking victims; the iteration must have said the same."""
    said = [one.stamp for one in lru]
    taken = []
    while len(lru):
        taken.append(lru.victim(99).stamp)
    assert taken == said
    return taken


def test_who_comes_back_has_its_old_place():
    lru = LRU()
    runs = [run(stamp) for stamp in range(1, 6)]
    for one in runs:
        lru.add(one)
    for one in (runs[3], runs[0]):
        lru.remove(one)
    for one in (runs[3], runs[0]):
        lru.add(one)
    lru.check()
    assert order(lru) == [1, 2, 3, 4, 5]


def test_who_is_used_again_goes_to_the_end():
    lru = LRU()
    first, second = run(1), run(2)
    lru.add(first)
    lru.add(second)
    lru.remove(first)
    lru.add(first)  # a copy had held it
    lru.remove(first)
    first.stamp = 3
    lru.add(first)
    assert order(lru) == [2, 3]


def test_of_one_path_the_end_comes_back_first_and_leaves_first():
    lru = LRU()
    top = run(1)
    middle = run(1, top)
    leaf = run(1, middle)
    newest = run(2)
    for one in (leaf, middle, top, newest):
        lru.add(one)
    for one in (leaf, middle, top):
        lru.remove(one)
    for one in (leaf, middle, top):
        lru.add(one)
    lru.check()
    assert [lru.victim(99) for _ in range(4)] == [leaf, middle, top, newest]


def test_of_equal_ones_who_never_left_goes_first():
    """The head of a run that a copy has split comes back; its tail was never held."""
    lru = LRU()
    head = run(1)
    tail = run(1, head)
    lru.add(tail)
    lru.add(run(2))
    lru.add(head)
    lru.check()
    assert lru.victim(99) is tail and lru.victim(99) is head


def test_part_of_one_who_came_back_may_go():
    lru = LRU()
    long, new = run(1, pages=3), run(2)
    lru.add(new)
    lru.add(long)
    assert lru.victim(2) is long and len(lru) == 2
    assert lru.victim(3) is long and len(lru) == 1


def test_a_parent_on_the_device_does_not_wait_for_what_the_host_tier_has_behind_it():
    lru = LRU()
    top = run(1)
    below = run(2, top)
    below.pages, below.host = b"", b"h" * 4
    lru.add(top)
    lru.check()
    below.pages, below.host = b"p" * 4, b""
    with pytest.raises(BrokenInvariant, match="evicted before its child"):
        lru.check()


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_list_sorted_by_stamps(seed):
    rng, lru, known, stamp = random.Random(seed), LRU(), [], 0
    away = []
    for _ in range(300):
        choice = rng.random()
        if choice < 0.4 or not known:
            stamp += 1
            known.append(run(stamp))
            lru.add(known[-1])
        elif choice < 0.6:
            away.append(known.pop(rng.randrange(len(known))))
            lru.remove(away[-1])
        elif choice < 0.85 and away:
            back = away.pop(rng.randrange(len(away)))
            if rng.random() < 0.3:
                stamp += 1
                back.stamp = stamp
            known.append(back)
            lru.add(back)
        else:
            oldest = min(known, key=lambda one: one.stamp)
            assert lru.victim(99) is oldest
            known.remove(oldest)
        lru.check()
        assert len(lru) == len(known)
    assert order(lru) == sorted(one.stamp for one in known)
