"""Which rows read which pages together: spans cover each row once, and a shared page is in one span."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import BadRequest
from radixkv.kernels import SharedPrefixes, group_prefixes

QUICK = settings(deadline=None, derandomize=True, max_examples=200, database=None)


def spans_of(prefixes: SharedPrefixes) -> list[tuple[int, int, list[int]]]:
    """(first token, end, rows) of each span."""
    _, begins, ends, starts = prefixes.span_table.tolist()
    members = prefixes.members.tolist()
    return [
        (begins[span], ends[span], members[starts[span] : starts[span + 1]]) for span in range(len(prefixes.counts))
    ]


def made(rows: list[list[int]], lengths: list[int], page_size: int = 4, **more: int) -> SharedPrefixes:
    width = max((len(row) for row in rows), default=0) + 1
    table = torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32).view(len(rows), width)
    return group_prefixes(table, torch.tensor(lengths, dtype=torch.int32), page_size, **more)


def test_the_drawing_of_the_module() -> None:
    rows = [[7, 3, 9, 1], [7, 3, 9, 4], [7, 3, 5], [2, 6]]
    prefixes = made(rows, [15, 16, 9, 8])
    assert spans_of(prefixes) == [
        (0, 8, [0, 1, 2]),
        (8, 12, [0, 1]),
        (12, -1, [0]),
        (12, -1, [1]),
        (8, -1, [2]),
        (0, -1, [3]),
    ]
    assert prefixes.shared_spans == 2
    assert prefixes.counts == (3, 2, 1, 1, 1, 1)


def test_only_pages_that_all_query_tokens_see_are_shared() -> None:
    rows = [[7, 3, 9], [7, 3, 9]]
    assert spans_of(made(rows, [12, 12]))[0] == (0, 12, [0, 1])
    assert spans_of(made(rows, [11, 12]))[0] == (0, 8, [0, 1])
    assert spans_of(made(rows, [12, 12], queries=2))[0] == (0, 8, [0, 1])
    assert spans_of(made(rows, [3, 12])) == [(0, -1, [0]), (0, -1, [1])]


def test_tokens_before_every_window_are_left_out() -> None:
    rows = [[7, 3, 9, 1], [7, 3, 9, 2]]
    assert spans_of(made(rows, [14, 16], window=6)) == [(8, 12, [0, 1]), (12, -1, [0]), (12, -1, [1])]
    assert spans_of(made(rows, [14, 16], window=1)) == [(12, -1, [0]), (12, -1, [1])]


tables = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=6, max_size=6), st.integers(0, 24)), max_size=7)


@QUICK
@given(rows=tables, queries=st.integers(1, 8))
def test_spans_cover_each_row_and_share_all_that_can_be(rows: list[tuple[list[int], int]], queries: int) -> None:
    table = [[page + 10 * place for place, page in enumerate(row)] for row, _ in rows]
    lengths = [length for _, length in rows]
    prefixes = made(table, lengths, queries=queries)
    seen: dict[int, list[tuple[int, int]]] = {row: [] for row in range(len(rows))}
    read: dict[tuple[int, ...], int] = {}
    for begin, end, members in spans_of(prefixes):
        assert (end == -1) == (len(members) == 1)
        for row in members:
            seen[row].append((begin, lengths[row] if end < 0 else end))
        stop = lengths[members[0]] // 4 if end < 0 else end // 4
        for place in range(begin // 4, stop):
            for row in members:
                assert table[row][: place + 1] == table[members[0]][: place + 1]
            read[tuple(table[members[0]][: place + 1])] = read.get(tuple(table[members[0]][: place + 1]), 0) + 1
    for row, pieces in seen.items():
        pieces.sort()
        assert pieces[0][0] == 0
        assert pieces[-1][1] == lengths[row]
        assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))
        links = range(int(prefixes.chain_starts[row]), int(prefixes.chain_starts[row + 1]))
        for link in links:
            span, member = int(prefixes.chain_spans[link]), int(prefixes.chain_members[link])
            assert spans_of(prefixes)[span][2][member] == row
        assert len(links) == len(pieces)
    if queries == 1:
        assert all(count == 1 for count in read.values()), "a prefix that several rows have is read more than once"


def test_what_cannot_be_grouped_is_refused() -> None:
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([4, 12], dtype=torch.int32)
    group_prefixes(table, lengths, 4)
    for bad, says in (
        ((table[0], lengths, 4), "page_table is not"),
        ((table, lengths[:1], 4), "page_table is not"),
        ((table, lengths + 1, 4), "beyond the page table"),
        ((table, lengths - 5, 4), "length is negative"),
    ):
        with pytest.raises(BadRequest, match=says):
            group_prefixes(*bad)
    for more, says in (({"queries": 9}, "query tokens"), ({"queries": 0}, "query tokens"), ({"window": 0}, "window")):
        with pytest.raises(BadRequest, match=says):
            group_prefixes(table, lengths, 4, **more)
