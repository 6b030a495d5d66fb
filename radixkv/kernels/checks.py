"""What the kernels accept. Each function raises BadRequest saying which argument is wrong, and returns nothing.

Shapes, dtypes, strides and devices are known on the host and are always checked. Values (lengths, page ids, slots) lie
in tensors: on a CPU they are always checked, on a CUDA device only on demand, since that waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.errors import BadRequest
from radixkv.kernels.layout import DTYPES

IMPLEMENTATIONS = ("auto", "triton", "torch")
TOKENS_MAX = 2**31 - 2**14
"""Tokens a page table may hold: positions are int32 in the kernels, with room for a block behind each slice."""


def decode_shapes(q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor) -> None:
    _pages(k_pages, v_pages)
    _tensor("q", q, 3, k_pages)
    _integers("page_table", page_table, 2, torch.int32, k_pages)
    _integers("lengths", lengths, 1, torch.int32, k_pages)
    batch, heads, dim = q.shape
    _, page_size, kv_heads, page_dim = k_pages.shape
    if dim != page_dim:
        raise BadRequest("q and the pages differ in head dim", q=dim, pages=page_dim)
    if heads == 0 or heads % kv_heads:
        raise BadRequest("query heads are not a multiple of the KV heads", query_heads=heads, kv_heads=kv_heads)
    if page_table.shape[0] != batch or lengths.shape[0] != batch:
        raise BadRequest(
            "q, page_table and lengths differ in rows",
            q=batch, page_table=page_table.shape[0], lengths=lengths.shape[0],
        )  # fmt: skip
    if page_table.shape[1] * page_size > TOKENS_MAX:
        raise BadRequest("the page table is too wide", tokens=page_table.shape[1] * page_size, max=TOKENS_MAX)


def decode_values(page_table: Tensor, lengths: Tensor, pages: int, page_size: int) -> None:
    """Lengths fit the table, and the entries they reach are pages of the pool. Entries behind are not looked at."""
    if lengths.numel() == 0:
        return
    capacity = page_table.shape[1] * page_size
    shortest, longest = (int(end) for end in torch.aminmax(lengths))
    if shortest < 0 or longest > capacity:
        bad = shortest if shortest < 0 else longest
        raise BadRequest("a length is negative or beyond the page table", length=bad, capacity_tokens=capacity)
    if longest == 0:
        return
    used = (lengths + (page_size - 1)) // page_size
    reached = torch.arange(page_table.shape[1], device=page_table.device) < used[:, None]
    ids = page_table[reached]
    low, high = (int(end) for end in torch.aminmax(ids))
    if low < 0 or high >= pages:
        raise BadRequest("a page id is not in the pool", page=low if low < 0 else high, pages=pages)


def append_shapes(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    _pages(k_pages, v_pages)
    _tensor("k", k, 3, k_pages)
    _tensor("v", v, 3, k_pages)
    _integers("slots", slots, 1, torch.int64, k_pages)
    if k.shape != v.shape or k.shape[1:] != k_pages.shape[2:]:
        raise BadRequest(
            "k and v are not [tokens, kv_heads, head_dim] of the pages",
            k=str(list(k.shape)), v=str(list(v.shape)), pages=str(list(k_pages.shape)),
        )  # fmt: skip
    if slots.shape[0] != k.shape[0]:
        raise BadRequest("slots and k differ in tokens", slots=slots.shape[0], k=k.shape[0])


def append_values(slots: Tensor, pages: int, page_size: int) -> None:
    if slots.numel() == 0:
        return
    low, high = (int(end) for end in torch.aminmax(slots))
    if low < -1 or high >= pages * page_size:
        raise BadRequest("a slot is not in the pool", slot=low if low < -1 else high, slots=pages * page_size)


def copy_shapes(pages: Tensor, rows: Tensor) -> None:
    if not 4 <= pages.dim() <= 6:
        raise BadRequest("pages are [pages, ..., page_size, kv_heads, head_dim] of 4 to 6 dimensions", dims=pages.dim())
    _tensor("pages", pages, pages.dim(), pages)
    if min(pages.shape) < 1:
        raise BadRequest("pages have an empty dimension", shape=str(list(pages.shape)))
    _integers("rows", rows, 2, torch.int32, pages)
    if rows.shape[1] != 3:
        raise BadRequest("rows are [N, 3]: source page, target page, rows", columns=rows.shape[1])


def copy_values(rows: Tensor, pages: int, page_size: int) -> None:
    if rows.numel() == 0:
        return
    lows, highs = torch.aminmax(rows, dim=0)
    low, high = lows.tolist(), highs.tolist()
    for column, bound in ((0, pages - 1), (1, pages - 1), (2, page_size)):
        if low[column] < 0 or high[column] > bound:
            name = ("source page", "target page", "row count")[column]
            bad = low[column] if low[column] < 0 else high[column]
            raise BadRequest(f"a {name} of copy_rows is out of range", value=bad, most=bound)


def _pages(k_pages: Tensor, v_pages: Tensor) -> None:
    _tensor("k_pages", k_pages, 4, k_pages)
    _tensor("v_pages", v_pages, 4, k_pages)
    if k_pages.shape != v_pages.shape or min(k_pages.shape) < 1:
        raise BadRequest(
            "k_pages and v_pages are not one shape [pages, page_size, kv_heads, head_dim]",
            k_pages=str(list(k_pages.shape)), v_pages=str(list(v_pages.shape)),
        )  # fmt: skip


def _tensor(name: str, tensor: Tensor, dims: int, like: Tensor) -> None:
    if tensor.dim() != dims:
        raise BadRequest(f"{name} has the wrong number of dimensions", dims=tensor.dim(), need=dims)
    if tensor.dtype not in DTYPES.values():
        raise BadRequest(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(DTYPES)}")
    if tensor.dtype != like.dtype:
        raise BadRequest(f"{name} and the pages differ in dtype", got=str(tensor.dtype), pages=str(like.dtype))
    _same_device(name, tensor, like)


def _integers(name: str, tensor: Tensor, dims: int, dtype: torch.dtype, like: Tensor) -> None:
    if tensor.dim() != dims or tensor.dtype != dtype:
        raise BadRequest(
            f"{name} is not a {dims}-dimensional {dtype} tensor", dims=tensor.dim(), dtype=str(tensor.dtype)
        )
    _same_device(name, tensor, like)


def _same_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise BadRequest(
            f"{name} and the pages are on different devices", got=str(tensor.device), pages=str(like.device)
        )
