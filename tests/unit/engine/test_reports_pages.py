"""Failures that comparable systems have had, as small scenarios: leaks, double release, mixed-up pages and identities.

Every step is also compared with the naive model and recounted (``EnginePair``), so a scenario says only what is special
about it. Pages have 4 tokens unless a test says otherwise.
"""

import itertools
import random

import pytest

from fuzz.model.packing import pack_tokens
from fuzz.pairs.worker import NAMESPACE, Worker, code, counts, refused_for_pages, small_config, small_pair, workers
from radixkv import commands
from radixkv.engine.engine import Engine

P = list(range(1, 13))
"""Three pages."""


# -- holders and leaks -----------------------------------------------------------------------------------------------


def test_a_lookup_holds_nothing():
    _, one, two, three = workers(8, 3)
    one.cache(P)
    assert two.lookup(P) == 12
    assert len(three.reserve(range(100, 132)).pages) == 8


def test_the_second_release_of_the_same_is_refused_and_takes_nothing_from_others():
    pair, one, two, three = workers(4, 3)
    one.cache(P[:4])
    mine, other = one.reserve(P[:8]), two.reserve(P[:8])
    assert mine.pages[0] == other.pages[0]
    one.free(mine)
    assert code(one.step(free=[commands.Free(mine.seq)]).free[0]) == "stale_handle"
    refused_for_pages(three.try_reserve(range(100, 116)), need=4, available=2)
    assert len(three.reserve(range(100, 108)).pages) == 2
    assert counts(pair) == {"cached": 1, "private": 3}


@pytest.mark.parametrize("order", list(itertools.permutations(["lapse", "death", "bye"])))
def test_three_ends_of_one_session_give_everything_back_once(order):
    pair, one, two, other = workers(8, 3)
    shared = other.compute(P[:8])
    one.reserve(P[:8], last_page="keep")
    one.reserve(range(20, 28))
    one.try_reserve(range(50, 74), wait_s=100.0)
    for signal in order:
        if signal == "lapse":
            pair.tick(15.0)
            other.ask(commands.Heartbeat())
            two.ask(commands.Heartbeat())
            pair.tick(15.0)
            got = two.try_reserve(range(60, 80))
            assert isinstance(got, commands.Reserved) == (order[0] == "bye")  # else two pages are in quarantine
        elif signal == "death":
            pair.do(commands.EndSession(one.session, mapped=True, reason="killed"))
        else:
            one.ask(commands.Bye())
    pair.do(commands.MappingGone(one.session))
    two.ask(commands.Bye())
    other.free(shared)
    assert counts(pair) == {"free": 6, "cached": 2}
    assert pair.real.snapshot()["queued"] == 0


@pytest.mark.parametrize("length", [0, 3, 4])
def test_prompts_around_one_page_leak_nothing(length):
    pair, one = workers(4, 1)
    for turn in range(300):
        one.cache([turn] * length)
        assert counts(pair).get("free", 0) + counts(pair).get("cached", 0) == 4


def test_the_same_sequence_twice_in_one_message_is_freed_once():
    pair, one, two, three = workers(4, 3)
    held = one.reserve(P[:8])
    first, second = one.step(free=[commands.Free(held.seq)] * 2).free
    assert first is None and code(second) == "stale_handle"
    assert counts(pair) == {"free": 4}
    assert set(two.reserve(range(20, 28)).pages).isdisjoint(three.reserve(range(30, 38)).pages)


def test_free_and_truncate_of_one_sequence_in_one_step():
    pair, one = workers(8, 1)
    held = one.reserve(range(9), headroom=4)
    assert len(held.pages) == 4
    done = one.step(free=[commands.Free(held.seq)], truncate=[commands.Truncate(held.seq, 8)])
    assert done.free == [None] and code(done.truncate[0]) == "stale_handle"
    assert counts(pair) == {"free": 8}
    again = one.reserve(range(9), headroom=4)
    one.truncate(again, 8)
    one.free(again)
    assert counts(pair) == {"free": 8}


def test_free_with_a_commit_is_a_commit_and_a_free():
    pair, one = workers(8, 1)
    held = one.reserve(range(10))
    assert one.step(free=[commands.Free(held.seq, 9)]).free == [None]
    assert counts(pair) == {"cached": 2, "free": 6}
    again = one.reserve(range(10))
    assert again.cached == 8
    one.free(again)


@pytest.mark.parametrize("n", [3, 11])
def test_free_with_a_commit_that_is_refused_keeps_no_pages(n):
    pair, one = workers(8, 1)
    one.cache(range(8))
    held = one.reserve(range(10))
    answers = one.step(free=[commands.Free(held.seq, n), commands.Free(held.seq)]).free
    assert [code(answer) for answer in answers] == ["bad_request", "stale_handle"]
    assert counts(pair) == {"cached": 2, "free": 6}


def test_commit_again_is_a_no_op_and_never_goes_back():
    pair, one = workers(8, 1)
    held = one.compute(range(15))
    before = counts(pair)
    one.commit(held, 15)
    too_short, too_long = one.step(commit=[commands.Commit(held.seq, 12), commands.Commit(held.seq, 16)]).commit
    assert code(too_short) == code(too_long) == "bad_request"
    assert counts(pair) == before


def test_what_others_hold_cannot_be_freed_or_forked():
    pair, one, two = workers(4, 2)
    held = one.compute(P[:4])
    done = two.step(
        free=[commands.Free(held.seq), commands.Free(77)],
        share=[commands.Share(held.seq, None, 1, 500)],
        extend=[commands.Extend(held.seq, pack_tokens([1]), 0)],
    )
    assert [code(reply) for reply in (*done.free, *done.share, *done.extend)] == ["stale_handle"] * 4
    assert counts(pair) == {"free": 3, "cached": 1}


# -- pages that change their content ---------------------------------------------------------------------------------


def test_an_evicted_page_is_not_found_under_its_old_content():
    pair, one, two, three = workers(2, 3)
    one.cache([1, 2, 3, 4])
    held = two.reserve(range(50, 58))
    assert three.lookup([1, 2, 3, 4]) == three.lookup(range(50, 58)) == 0
    two.free(held)
    assert three.lookup([1, 2, 3, 4]) == three.lookup(range(50, 58)) == 0
    assert counts(pair) == {"free": 2}


def test_a_page_that_lost_the_race_stays_its_owners_until_let_go():
    pair, one, two, three = workers(8, 3)
    mine, other = one.reserve(P[:8]), two.reserve(P[:8])
    one.commit(mine, 8)
    two.commit(other, 8)
    assert counts(pair) == {"free": 4, "cached": 2, "shadow": 2}
    rest = three.reserve(range(100, 116))
    assert set(rest.pages).isdisjoint(other.pages)
    assert three.try_reserve([1]).code == "out_of_pages"
    two.free(other)
    assert counts(pair) == {"free": 2, "cached": 2, "private": 4}


def test_shadow_pages_stay_while_a_fork_uses_them():
    pair, one, two = workers(8, 2)
    one.compute(P[:8])
    late = two.reserve([*P[:8], 77])
    assert late.cached == 8
    two.free(late)
    rivals = [two.reserve(range(40, 48)), one.reserve(range(40, 48))]
    one.commit(rivals[1], 8)
    two.commit(rivals[0], 8)
    child = two.fork(rivals[0])[0]
    assert child.pages == rivals[0].pages
    two.free(rivals[0])
    assert counts(pair)["shadow"] == 2
    two.free(child)
    assert "shadow" not in counts(pair)


def test_letting_go_after_the_namespace_was_invalidated_harms_nobody():
    pair, one, two = workers(8, 2)
    held = one.compute(P[:8])
    two.invalidate()
    fresh = two.compute(P[:8])
    assert fresh.cached == 0
    one.free(held)
    assert pair.real.has_work()
    pair.tick(0.0)
    assert counts(pair) == {"free": 6, "cached": 2}
    assert two.lookup(P[:8]) == 8
    assert fresh.pages != held.pages


# -- partial pages ---------------------------------------------------------------------------------------------------


def test_prompts_that_part_inside_a_page_share_only_whole_pages():
    _, one, two = workers(8, 2)
    left = one.compute([1, 2, 3, 4, 5, 6, 7, 8])
    right = two.compute([1, 2, 3, 4, 5, 6, 90, 91])
    assert left.pages[0] == right.pages[0] and left.pages[1] != right.pages[1]
    assert right.cached == 4


def test_partial_pages_are_never_matched():
    _, one, two = workers(8, 2)
    one.cache([1, 2, 3, 4, 5, 6])
    assert two.lookup([1, 2, 3, 4, 5, 6]) == 4
    assert two.lookup([1, 2, 3]) == 0


def test_page_counts_add_up_with_prefixes_of_odd_lengths():
    pair = small_pair(64, page_size=16)
    one = Worker(pair)
    rng = random.Random(5)
    base = [rng.randrange(3) for _ in range(300)]
    for _ in range(200):
        prompt = base[: rng.randrange(200)] + [rng.randrange(3) for _ in range(rng.randrange(60))]
        one.cache(prompt)
        assert sum(counts(pair).values()) == 64


def test_the_private_copy_of_a_partial_page_is_part_of_what_is_needed():
    pair, one, two = workers(4, 2)
    busy = one.compute([1, 2, 3, 4, 5, 6])
    filler = one.reserve([9])
    asked = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    refused_for_pages(two.try_reserve(asked), need=2, available=1)
    assert counts(pair) == {"free": 1, "cached": 1, "private": 2}
    one.free(filler)
    got = two.reserve(asked)
    assert got.pages[0] == busy.pages[0] and got.pages[1] != busy.pages[1]


def test_the_same_content_three_times_in_one_sequence():
    pair, one, two = workers(8, 2)
    held = one.compute([1, 2, 3, 4] * 3)
    assert two.lookup([1, 2, 3, 4] * 4) == 12
    assert len(set(held.pages)) == 3
    assert two.reserve([1, 2, 3, 4] * 3, last_page="keep").pages == held.pages
    assert counts(pair) == {"free": 5, "cached": 3}


# -- what may be compared --------------------------------------------------------------------------------------------


def test_of_many_short_prompts_each_finds_its_own_page_alone():
    """No hash stands for tokens anywhere, so none can collide: see also the import contracts of the core."""
    engine = Engine(small_config(4096), "boot", "cache")
    engine.step(commands.OpenSession(1, b"t" * 16, "w"), 0.0)
    rng = random.Random(1)
    prompts = {tuple(rng.randrange(50) for _ in range(4)) for _ in range(2000)}
    stored, others = sorted(prompts)[:1000], sorted(prompts)[1000:]
    for request, prompt in enumerate(stored):
        body = commands.Reserve("a", request, NAMESPACE, pack_tokens(prompt))
        engine.step(commands.Request(1, 1, 2 * request + 1, 1e9, body), 0.0)
        step = commands.Step(commit=[commands.Commit(request, 4)])
        engine.step(commands.Request(1, 1, 2 * request + 2, 1e9, step), 0.0)
    asked = [pack_tokens(prompt) for prompt in (*stored, *others)]
    reply = engine.step(commands.Request(0, 0, 1, 1e9, commands.Lookup("a", NAMESPACE, asked)), 0.0).reply
    assert reply.device_tokens == [4] * len(stored) + [0] * len(others)


def test_only_the_very_same_namespace_hits():
    _, one, two = workers(8, 2)
    one.cache(P[:8], namespace=b"m\x01a")
    for other in (b"", b"m", b"m\x01", b"m\x01b", b"m\x01a\0", b"\x01a", (1).to_bytes(8, "little") + b"m\x01a"):
        assert two.lookup(P[:8], namespace=other) == 0
    assert two.lookup(P[:8], namespace=b"m\x01a") == 8


def test_a_late_commit_under_an_old_epoch_is_kept_apart():
    pair, one, two = workers(8, 2)
    old = one.reserve([*P[:8], 1, 1, 1, 1])
    one.commit(old, 8)
    idle = one.cache(range(60, 68))
    assert len(idle) == 2
    two.invalidate()
    assert counts(pair) == {"free": 5, "cached": 2, "private": 1}
    assert two.lookup(P[:8]) == two.lookup(range(60, 68)) == 0
    one.commit(old, 12)
    assert two.lookup([*P[:8], 1, 1, 1, 1]) == 0
    assert counts(pair) == {"free": 5, "cached": 2, "shadow": 1}
    one.free(old)
    pair.tick(0.0)
    assert counts(pair) == {"free": 8}


def test_the_first_to_leave_does_not_take_the_cache_along():
    pair, one, two = workers(8, 2)
    one.cache(P[:8])
    one.ask(commands.Bye())
    assert two.lookup(P[:8]) == 8
    third = Worker(pair)
    third.reserve(range(40, 48))
    pair.do(commands.EndSession(third.session, mapped=True, reason="killed"))
    assert two.reserve([*P[:8], 5]).cached == 8


@pytest.mark.parametrize("last_page", ["copy", "keep", "drop"])
def test_a_cached_prompt_of_any_length_leaves_a_token_to_compute(last_page):
    for length in range(1, 18):
        pair, one, two = workers(16, 2)
        prompt = list(range(length))
        busy = one.compute(prompt)
        got = two.reserve(prompt, last_page=last_page)
        assert got.cached <= length - 1
        own = [page for page in got.pages if page not in busy.pages]
        if last_page != "keep" or length % 4:
            assert own and got.writable_from <= length - 1
        assert counts(pair).get("cached", 0) == length // 4
