"""Failures that comparable systems have had, as small scenarios: splits, forks, speculative decoding and rollback.

Every step is also compared with the naive model and recounted (``EnginePair``), so a scenario says only what is special
about it. Pages have 4 tokens unless a test says otherwise.
"""

import itertools
import random

import pytest

from fuzz.pairs.worker import Worker, counts, refused_for_pages, small_pair, workers
from radixkv import commands

P = list(range(1, 13))
"""Three pages."""


# -- splits, forks and their holders ---------------------------------------------------------------------------------


def test_random_inserts_then_eviction_page_by_page_to_an_empty_tree():
    pair = small_pair(64)
    one = Worker(pair)
    rng = random.Random(3)
    for _ in range(250):
        one.cache([rng.randrange(3) for _ in range(rng.randrange(41))])
    left = counts(pair)["cached"]
    held = one.reserve([7], headroom=0)
    for _ in range(left + counts(pair).get("free", 0)):
        one.extend(held, headroom=4 * len(held.pages) + 3)
    assert counts(pair) == {"private": 64}
    assert pair.real.pools["a"].tree.nodes == 0


@pytest.mark.parametrize(("at", "left"), [(8, 2), (4, 3), (0, 4)])
def test_a_fork_holds_exactly_its_part_of_the_path(at, left):
    _pair, one, two = workers(4, 2)
    parent = one.compute(P[:8])
    child = one.fork(parent, at)[0]
    one.free(parent)
    refused_for_pages(two.try_reserve(range(50, 50 + 4 * left + 1)), need=left + 1, available=left)
    assert len(two.reserve(range(50, 50 + 4 * left)).pages) == left
    assert child.pages == parent.pages[: at // 4]


def test_content_that_is_like_itself():
    _, one, two = workers(16, 2)
    long = one.compute([7] * 16)
    assert two.lookup([7] * 12) == 12
    left = two.compute([7] * 8 + [8] * 8)
    right = two.compute([7] * 4 + [8] * 4)
    assert two.lookup([7] * 8 + [8] * 4) == 12
    assert left.pages[:2] == long.pages[:2] and right.pages[0] == long.pages[0]
    assert two.lookup([7] * 4 + [8] * 8) == 8


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_parent_and_its_forks_are_freed_in_any_order(order):
    pair, one = workers(8, 1)
    parent = one.compute(P[:8])
    family = [parent, *one.fork(parent, 8, count=3)]
    for index, held in enumerate(family):
        one.extend(held, [100 + index])
    assert counts(pair) == {"free": 2, "cached": 2, "private": 4}
    for done, index in enumerate(order, 1):
        one.free(family[index])
        assert counts(pair) == {"free": 2 + done, "cached": 2} | ({"private": 4 - done} if done < 4 else {})
    assert pair.real.snapshot()["pools"]["a"]["evictable_pages"] == 2


def test_forks_inside_a_page_never_write_the_same_page():
    _, one = workers(8, 1)
    parent = one.compute([1, 2, 3, 4, 5, 6])
    left, right = one.fork(parent, 6, count=2)
    tails = [held.pages[1] for held in (parent, left, right)]
    assert len(set(tails)) == 3
    assert left.copy_rows == [(tails[0], tails[1], 2)] and right.copy_rows == [(tails[0], tails[2], 2)]
    for held, token in zip((parent, left, right), (10, 11, 12), strict=True):
        one.extend(held, [token, token])
        one.commit(held, 8)
    assert [one.lookup([1, 2, 3, 4, 5, 6, token, token]) for token in (10, 11, 12)] == [8, 8, 8]


# -- speculation and rollback ----------------------------------------------------------------------------------------


def test_speculative_decode_gives_every_draft_page_back():
    pair, one = workers(40, 1)
    for _ in range(5):
        held, length = one.reserve(range(6)), 6
        one.commit(held, 6)
        for turn in range(100):
            one.extend(held, headroom=5)
            assert len(held.pages) == max(-(-(length + 5) // 4), len(held.pages))
            accepted = turn % 6 if length < 140 else 0
            one.extend(held, range(accepted))
            length += accepted
            one.truncate(held, length)
            assert len(held.pages) == -(-length // 4)
        one.commit(held, length)
        one.free(held)
        assert set(counts(pair)) <= {"free", "cached"}


def test_tokens_that_were_not_accepted_are_never_visible():
    _, one, two = workers(16, 2)
    held = one.compute([1, 2, 3, 4, 5, 6])
    one.extend(held, headroom=4)
    assert two.lookup([1, 2, 3, 4, 5, 6, 7, 8]) == 4
    one.extend(held, [7])
    one.commit(held, 7)
    assert two.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9, 9]) == 4
    one.extend(held, [20, 21])
    one.commit(held, 9)
    assert two.lookup([1, 2, 3, 4, 5, 6, 7, 20]) == 8


def test_rolling_back_into_a_shared_page_copies_its_rows_out():
    pair, one, two = workers(8, 2)
    held, other = one.compute(P[:8]), two.reserve(P[:8], last_page="keep")
    done = one.truncate(held, 6)
    assert done.copy_rows == [(other.pages[1], held.pages[1], 2)]
    assert held.pages[0] == other.pages[0] and held.pages[1] != other.pages[1]
    one.extend(held, [70, 71])
    one.commit(held, 8)
    assert two.lookup(P[:8]) == two.lookup([*P[:6], 70, 71]) == 8
    assert counts(pair) == {"free": 5, "cached": 3}


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_lengths_are_tokens_and_tables_are_pages(page_size):
    pair = small_pair(64, page_size=page_size)
    one = Worker(pair)
    rng = random.Random(page_size)
    for _ in range(60):
        length, headroom = rng.randrange(20 * page_size), rng.randrange(3 * page_size)
        held = one.reserve(range(length), headroom=headroom, last_page="drop")
        assert len(held.pages) == -(-(length + headroom) // page_size)
        assert held.writable_from == held.cached - held.cached % page_size
        one.truncate(held, length // 2)
        assert len(held.pages) == -(-(length // 2) // page_size)
        one.free(held)


def test_a_source_of_rows_is_held_alone_from_private_page_to_cached_page_to_the_next_source():
    pair, one = workers(12, 1)
    parent = one.compute([1, 2, 3, 4, 5, 6])
    child = one.fork(parent)[0]
    one.extend(parent, [7, 8, 9, 9, 9, 9])
    one.commit(parent, 12)
    one.free(parent)
    assert pair.real.snapshot()["pools"]["a"]["evictable_pages"] == 1
    assert one.step(copied=[child.seq]).copied == [None]
    assert pair.real.snapshot()["pools"]["a"]["evictable_pages"] == 2
    one.extend(child, [70, 80])
    one.commit(child, 8)
    for n in (7, 6):
        one.truncate(child, n)
    assert one.step(copied=[child.seq]).copied == [None]
    one.free(child)
    assert counts(pair) == {"free": 8, "cached": 4}


def test_rows_are_copied_from_a_page_that_became_a_shadow_meanwhile():
    pair, one, two = workers(12, 2)
    parent = one.compute([1, 2, 3, 4, 5, 6])
    early = one.fork(parent, 6)[0]
    two.compute([1, 2, 3, 4, 5, 6, 7, 8])
    one.extend(parent, [7, 8])
    one.commit(parent, 8)
    assert counts(pair)["shadow"] == 1
    late = one.fork(parent, 6)[0]
    assert late.copy_rows[0][0] == early.copy_rows[0][0] == parent.pages[1]
    one.free(parent)
    assert one.step(copied=[late.seq, early.seq]).copied == [None, None]
    assert "shadow" not in counts(pair)


def test_no_forks_need_no_ids():
    _, one = workers(4, 1)
    held = one.compute(P[:4])
    (none,) = one.step(share=[commands.Share(held.seq, None, 0, held.seq)]).share
    assert none == commands.Shared(4, 1)
