"""All kernels in plain torch: the oracle of the Triton kernels, and what a CPU decodes with.

Arguments are as ``dispatch`` documents and has checked them. No masks anywhere: each row gathers the pages it reaches
and cuts them at its length, so what lies elsewhere is never part of any sum. Arithmetic is float32 whatever the dtype.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from radixkv.kernels.layout import LayerPages


def decode_attention(
    q: Tensor, pages: LayerPages, page_table: Tensor, lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32); a row of length 0: zeros and -inf. One loop turn a row."""
    batch, heads, dim = q.shape
    _, page_size, kv_heads, _ = pages.keys.shape
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full((batch, heads), float("-inf"), dtype=torch.float32)
    queries = (q.float() * scale).view(batch, kv_heads, heads // kv_heads, dim)
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        ids = page_table[row, : -(-length // page_size)]
        keys = _gather(pages.keys, ids)[:length]
        scores = torch.bmm(queries[row], keys.permute(1, 2, 0))
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        lse[row] = (top + total.log()).view(heads)
        values = _gather(pages.values, ids)[:length]  # may lie where the keys lay, which are used up
        out[row] = (torch.bmm(weights, values.permute(1, 0, 2)) / total).view(heads, dim)
    return out, lse


def append(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    page_size = k_pages.shape[1]
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    place = (slots // page_size, slots % page_size)
    k_pages.index_put_(place, k)
    v_pages.index_put_(place, v)


def copy_rows(pages: Tensor, rows: Tensor) -> None:
    for source, target, count in rows.tolist():
        pages[target, ..., :count, :, :] = pages[source, ..., :count, :, :]


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


def _gather(pages: Tensor, ids: Tensor) -> Tensor:
    """float32 [len(ids) * page_size, kv_heads, head_dim]; on a CPU valid until this thread's next call."""
    if pages.device.type != "cpu" or not pages[0].is_contiguous():
        return pages.index_select(0, ids).float().flatten(0, 1)
    flat = pages.flatten(1)  # a view: the rows of a page lie side by side
    into = _scratch.take(len(ids) * flat.shape[1], pages.dtype).view(len(ids), flat.shape[1])
    torch.index_select(flat, 0, ids, out=into)
    return into.float().view(-1, *pages.shape[2:])
