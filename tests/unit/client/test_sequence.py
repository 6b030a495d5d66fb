"""What each reply makes of a sequence: the numbers, and arrays that never change."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from radixkv.commands import Shared, Truncated
from radixkv.types import PAGE_ID_BYTES


def packed(*pages: int) -> bytes:
    return np.array(pages, np.int32).tobytes()


def test_a_new_sequence(desk: Any) -> None:
    seq = desk.sequence(6, (3, 4, 5), committed_tokens=4, cached_tokens=4, writable_from_tokens=4)
    assert (seq.length, seq.committed_tokens, seq.cached_tokens, seq.writable_from_tokens) == (6, 4, 4, 4)
    assert seq.tokens.tolist() == list(range(6))
    assert seq.page_table.tolist() == [3, 4, 5]
    assert seq.page_table.dtype == np.int32
    assert seq.capacity_tokens == 12
    assert seq.copy_rows == []


def test_cached_tokens_leave_one_to_compute(desk: Any) -> None:
    assert desk.sequence(4, (0,), cached_tokens=4).cached_tokens == 3
    assert desk.sequence(0, (), cached_tokens=0).cached_tokens == 0


def test_commit_moves_numbers_and_keeps_the_page_table(desk: Any) -> None:
    seq = desk.sequence(10, (0, 1, 2))
    before = seq.page_table
    seq.committed_to(9)
    assert (seq.committed_tokens, seq.writable_from_tokens) == (9, 8)
    assert seq.page_table is before


def test_extend_makes_a_new_page_table_only_if_pages_came(desk: Any) -> None:
    seq = desk.sequence(4, (0,))
    first = seq.page_table
    seq.extended_by(b"", b"")
    assert seq.page_table is first
    seq.extended_by(np.array([7, 8], np.uint32).tobytes(), packed(5, 6))
    assert first.tolist() == [0]
    assert seq.page_table.tolist() == [0, 5, 6]
    assert (seq.length, seq.tokens.tolist()) == (6, [0, 1, 2, 3, 7, 8])


@pytest.mark.parametrize(
    ("n", "reply", "table", "writable"),
    [
        (12, Truncated(3), [0, 1, 2], 8),
        (9, Truncated(3), [0, 1, 2], 8),
        (8, Truncated(2), [0, 1], 8),
        (6, Truncated(2, packed(7), [(1, 7, 2)]), [0, 7], 4),
        (4, Truncated(1), [0], 4),
        (0, Truncated(0), [], 0),
    ],
)
def test_truncate(desk: Any, n: int, reply: Truncated, table: list[int], writable: int) -> None:
    seq = desk.sequence(12, (0, 1, 2, 3), committed_tokens=9, cached_tokens=8, writable_from_tokens=8)
    before = seq.page_table
    seq.truncated_to(n, reply, copy=False)
    assert before.tolist() == [0, 1, 2, 3]
    assert seq.page_table is not before
    assert seq.page_table.tolist() == table
    assert (seq.length, seq.committed_tokens, seq.writable_from_tokens) == (n, min(n, 9), writable)
    assert seq.tokens.tolist() == list(range(n))
    assert seq.copy_rows == reply.copy_rows


def test_truncate_keeps_rows_still_to_be_copied_while_their_target_stays(desk: Any) -> None:
    rows = {"copy_rows": [(1, 2, 3)], "copy": False}
    seq = desk.sequence(8, (0, 2, 3), **rows)
    seq.truncated_to(8, Truncated(2), copy=False)
    assert seq.copy_rows == [(1, 2, 3)]
    seq.truncated_to(4, Truncated(1), copy=False)
    assert seq.copy_rows == []


def test_rows_for_a_page_that_was_given_up_and_came_back_are_not_copied_into_it(desk: Any) -> None:
    """Page 3 is free after the truncate, and at once the new tail; what was to be copied into it would spoil it."""
    seq = desk.sequence(10, (0, 1, 3), committed_tokens=10, copy_rows=[(9, 3, 2)], copy=False)
    seq.truncated_to(6, Truncated(2, packed(3), [(1, 3, 2)]), copy=False)
    assert (seq.page_table.tolist(), seq.copy_rows) == ([0, 3], [(1, 3, 2)])


def test_children(desk: Any) -> None:
    seq = desk.sequence(10, (0, 1, 2), committed_tokens=6, writable_from_tokens=4)
    reply = Shared(6, 1, packed(8, 9), [(1, 8, 2), (1, 9, 2)])
    first, second = (seq.child(50 + i, i, reply, copy=False) for i in range(2))
    assert [first.id, second.id] == [50, 51]
    assert (first.page_table.tolist(), second.page_table.tolist()) == ([0, 8], [0, 9])
    assert (first.copy_rows, second.copy_rows) == ([(1, 8, 2)], [(1, 9, 2)])
    assert (first.length, first.committed_tokens, first.cached_tokens, first.writable_from_tokens) == (6, 6, 5, 4)
    assert first.tokens.tolist() == list(range(6))


def test_the_library_copies_where_it_can(desk: Any) -> None:
    seq = desk.sequence(8, (0, 5), copy_rows=[(1, 5, 3)])
    assert (seq.copy_rows, desk.memory.copied) == ([], [(1, 5, 3)])
    desk.memory.copies = False
    assert desk.sequence(8, (0, 6), copy_rows=[(1, 6, 3)]).copy_rows == [(1, 6, 3)]


def test_commit_and_copied_end_the_copying(desk: Any) -> None:
    seq = desk.sequence(8, (0, 5), copy_rows=[(1, 5, 3)], copy=False)
    seq.rows_copied()
    assert seq.copy_rows == []
    other = desk.sequence(8, (0, 6), copy_rows=[(1, 6, 3)], copy=False)
    other.committed_to(8)
    assert other.copy_rows == []


def test_no_array_can_be_written(desk: Any) -> None:
    seq = desk.sequence(8, (0, 1))
    seq.extended_by(b"", packed(2))
    arrays = [seq.page_table, seq.tokens]
    seq.truncated_to(6, Truncated(2, packed(7)), copy=False)
    for array in [*arrays, seq.page_table]:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_valid_compares_generations_and_the_session(desk: Any) -> None:
    seq = desk.sequence(8, (0, 1, 2))
    assert seq.intact()
    desk.memory.counts[7] += 1
    assert seq.intact()
    desk.memory.counts[1] += 1
    assert not seq.intact()
    desk.memory.counts[1] -= 1
    assert seq.intact()
    desk.memory.known = False
    assert not seq.intact()
    desk.memory.known = True
    desk.core.ended(desk.session)
    assert not seq.intact()


def test_generations_read_after_the_session_ended_are_not_trusted(desk: Any) -> None:
    desk.memory.known = False
    seq = desk.sequence(8, (0, 1))
    desk.memory.known = True
    assert not seq.intact()


def test_valid_covers_pages_that_came_later(desk: Any) -> None:
    desk.memory.counts[:] = 5
    seq = desk.sequence(4, (0,))
    desk.memory.counts[3] = 6
    seq.extended_by(b"", packed(3))
    assert seq.intact()
    desk.memory.counts[3] = 7
    assert not seq.intact()
    seq.truncated_to(4, Truncated(1), copy=False)
    assert seq.intact()
    seq.compacted_to(packed(3))
    assert seq.intact()


def test_collected_without_free_is_freed_with_the_next_message(desk: Any, good: Any) -> None:
    seq = desk.sequence(4, (0,))
    identity = seq.id
    desk.pool.held.clear()
    with pytest.warns(ResourceWarning, match="without free"):
        del seq
        gc.collect()
    desk.answer = good
    desk.ship()
    (body,) = desk.bodies
    assert [item.seq for item in body.free] == [identity]


def test_nothing_is_freed_for_a_session_that_is_over(desk: Any) -> None:
    seq = desk.sequence(4, (0,))
    desk.core.ended(desk.session)
    desk.pool.held.clear()
    del seq
    gc.collect()
    desk.connect()
    desk.ship()
    assert desk.bodies == []


def test_page_ids_are_int32() -> None:
    assert len(packed(1, 2)) == 2 * PAGE_ID_BYTES
