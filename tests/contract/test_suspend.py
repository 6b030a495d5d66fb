"""suspend and resume: a sequence gives its pages up and comes back with what it had."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import radixkv


def write(pool: Any, seq: Any, begin: int, end: int) -> None:
    """Each token's rows hold its position, plus one."""
    for at in range(begin, end):
        page, row = seq.page_table[at // pool.page_size], at % pool.page_size
        pool.keys(0)[page, row] = pool.values(0)[page, row] = at + 1


def rows(pool: Any, seq: Any, n: int) -> list[float]:
    keys, values = pool.keys(0), pool.values(0)
    where = [(int(seq.page_table[at // pool.page_size]), at % pool.page_size) for at in range(n)]
    assert all((keys[at] == values[at]).all() for at in where)
    return [float(keys[at].flatten()[0]) for at in where]


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 10])
def test_a_sequence_comes_back_as_it_was(pool: Any, ns: Any, counts: Any, length: int) -> None:
    with pool.reserve(range(length), namespace=ns, headroom_tokens=3) as seq:
        write(pool, seq, 0, length)
        seq.commit(length)
        table, capacity = seq.page_table, seq.capacity_tokens
        seq.suspend()
        assert counts()["private"] == 0
        assert pool.lookup(range(length), namespace=ns).device_tokens == length // pool.page_size * pool.page_size
        seq.resume()
        assert (seq.length, seq.committed_tokens, seq.capacity_tokens) == (length, length, capacity)
        assert seq.page_table is not table
        assert rows(pool, seq, length) == list(range(1, length + 1))
        assert seq.valid()
        seq.extend([99], headroom_tokens=1)
        write(pool, seq, length, length + 1)
        seq.commit(length + 1)
    assert counts()["private"] == 0


def test_what_was_not_complete_is_not_complete_afterwards(pool: Any, ns: Any) -> None:
    with pool.reserve(range(10), namespace=ns) as seq:
        write(pool, seq, 0, 10)
        seq.commit(6)
        seq.suspend()
        seq.resume()
        assert (seq.length, seq.committed_tokens, seq.writable_from_tokens) == (10, 6, 4)
        assert rows(pool, seq, 6) == [1, 2, 3, 4, 5, 6]


def test_what_was_evicted_meanwhile_has_to_be_computed_again(pool: Any, ns: Any, cache: Any) -> None:
    with pool.reserve(range(10), namespace=ns) as seq:
        write(pool, seq, 0, 10)
        seq.commit(10)
        seq.suspend()
        everything = np.arange(1000, 1000 + pool.total_pages * pool.page_size)
        with pool.reserve(everything, namespace=ns), pytest.raises(radixkv.OutOfPages):
            seq.resume()
        seq.resume()
        assert (seq.length, seq.committed_tokens, seq.cached_tokens) == (10, 0, 0)
        write(pool, seq, 0, 10)
        seq.commit(10)
    assert pool.lookup(range(10), namespace=ns).device_tokens == 8


def test_a_suspended_sequence_takes_no_verb_but_free(pool: Any, ns: Any, counts: Any) -> None:
    seq = pool.reserve(range(10), namespace=ns)
    with pytest.raises(radixkv.BadRequest):
        seq.resume()
    seq.suspend()
    for verb in (lambda: seq.commit(10), lambda: seq.extend([1]), seq.share, seq.suspend, seq.handoff):
        with pytest.raises(radixkv.BadRequest, match="suspended"):
            verb()
    assert not seq.valid()
    assert "suspended" in repr(seq)
    seq.free()
    with pytest.raises(radixkv.BadRequest):
        seq.resume()
    assert counts()["private"] == 0


def test_suspend_waits_for_its_fence(pool: Any, ns: Any, new_fence: Any) -> None:
    with pool.reserve(range(6), namespace=ns) as seq:
        write(pool, seq, 0, 6)
        seq.commit(6)
        fence = new_fence()
        seq.suspend(after=fence)
        assert fence.query()
        seq.resume()
        assert seq.committed_tokens == 6


def test_many_take_turns_in_a_pool_that_holds_one(pool: Any, ns: Any, counts: Any) -> None:
    length = pool.total_pages * pool.page_size - 1
    sequences = []
    for number in range(3):
        seq = pool.reserve([number, *range(length - 1)], namespace=ns)
        write(pool, seq, 0, length)
        seq.commit(length)
        seq.suspend()
        sequences.append(seq)
    for seq in sequences * 2:
        seq.resume()
        missing = seq.committed_tokens
        write(pool, seq, missing, length)
        seq.commit(length)
        assert rows(pool, seq, length) == list(range(1, length + 1))
        seq.suspend()
    for seq in sequences:
        seq.free()
    assert counts()["private"] == 0
