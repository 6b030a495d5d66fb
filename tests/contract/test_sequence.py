"""commit, extend, truncate, share, free, valid, handoff, compact, lookup, invalidate."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

import radixkv


@pytest.fixture
def seq(pool: Any, ns: Any) -> Any:
    """10 tokens on 3 pages."""
    with pool.reserve(range(10), namespace=ns) as seq:
        yield seq


# -- commit -------------------------------------------------------------------------------------------------------


def test_commit_is_absolute_and_equal_is_a_no_op(seq: Any, pool: Any, ns: Any) -> None:
    seq.commit(5)
    seq.commit(5)
    assert (seq.committed_tokens, seq.writable_from_tokens) == (5, 4)
    seq.commit(9)
    assert (seq.committed_tokens, seq.writable_from_tokens) == (9, 8)
    assert pool.lookup(range(10), namespace=ns).device_tokens == 8


@pytest.mark.parametrize("n", [4, 11, -1, 2**63])
def test_commit_goes_neither_back_nor_over_the_length(seq: Any, n: int) -> None:
    seq.commit(5)
    with pytest.raises(radixkv.BadRequest):
        seq.commit(n)
    assert seq.committed_tokens == 5


def test_rk_047_a_page_table_that_was_handed_out_is_nobodys_buffer(pool: Any, ns: Any) -> None:
    """Two steps in flight, each with its table. The library keeps no buffer that the next step would overwrite; on a
    GPU there would be the engine's own, which is not ours to test."""
    with pool.reserve(range(8), namespace=ns) as one, pool.reserve(range(100, 108), namespace=ns) as two:
        for seq, number in ((one, 1.0), (two, 2.0)):
            pool.keys(0)[torch.from_numpy(seq.page_table.copy()).long()] = number
        in_flight = [(seq.page_table, seq.page_table.tolist()) for seq in (one, two)]
        one.extend([8], headroom_tokens=12)
        two.truncate(3)
        one.truncate(5)
        two.extend([7, 7])
        for (table, was), number in zip(in_flight, (1.0, 2.0), strict=True):
            assert table.tolist() == was and not table.flags.writeable
            assert not any(np.shares_memory(table, seq.page_table) for seq in (one, two))
            assert (pool.keys(0)[torch.from_numpy(table.copy()).long()] == number).all()


def test_commit_never_changes_the_page_table(seq: Any) -> None:
    table = seq.page_table
    seq.commit(10)
    assert seq.page_table is table


def test_the_second_to_commit_keeps_its_own_pages(pool: Any, ns: Any, seq: Any, counts: Any) -> None:
    with pool.reserve(range(10), namespace=ns) as twin:
        seq.commit(8)
        before = twin.page_table.tolist()
        twin.commit(8)
        assert twin.page_table.tolist() == before
        assert counts()["shadow"] == 2
        assert twin.writable_from_tokens == 8
    assert counts()["shadow"] == 0


def test_compact_names_the_canonical_pages(pool: Any, ns: Any, seq: Any, counts: Any) -> None:
    with pool.reserve(range(10), namespace=ns) as twin:
        seq.commit(8)
        twin.commit(8)
        before = twin.page_table
        kept = before.tolist()
        twin.compact()
        assert twin.page_table[:2].tolist() == seq.page_table[:2].tolist()
        assert twin.page_table[2] == kept[2]
        assert before.tolist() == kept
        assert counts()["shadow"] == 0
        assert twin.valid()


# -- extend -------------------------------------------------------------------------------------------------------


def test_extend_appends_tokens_and_pages(seq: Any) -> None:
    first = seq.page_table
    kept = first.tolist()
    seq.extend([50, 51])
    assert (seq.length, seq.page_table.tolist()) == (12, kept)
    seq.extend(np.array([52], np.uint32), headroom_tokens=4)
    assert seq.length == 13
    assert seq.tokens.tolist() == [*range(10), 50, 51, 52]
    assert seq.capacity_tokens - seq.length >= 4
    assert seq.page_table[:3].tolist() == kept
    assert len(seq.page_table) == 5
    assert (first.tolist(), first is seq.page_table) == (kept, False)
    assert seq.valid()


def test_headroom_zero_keeps_what_is_there(seq: Any) -> None:
    seq.extend(headroom_tokens=10)
    capacity = seq.capacity_tokens
    seq.extend([1])
    seq.extend()
    assert seq.capacity_tokens == capacity == 20


def test_a_refused_extend_appends_nothing(seq: Any, counts: Any) -> None:
    before = (seq.length, seq.page_table.tolist(), counts())
    with pytest.raises(radixkv.OutOfPages) as caught:
        seq.extend([1, 2, 3], headroom_tokens=52)
    assert (caught.value.need, caught.value.available, caught.value.never_fits) == (14, 13, True)
    assert (seq.length, seq.page_table.tolist(), counts()) == before
    seq.extend([1, 2, 3], headroom_tokens=51)
    assert seq.capacity_tokens == 64


# -- truncate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "pages"), [(10, 3), (9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0)])
def test_truncate_keeps_exactly_n(seq: Any, n: int, pages: int) -> None:
    seq.extend(headroom_tokens=20)
    before = seq.page_table
    kept = before.tolist()
    seq.truncate(n)
    assert (seq.length, seq.page_table.tolist(), seq.committed_tokens) == (n, kept[:pages], 0)
    assert seq.tokens.tolist() == list(range(n))
    assert before.tolist() == kept
    assert seq.valid()


def test_truncate_inside_a_shared_page_copies_its_rows_out(seq: Any, pool: Any, ns: Any) -> None:
    seq.commit(10)
    shared = int(seq.page_table[1])
    pool.keys(0)[shared] = torch.arange(32.0).reshape(4, 1, 8)
    seq.truncate(6)
    own = int(seq.page_table[1])
    assert own != shared
    assert (seq.committed_tokens, seq.writable_from_tokens, seq.copy_rows) == (6, 4, [])
    assert torch.equal(pool.keys(0)[own, :2], pool.keys(0)[shared, :2])
    assert pool.lookup(range(10), namespace=ns).device_tokens == 8
    assert seq.valid()


def test_truncate_can_leave_the_rows_to_the_caller(seq: Any) -> None:
    seq.commit(10)
    shared = int(seq.page_table[1])
    seq.truncate(6, copy=False)
    assert seq.copy_rows == [(shared, int(seq.page_table[1]), 2)]
    seq.commit(6)
    assert seq.copy_rows == []


def test_truncate_over_the_length(seq: Any) -> None:
    for n in (11, -1):
        with pytest.raises(radixkv.BadRequest):
            seq.truncate(n)
    assert seq.length == 10


# -- share --------------------------------------------------------------------------------------------------------


def test_children_share_full_pages_and_get_their_own_last_one(seq: Any, pool: Any) -> None:
    seq.commit(10)
    pool.values(1)[int(seq.page_table[2])] = torch.arange(32.0).reshape(4, 1, 8)
    children = seq.share(count=2)
    for child in children:
        assert (child.length, child.committed_tokens, child.writable_from_tokens) == (10, 10, 8)
        assert child.cached_tokens <= child.length - 1
        assert child.page_table[:2].tolist() == seq.page_table[:2].tolist()
        assert child.copy_rows == []
        own = int(child.page_table[2])
        assert torch.equal(pool.values(1)[own, :2], pool.values(1)[int(seq.page_table[2]), :2])
        assert child.tokens.tolist() == list(range(10))
        assert child.capacity_tokens == 12
        assert child.valid()
    assert len({int(one.page_table[2]) for one in (seq, *children)}) == 3
    for child in children:
        child.free()
    assert seq.valid()


def test_share_at_a_page_boundary_takes_no_page(seq: Any, counts: Any) -> None:
    seq.commit(10)
    before = counts()["free"]
    (child,) = seq.share(at=8)
    assert child.page_table.tolist() == seq.page_table[:2].tolist()
    assert counts()["free"] == before
    child.free()


def test_share_defaults_to_one_child_at_the_committed_tokens(seq: Any) -> None:
    seq.commit(6)
    (child,) = seq.share()
    assert (child.length, child.committed_tokens) == (6, 6)
    child.extend([77], headroom_tokens=3)
    assert child.tokens.tolist() == [*range(6), 77]
    assert seq.length == 10
    child.free()


def test_share_of_nothing(seq: Any) -> None:
    assert seq.share(count=0) == []
    (child,) = seq.share(at=0)
    assert (child.length, len(child.page_table)) == (0, 0)
    child.free()


def test_share_beyond_the_committed_tokens(seq: Any) -> None:
    seq.commit(6)
    for at, count in ((7, 1), (-1, 1), (1, -1)):
        with pytest.raises(radixkv.BadRequest):
            seq.share(at=at, count=count)


def test_share_is_all_or_nothing(seq: Any, counts: Any) -> None:
    seq.commit(10)
    before = counts()
    with pytest.raises(radixkv.OutOfPages):
        seq.share(count=14)
    assert counts() == before


def test_share_can_leave_the_rows_to_the_caller(seq: Any) -> None:
    seq.commit(10)
    children = seq.share(count=2, copy=False)
    for child in children:
        assert child.copy_rows == [(int(seq.page_table[2]), int(child.page_table[2]), 2)]
        child.copied()
        assert child.copy_rows == []
        child.free()


# -- free ---------------------------------------------------------------------------------------------------------


def test_free_keeps_committed_pages_cached(pool: Any, ns: Any, counts: Any) -> None:
    seq = pool.reserve(range(10), namespace=ns, headroom_tokens=8)
    seq.commit(10)
    seq.free()
    after = counts()
    assert after["private"] == after["shadow"] == after["sequences"] == 0
    assert after["cached"] == after["evictable"] == pool.total_pages - after["free"]
    assert pool.lookup(range(10), namespace=ns).device_tokens == 8


def test_free_twice_and_use_after_free(pool: Any, ns: Any) -> None:
    seq = pool.reserve(range(10), namespace=ns)
    seq.free()
    seq.free()
    for use in (
        lambda: seq.commit(1),
        lambda: seq.extend([1]),
        lambda: seq.truncate(1),
        seq.share,
        seq.copied,
        seq.handoff,
        seq.compact,
    ):
        with pytest.raises(radixkv.StaleHandle):
            use()
    assert not seq.valid()


def test_leaving_a_with_block_frees_and_commits_nothing(pool: Any, ns: Any, counts: Any) -> None:
    with pool.reserve(range(10), namespace=ns) as seq:
        pass
    assert counts()["sequences"] == 0
    assert pool.lookup(range(10), namespace=ns).device_tokens == 0
    with pytest.raises(radixkv.StaleHandle):
        seq.commit(1)


def test_leaving_a_with_block_never_hides_the_bodys_exception(pool: Any, ns: Any, new_fence: Any, counts: Any) -> None:
    fence = new_fence()
    with pytest.raises(ZeroDivisionError), pool.reserve(range(10), namespace=ns) as seq:
        seq.commit(99, after=fence)
        fence.done = True
        pool.lookup([1], namespace=ns)
        raise ZeroDivisionError
    assert counts()["sequences"] == 0


def test_leaving_a_with_block_tells_a_deferred_error_when_nothing_else_is_wrong(
    pool: Any, ns: Any, new_fence: Any
) -> None:
    fence = new_fence()
    with pytest.raises(radixkv.BadRequest), pool.reserve(range(10), namespace=ns) as seq:
        seq.commit(99, after=fence)
        fence.done = True
        pool.lookup([1], namespace=ns)


def test_freeing_inside_a_with_block(pool: Any, ns: Any) -> None:
    with pool.reserve(range(10), namespace=ns) as seq:
        seq.free()


def test_collected_without_free(pool: Any, ns: Any, counts: Any) -> None:
    seq = pool.reserve(range(10), namespace=ns)
    with pytest.warns(ResourceWarning, match="without free"):
        del seq
        gc.collect()
    assert counts()["sequences"] == 0


# -- valid --------------------------------------------------------------------------------------------------------


def test_valid_through_a_sequences_life(seq: Any, pool: Any) -> None:
    assert seq.valid()
    seq.commit(8)
    seq.extend(headroom_tokens=8)
    assert seq.valid()
    seq.free()
    assert not seq.valid()


def test_pages_that_went_to_somebody_else_are_noticed(connect: Any, ns: Any) -> None:
    """A worker whose session has ended without its knowing can tell by one look."""
    mine = connect()
    pool = mine.pool("small")
    seq = pool.reserve(range(16), namespace=ns)
    table = seq.page_table
    mine.close()
    assert not seq.valid()
    with connect().pool("small").reserve(range(50, 66), namespace=ns) as other:
        assert set(other.page_table.tolist()) == set(table.tolist())
        assert other.valid()
    assert not seq.valid()


# -- handoff ------------------------------------------------------------------------------------------------------


def test_handoff_to_another_client(seq: Any, connect: Any, ns: Any, pool: Any) -> None:
    seq.commit(9)
    table = seq.page_table.tolist()
    ticket = seq.handoff()
    assert isinstance(ticket, bytes)
    with pytest.raises(radixkv.StaleHandle):
        seq.commit(10)
    seq.free()
    other = connect().pool("default")
    with other.adopt(ticket) as mine:
        assert mine.page_table.tolist() == table
        assert (mine.length, mine.committed_tokens, mine.writable_from_tokens) == (10, 9, 8)
        assert mine.tokens.tolist() == list(range(10))
        assert mine.valid()
        mine.extend([5], headroom_tokens=4)
        mine.commit(11)
        with pytest.raises(radixkv.StaleHandle):
            other.adopt(ticket)


def test_a_handed_off_sequence_survives_its_giver(connect: Any, ns: Any, pool: Any) -> None:
    giver = connect()
    ticket = giver.pool("default").reserve(range(10), namespace=ns).handoff(ttl=30)
    giver.close()
    with pool.adopt(ticket) as seq:
        assert seq.length == 10


def test_a_ticket_nobody_uses_in_time(seq: Any, pool: Any, counts: Any, wait_until: Any) -> None:
    ticket = seq.handoff(ttl=0.05)
    wait_until(lambda: counts()["sequences"] == 0, what="the end of the ticket's time")
    with pytest.raises(radixkv.StaleHandle):
        pool.adopt(ticket)


@pytest.mark.parametrize("ticket", [b"x" * 16, b"", b"x" * 17, "x" * 16, None])
def test_tickets_that_are_none(pool: Any, ticket: Any) -> None:
    with pytest.raises((radixkv.StaleHandle, radixkv.BadRequest)):
        pool.adopt(ticket)


def test_the_lifetime_of_a_ticket_is_seconds(seq: Any) -> None:
    with pytest.raises(radixkv.BadRequest):
        seq.handoff(ttl=-1)
    seq.commit(1)


# -- lookup, invalidate -------------------------------------------------------------------------------------------


def test_lookup_of_one_and_of_many(pool: Any, ns: Any, cache: Any) -> None:
    prompt = cache(10)
    found = pool.lookup(prompt, namespace=ns)
    assert (found.device_tokens, found.host_tokens) == (8, 0)
    assert pool.lookup(prompt[:8], namespace=ns).device_tokens == 8
    many = pool.lookup([prompt, np.array(prompt[:5]), [], [1, 2, 3, 4]], namespace=ns)
    assert [one.device_tokens for one in many] == [8, 4, 0, 0]
    assert pool.lookup([], namespace=ns).device_tokens == 0
    packed = np.array(prompt, np.uint32).tobytes()
    assert pool.lookup(packed, namespace=ns).device_tokens == 8
    assert [one.device_tokens for one in pool.lookup([packed, packed[:16]], namespace=ns)] == [8, 4]


def test_lookup_changes_nothing_not_even_recency(client: Any, ns: Any, cache: Any) -> None:
    pool = client.pool("small")
    with pool.reserve(range(8), namespace=ns) as seq:
        seq.commit(8)
    with pool.reserve(range(50, 58), namespace=ns) as seq:
        seq.commit(8)
    for _ in range(3):
        pool.lookup(range(8), namespace=ns)
    with pool.reserve(range(90, 98), namespace=ns):
        assert pool.lookup(range(8), namespace=ns).device_tokens == 0
        assert pool.lookup(range(50, 58), namespace=ns).device_tokens == 8


def test_lookup_of_what_is_no_prompt(pool: Any, ns: Any) -> None:
    for wrong in ([[1], [-1]], ["ab"], [1.5], 7, "ab"):
        with pytest.raises(radixkv.BadRequest):
            pool.lookup(wrong, namespace=ns)


def test_invalidate(pool: Any, ns: Any, cache: Any, seq: Any, counts: Any) -> None:
    cache(12)
    seq.commit(8)
    epoch = pool.invalidate(ns)
    assert pool.lookup(range(100, 112), namespace=ns).device_tokens == 0
    with pool.reserve(range(10), namespace=ns) as fresh:
        assert fresh.cached_tokens == 0
        assert seq.valid()
        fresh.commit(10)
    assert pool.invalidate(ns) == epoch + 1


def test_the_default_namespace(pool: Any) -> None:
    with pool.reserve(range(800, 808)) as seq:
        seq.commit(8)
    assert pool.lookup(range(800, 808)).device_tokens == 8
    assert pool.lookup(range(800, 808), namespace=radixkv.Namespace("")).device_tokens == 8
    pool.invalidate(radixkv.Namespace(""))


def test_parent_and_children_of_a_fork_inside_a_page_can_be_handed_off(pool, new_fence):
    """The library has copied the rows; the daemon, which hands off nothing half copied, learns of it in time."""
    parent = pool.reserve(range(6))
    parent.commit(6)
    child, other = parent.share(count=2)
    assert child.copy_rows == [] and other.copy_rows == []
    adopted = [pool.adopt(parent.handoff()), pool.adopt(child.handoff())]
    fenced = new_fence()
    ticket = other.handoff(after=fenced)
    fenced.done = True
    pool.flush(timeout=5.0)
    adopted.append(pool.adopt(ticket))
    assert [seq.committed_tokens for seq in adopted] == [6, 6, 6]
    for seq in adopted:
        seq.free()
