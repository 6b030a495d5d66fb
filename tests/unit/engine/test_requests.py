"""Small things that a request may count on, each by itself."""

import pytest

from fuzz.pairs.worker import code, counts, refused_for_pages, workers
from radixkv import commands
from radixkv.engine.namespaces import Namespaces
from radixkv.image import NamespaceImage


def test_what_comes_after_its_deadline_is_not_executed():
    pair, one = workers(8, 1)
    held = one.reserve(range(4))
    late = one.ask(commands.Step(free=[commands.Free(held.seq)]), deadline=pair.now - 0.001)
    assert code(late) == "timeout" and counts(pair) == {"free": 7, "private": 1}
    assert one.ask(commands.Step(free=[commands.Free(held.seq)]), deadline=pair.now).free == [None]


def test_a_cap_is_reached_and_not_passed():
    _, one, two = workers(8, 2, session_cap_pages=2)
    held = one.reserve(range(8))
    refused_for_pages(one.try_extend(held, [1]), need=1, available=0)
    refused_for_pages(one.try_reserve([9]), need=1, available=0)
    assert len(two.reserve(range(50, 58)).pages) == 2


def test_the_decode_reserve_is_for_those_that_grow():
    _, one = workers(4, 1, decode_reserve_pages=1)
    refused_for_pages(one.try_reserve(range(16)), need=4, available=3)
    held = one.reserve(range(12))
    assert len(one.extend(held, range(4))) == 1


def test_compact_gives_shadows_back():
    pair, one, two = workers(8, 2)
    first, second = one.reserve(range(8)), two.reserve(range(8))
    one.commit(first, 8)
    two.commit(second, 8)
    assert counts(pair) == {"free": 4, "cached": 2, "shadow": 2}
    two.ask(commands.Compact(second.seq))
    assert counts(pair) == {"free": 6, "cached": 2}


def test_a_commit_never_goes_back():
    _, one = workers(8, 1)
    held = one.compute(range(6))
    assert code(one.step(commit=[commands.Commit(held.seq, 5)]).commit[0]) == "bad_request"
    assert one.step(commit=[commands.Commit(held.seq, 6)]).commit == [None]


def test_a_fork_begins_at_what_is_committed_at_the_latest():
    _, one = workers(8, 1)
    held = one.reserve(range(6))
    one.commit(held, 5)
    late = one.step(share=[commands.Share(held.seq, 6, 1, 90)]).share[0]
    assert code(late) == "bad_request"
    assert len(one.fork(held, at=5)) == 1


def test_the_prefix_that_is_found_is_no_room_for_the_rest():
    pair, one = workers(4, 1)
    one.cache(range(8))
    one.reserve([99])
    refused_for_pages(one.try_reserve(range(20)), need=3, available=1)
    assert one.reserve(range(12)).cached == 8
    assert counts(pair) == {"private": 2, "cached": 2}


@pytest.mark.parametrize("more", [0, 1])
def test_a_sequence_may_be_as_long_as_the_limit_and_no_longer(more):
    pair, one = workers(8, 1)
    limit = pair.config.limits.tokens
    reply = one.try_reserve([1], headroom=limit - 1 + more)
    assert code(reply) == ("limit_exceeded" if more else "out_of_pages")


def test_a_tenant_too_many_is_refused_until_nothing_is_of_another():
    _, one = workers(8, 1, namespaces=2)
    held = one.reserve(range(4), b"held")
    one.cache(range(4), b"cached")
    assert code(one.try_reserve([1], b"third")) == "limit_exceeded", "no cached page leaves for it"
    one.free(held)
    one.reserve([1], b"third")
    assert one.lookup(range(5), b"cached") == 4
    assert code(one.try_reserve([1], b"held")) == "limit_exceeded"
    one.invalidate(b"cached")
    one.reserve([1], b"held")


def test_epochs_that_a_page_was_seen_with_are_not_given_again():
    names = Namespaces(4)
    names.restore([NamespaceImage(2, 5, 1, b"a"), NamespaceImage(0, 7, 0, b"b")], newest_epoch=9)
    made, new = names.open(b"c")
    assert new and made.root.epoch == 10 and made.id in (1, 3)
    assert names.open(b"a")[0].root.epoch == 5
