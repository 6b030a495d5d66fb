"""Attention in plain torch: the oracle of the Triton kernels, and what a CPU decodes with.

Arguments are as ``dispatch`` documents and has checked them. Each row gathers the pages it reaches and cuts them at its
length, so what lies elsewhere is never part of any sum. Arithmetic is float32 whatever the dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from radixkv.kernels.options import Attention, Batch
from radixkv.kernels.prefixes import SharedPrefixes
from radixkv.kernels.quantized import Pages, QuantizedPages, read

QUERY_CHUNK = 128
"""Query tokens of a row at a time: the scores of a long prefill would not fit."""


class _Piece(NamedTuple):
    """Query tokens (places in the batch's q) that attend to the tokens from ``begin`` to ``end`` of a page-table row.

    ``drafts_from``, of the one row that the query tokens are the last tokens of (or an int for each of several rows'):
    where that row's query tokens begin.
    """

    queries: slice | Tensor
    in_row: Tensor
    drafts_from: int | Tensor
    row: int
    begin: int
    end: int


def attention(batch: Batch, options: Attention, shared: SharedPrefixes | None = None) -> tuple[Tensor, Tensor]:
    """(out [N, Hq, D] in q's dtype, lse [N, Hq] float32); a query that sees nothing: zeros and -inf."""
    shape = (*batch.q.shape[:2], batch.pages.values.shape[3])
    out = torch.zeros(shape, dtype=batch.q.dtype if shared is None else torch.float32, device=batch.q.device)
    lse = torch.full(batch.q.shape[:2], float("-inf"), device=batch.q.device)
    for piece in _of_rows(batch, options) if shared is None else _of_spans(batch, options, shared):
        if piece.begin < piece.end:
            some, some_lse = _attend(batch, options, piece)
            if shared is not None:
                some, some_lse = _merged(out[piece.queries], lse[piece.queries], some, some_lse)
            out[piece.queries], lse[piece.queries] = some, some_lse
    if options.sinks is not None:
        none = lse == float("-inf")
        joined = torch.where(none, lse, torch.logaddexp(lse, options.sinks))
        out = out * torch.where(none, 0.0, (lse - joined).exp())[..., None]
        lse = joined
    return out.to(batch.q.dtype), lse


def _of_rows(batch: Batch, options: Attention) -> Iterator[_Piece]:
    """Each row by itself, its query tokens in chunks; a chunk from its first window to its last query."""
    device = batch.q.device
    starts = None if batch.starts is None else batch.starts.tolist()
    for row, length in enumerate(batch.lengths.tolist()):
        first, last = (row * batch.per_row, (row + 1) * batch.per_row) if starts is None else starts[row : row + 2]
        drafts_from = length - (last - first)
        for begin in range(first, last, QUERY_CHUNK):
            end = min(begin + QUERY_CHUNK, last)
            low = 0 if options.window is None else max(0, drafts_from + begin - first - options.window + 1)
            high = length if options.tree is not None else drafts_from + end - first
            in_row = torch.arange(begin - first, end - first, device=device)
            yield _Piece(slice(begin, end), in_row, drafts_from, row, low, high)


def _of_spans(batch: Batch, options: Attention, shared: SharedPrefixes) -> Iterator[_Piece]:
    """Each span once for all its rows."""
    lengths = batch.lengths.tolist()
    members = torch.split(shared.members, list(shared.counts))
    in_row = torch.arange(batch.per_row, device=batch.q.device)
    for rows, row, first, end in zip(members, *shared.span_table[:3, :-1].tolist(), strict=True):
        drafts_from = (batch.lengths[rows] - batch.per_row).repeat_interleave(batch.per_row)
        queries = (rows[:, None] * batch.per_row + in_row).flatten()
        high = lengths[row] if end < 0 else end
        low = first
        if options.window is not None:  # what no row of the span sees any more need not be there
            low = max(first, int(batch.lengths[rows].min()) - batch.per_row + 1 - options.window)
        yield _Piece(queries, in_row.repeat(len(rows)), drafts_from, row, low, high)


def _attend(batch: Batch, options: Attention, piece: _Piece) -> tuple[Tensor, Tensor]:
    """(out [n, Hq, D], lse [n, Hq]), both float32, of one piece."""
    kv_heads = batch.pages.keys.shape[2]
    q = batch.q[piece.queries].float()
    count, heads, dim = q.shape
    group = heads // kv_heads
    by_head = (q * options.scale).view(count, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    scores = torch.bmm(by_head, _gather(batch, piece, 0).permute(1, 2, 0))
    length = scores.shape[2]
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    view = scores.view(kv_heads, count, group, length)
    hidden, distance = _geometry(batch, options, piece)
    if options.alibi_slopes is not None:
        view -= options.alibi_slopes.view(kv_heads, 1, group, 1) * distance[:, None, :]
    if hidden is not None:
        view.masked_fill_(hidden[:, None, :], float("-inf"))
    top = scores.amax(-1, keepdim=True)
    if hidden is not None:
        top = torch.where(top == float("-inf"), 0.0, top)  # a query that sees nothing here
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (top + total.log()).view(kv_heads, count, group).transpose(0, 1).reshape(count, heads)
    if hidden is not None:
        total = torch.where(total == 0.0, 1.0, total)
    values = _gather(batch, piece, 1)  # may lie where the keys lay, which are used up
    out = torch.bmm(weights, values.permute(1, 0, 2)) / total
    return out.view(kv_heads, count, group, -1).transpose(0, 1).reshape(count, heads, -1), lse


def _geometry(batch: Batch, options: Attention, piece: _Piece) -> tuple[Tensor | None, Tensor]:
    """(which tokens each query does not see, its distance to each), [n, tokens]; None where all is seen."""
    if batch.per_row == 1 and options.plain and options.tree is None:
        return None, piece.in_row
    token = torch.arange(piece.begin, piece.end, device=batch.q.device)
    first = torch.as_tensor(piece.drafts_from, device=batch.q.device)
    position, key_position = first + piece.in_row, token
    if options.tree is None:
        hidden = token[None, :] > position[:, None]
    else:
        depth = _depth(options.tree)
        bits = options.tree[piece.queries]
        position = first + depth[piece.queries]
        own_first = int(batch.lengths[piece.row]) - batch.per_row
        drafts = depth[piece.row * batch.per_row :][: batch.per_row]
        draft = (token - own_first).clamp(0, batch.per_row - 1)
        key_position = torch.where(token < own_first, token, own_first + drafts[draft])
        behind = token[None, :] - (first if first.dim() == 0 else first[:, None])
        hidden = (behind >= 0) & (bits[:, None] >> behind.clamp(0, 31) & 1 == 0)
    distance = position[:, None] - key_position[None, :]
    if options.window is not None:
        hidden |= distance >= options.window
    return hidden, distance


def _depth(tree: Tensor) -> Tensor:
    """How far behind the first draft token each stands: draft tokens it sees, less itself."""
    return sum(((tree >> place) & 1 for place in range(8)), torch.zeros_like(tree)).clamp(min=1) - 1


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of the same queries' attention joined by their log-sum-exp."""
    joined = torch.logaddexp(lse, more_lse)
    level = torch.where(joined == float("-inf"), 0.0, joined)
    return out * (lse - level).exp()[..., None] + more * (more_lse - level).exp()[..., None], joined


def _gather(batch: Batch, piece: _Piece, kind: int) -> Tensor:
    """A piece's keys (0) or values (1), float32 [tokens, kv_heads, head_dim]; valid until this thread's next call."""
    page_size = batch.pages.keys.shape[1]
    first = piece.begin // page_size
    ids = batch.page_table[piece.row, first : -(-piece.end // page_size)]
    return _pages(batch.pages[kind], ids)[piece.begin - first * page_size : piece.end - first * page_size]


class _Scratch(threading.local):
    """Where a thread gathers pages on a CPU: one block, used again and again, as large as its longest row so far.

    Fresh memory for each layer's keys and values cost two thirds of a decode step in page faults.
    """

    block: Tensor | None = None

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        need = elements * dtype.itemsize
        if self.block is None or self.block.numel() < need:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
                self.block = torch.empty(need, dtype=torch.uint8)
        return self.block[:need].view(dtype)


_scratch = _Scratch()


def _pages(pages: Pages, ids: Tensor) -> Tensor:
    """float32 [len(ids) * page_size, kv_heads, head_dim]; on a CPU valid until this thread's next call."""
    if isinstance(pages, QuantizedPages):
        size = len(ids) * pages.shape[1:].numel()
        return read(pages, ids, _scratch.take(size, torch.float32) if pages.device.type == "cpu" else None)
    if pages.device.type != "cpu" or not pages[0].is_contiguous():
        return pages.index_select(0, ids).float().flatten(0, 1)
    flat = pages.flatten(1)  # a view: the rows of a page lie side by side
    into = _scratch.take(len(ids) * flat.shape[1], pages.dtype).view(len(ids), flat.shape[1])
    torch.index_select(flat, 0, ids, out=into)
    return into.float().view(-1, *pages.shape[2:])
