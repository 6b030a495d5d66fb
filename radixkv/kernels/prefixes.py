"""Which rows of a batch read the same pages: ``group_prefixes`` makes the groups that shared-prefix decode reads once.

::

    page table            spans
    row 0:  7 3 9 1       [7 3] of rows 0, 1, 2    one level
    row 1:  7 3 9 4       [9]   of rows 0, 1       a level below
    row 2:  7 3 5         the rest of each row: 1; 4; 5
    row 3:  2 6           2 6

A span is a run of tokens that the same rows attend to; a row's spans follow one another, from its first token to its
length. The idea is cascade inference (FlashInfer) and Hydragen, for any number of levels, as a radix tree has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.errors import BadRequest
from radixkv.kernels import arguments
from radixkv.kernels.options import QUERIES_MAX


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """The spans of a batch, those with most rows first. Stays right while the rows only grow: a span that ends with a
    row (end -1) follows its length. Make it anew when a row comes or goes, is truncated into shared pages, or gives up
    entries before its window that other rows of its group still see.

    span_table [4, spans + 1] int32: the row whose page-table entries are read, first token, end, place of the first
    member in ``members``. A row's spans are ``chain_spans`` between two of ``chain_starts``, and it is the
    ``chain_members``-th member of each. ``counts``: members of each span, on the host.
    """

    span_table: Tensor
    members: Tensor
    chain_starts: Tensor
    chain_spans: Tensor
    chain_members: Tensor
    counts: tuple[int, ...]
    rows: int
    per_row: int
    page_size: int
    window: int | None

    @property
    def shared_spans(self) -> int:
        return sum(count > 1 for count in self.counts)


@dataclass(slots=True)
class _Span:
    begin: int
    end: int
    rows: list[int]


def group_prefixes(
    page_table: Tensor, lengths: Tensor, page_size: int, *,
    queries: int = 1, window: int | None = None, device: torch.device | str | None = None,
) -> SharedPrefixes:  # fmt: skip
    """The groups of a batch, from its page table [B, M] and lengths [B], best on the CPU: it reads them.

    Two rows share a page if it is the same, all before it are, and each row's ``queries`` query tokens see all of it
    (of several none may be in it: a tree could hide it from the others). ``window``: that of the attention; tokens
    before everybody's window are left out. ``device``: where the kernels run, the page table's by default. Takes a few
    operations for each group, so make it when rows come and go, not at every token.

    BadRequest: shapes that do not fit, a negative length or one beyond the page table, queries not in 1..8.
    """
    arguments.tensors(page_table=page_table, lengths=lengths)
    for name, number in (("page_size", page_size), ("window", 1 if window is None else window)):
        if arguments.whole(name, number) < 1:
            raise BadRequest(f"{name} is not at least 1", got=number)
    if page_table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise BadRequest("not torch.int32", page_table=str(page_table.dtype), lengths=str(lengths.dtype))
    if page_table.dim() != 2 or lengths.dim() != 1 or len(page_table) != len(lengths):
        raise BadRequest(
            "page_table is not [rows, pages] or lengths not [rows]",
            page_table=str(list(page_table.shape)), lengths=str(list(lengths.shape)),
        )  # fmt: skip
    if not 1 <= arguments.whole("queries", queries) <= QUERIES_MAX:
        raise BadRequest("query tokens a row are out of range", queries=queries, most=QUERIES_MAX)
    table, tokens = page_table.cpu(), lengths.tolist()
    if tokens and (min(tokens) < 0 or max(tokens) > table.shape[1] * page_size):
        raise BadRequest("a length is negative or beyond the page table", capacity_tokens=table.shape[1] * page_size)
    whole = [max(0, length - (queries if queries > 1 else 0)) // page_size for length in tokens]
    spans = [_Span(begin * page_size, end * page_size, rows) for begin, end, rows in _common_runs(table, whole)]
    covered = [0] * len(tokens)
    for span in spans:
        for row in span.rows:
            covered[row] = max(covered[row], span.end)
    if window is not None:
        for span in spans:
            span.begin = min(max(span.begin, min(tokens[row] for row in span.rows) - queries + 1 - window), span.end)
        spans = [span for span in spans if span.begin < span.end]
    spans.sort(key=lambda span: -len(span.rows))
    spans += [_Span(begin, -1, [row]) for row, begin in enumerate(covered)]
    place = page_table.device if device is None else torch.device(device)
    counts = tuple(len(span.rows) for span in spans)
    first, second, third, fourth, fifth = (
        torch.tensor(numbers, dtype=torch.int32).to(place) for numbers in _tables(spans, len(tokens))
    )
    return SharedPrefixes(
        first, second, third, fourth, fifth,
        counts=counts, rows=len(tokens), per_row=queries, page_size=page_size, window=window,
    )  # fmt: skip


def _common_runs(table: Tensor, whole: list[int]) -> list[tuple[int, int, list[int]]]:
    """(first page, end, rows) of every run of pages that two or more rows share, row b up to page ``whole[b]``.

    Rows that agree so far are a set; it loses those that end, and falls apart by the page that follows its run.
    """
    runs: list[tuple[int, int, list[int]]] = []
    sets = [(list(range(len(whole))), 0)]
    while sets:
        rows, begin = sets.pop()
        rows = [row for row in rows if whole[row] > begin]
        if len(rows) < 2:
            continue
        limit = min(whole[row] for row in rows)
        ids = table[rows, begin:limit]
        differ = (ids != ids[0]).any(0).nonzero()
        end = begin + int(differ[0]) if len(differ) else limit
        if end > begin:
            runs.append((begin, end, rows))
        by_page: dict[int, list[int]] = {}
        going_on = [row for row in rows if whole[row] > end]
        for row, page in zip(going_on, table[going_on, end].tolist(), strict=True) if going_on else ():
            by_page.setdefault(page, []).append(row)
        sets += [(some, end) for some in by_page.values()]
    return runs


def _tables(spans: list[_Span], rows: int) -> tuple[list[list[int]], list[int], list[int], list[int], list[int]]:
    """The first five fields of SharedPrefixes as lists."""
    chains: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    starts, chain_starts = [0], [0]
    for number, span in enumerate(spans):
        starts.append(starts[-1] + len(span.rows))
        for member, row in enumerate(span.rows):
            chains[row].append((number, member))
    for chain in chains:
        chain_starts.append(chain_starts[-1] + len(chain))
    columns = ([span.rows[0] for span in spans], [span.begin for span in spans], [span.end for span in spans])
    return (
        [[*column, 0] for column in columns] + [starts],
        [row for span in spans for row in span.rows],
        chain_starts,
        [number for chain in chains for number, _ in chain],
        [member for chain in chains for _, member in chain],
    )
