"""pool.step: a batch in one round trip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import radixkv


@pytest.fixture
def make(pool: Any, ns: Any) -> Any:
    """Sequences of their own tokens, freed at the end."""
    made = []

    def make(tokens: int = 4, **options: Any) -> Any:
        first = 1000 * (len(made) + 1)
        made.append(pool.reserve(range(first, first + tokens), namespace=ns, **options))
        return made[-1]

    yield make
    for seq in made:
        seq.free()


def test_all_kinds_of_items_at_once(pool: Any, ns: Any, make: Any, client: Any) -> None:
    a, b, c, d = make(), make(8), make(6), make()
    requests = client.stats().counters.requests
    result = pool.step(free=[a], truncate={b: 3}, commit={c: 6}, extend={d: ([1, 2], 4)}, share={c: (None, 2)})
    assert client.stats().counters.requests == requests + 2
    assert (result.free, result.truncate, result.commit, result.extend) == ([None], {b: None}, {c: None}, {d: None})
    assert (b.length, len(b.page_table), c.committed_tokens, d.length) == (3, 1, 6, 6)
    assert d.capacity_tokens >= 10
    children = result.share[c]
    assert [child.length for child in children] == [6, 6]
    for child in children:
        child.free()


def test_the_order_is_free_truncate_commit_extend_share(pool: Any, client: Any, ns: Any) -> None:
    small = client.pool("small")
    a = small.reserve(range(12), namespace=ns)
    b = small.reserve(range(50, 54), namespace=ns)
    result = small.step(share={b: (4, 1)}, extend={b: (range(54, 58), 8)}, commit={b: 4}, truncate={b: 4}, free=[a])
    assert result.errors == []
    (child,) = result.share[b]
    assert (b.length, b.capacity_tokens, b.committed_tokens, child.length) == (8, 16, 4, 4)
    child.free()
    b.free()


def test_each_item_fails_alone(pool: Any, make: Any) -> None:
    a, b, c, d = make(), make(), make(), make()
    result = pool.step(
        commit={a: 5, b: 4},
        truncate={c: 9},
        extend={b: (b"", 99), c: [1], d: [-1]},
        share={a: (3, 1), b: (2, 0)},
    )
    assert isinstance(result.commit[a], radixkv.BadRequest)
    assert result.commit[b] is None
    assert isinstance(result.truncate[c], radixkv.BadRequest)
    assert isinstance(result.extend[b], radixkv.OutOfPages)
    assert result.extend[b].never_fits
    assert result.extend[c] is None
    assert isinstance(result.extend[d], radixkv.BadRequest)
    assert isinstance(result.share[a], radixkv.BadRequest)
    assert result.share[b] == []
    assert len(result.errors) == 5
    assert (b.committed_tokens, c.length) == (4, 5)


def test_free_of_a_sequence_that_is_also_committed(pool: Any, ns: Any) -> None:
    seq = pool.reserve(range(8), namespace=ns)
    result = pool.step(free=[seq], commit={seq: 8})
    assert (result.free, result.commit) == ([None], {seq: None})
    assert pool.lookup(range(8), namespace=ns).device_tokens == 8


def test_freeing_twice_in_one_step_is_a_no_op(pool: Any, make: Any, new_fence: Any) -> None:
    seq, fenced, fence = make(), make(), new_fence()
    assert pool.step(free=[seq, seq, (fenced, fence), fenced]).free == [None] * 4
    fence.done = True
    pool.flush(5.0)


def test_what_is_no_sequence_is_refused(pool: Any) -> None:
    for wrong in (7, "seq", [1], None):
        with pytest.raises(radixkv.BadRequest, match="step takes sequences"):
            pool.step(free=[wrong])


def test_freed_and_foreign_sequences(pool: Any, make: Any, connect: Any, ns: Any) -> None:
    freed = make()
    freed.free()
    foreign = connect().pool("default").reserve([1], namespace=ns)
    result = pool.step(free=[freed, foreign], commit={freed: 1}, extend={foreign: [2]})
    assert result.free[0] is None
    assert isinstance(result.free[1], radixkv.BadRequest)
    assert isinstance(result.commit[freed], radixkv.StaleHandle)
    assert isinstance(result.extend[foreign], radixkv.BadRequest)
    foreign.free()


def test_sequences_of_two_pools(pool: Any, client: Any, ns: Any, make: Any) -> None:
    other = client.pool("half").reserve([1, 2, 3], namespace=ns)
    mine = make()
    result = pool.step(commit={mine: 4, other: 3}, free=[other])
    assert result.errors == []


def test_a_decode_loop_over_a_batch(pool: Any, ns: Any, make: Any) -> None:
    """One message a step for all: the new token of each, room for the next, what is complete."""
    batch = [make(3) for _ in range(3)]
    expected = [seq.tokens.tolist() for seq in batch]
    for token in range(9):
        result = pool.step(
            commit={seq: seq.length for seq in batch},
            extend={seq: (np.array([token], np.uint32), 1) for seq in batch},
        )
        assert result.errors == []
        for seq, tokens in zip(batch, expected, strict=True):
            tokens.append(token)
            assert seq.capacity_tokens > seq.length
    for seq, tokens in zip(batch, expected, strict=True):
        assert seq.tokens.tolist() == tokens
        assert seq.committed_tokens == 11
        assert seq.valid()
        assert pool.lookup(tokens, namespace=ns).device_tokens == 8


def test_fenced_items(pool: Any, ns: Any, make: Any, new_fence: Any) -> None:
    a, b, fence = make(8), make(8), new_fence()
    result = pool.step(commit={a: (8, fence), b: 8}, extend={a: [1]}, free=[(b, fence)])
    assert result.errors == []
    assert (a.committed_tokens, a.length, b.committed_tokens) == (0, 9, 8)
    with pytest.raises(radixkv.StaleHandle):
        b.extend([1])
    fence.done = True
    pool.step()
    pool.flush(5)
    assert a.committed_tokens == 8


def test_what_it_brings_comes_behind_its_own_truncate(pool: Any, make: Any, new_fence: Any) -> None:
    """As ``extend`` it waits for the truncate's fence; for others it does not."""
    seq, cut, after = make(8, headroom_tokens=4), new_fence(), new_fence()
    result = pool.step(truncate={seq: (5, cut)}, commit={seq: (5, after)}, extend={seq: [1, 2]})
    assert (result.errors, seq.length, seq.tokens.tolist()[5:]) == ([], 7, [1, 2])
    assert (cut.synchronized, after.synchronized, seq.committed_tokens) == (1, 0, 0)
    after.done = True
    pool.flush(5)
    assert (seq.committed_tokens, seq.valid()) == (5, True)


def test_it_raises_only_if_the_whole_message_failed(pool: Any, make: Any) -> None:
    seq = make()
    with pytest.raises(radixkv.LimitExceeded):
        pool.step(share={seq: (0, 5000)})
    with pytest.raises(radixkv.BadRequest):
        pool.step(commit={"seq": 1})
    assert pool.step().free == []
