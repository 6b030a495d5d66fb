"""Writing pages in Triton: ``append`` new tokens, ``copy_rows`` between pages."""

# Device functions have no Python types, as many arguments as the hardware needs numbers, and constants in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.errors import BadRequest

APPEND_BLOCK = 1024
COPY_BLOCK = 256
"""Elements of a page that one program copies, for every entry in turn: small, as the programs are the parallelism."""


@triton.jit(do_not_specialize=["pages"])
def append_tokens(
    k, v, k_pages, v_pages, slots, k_row, k_row_head, v_row, v_row_head,
    k_page, k_token, k_head, v_page, v_token, v_head, pages,
    PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of a token's KV_HEADS * HEAD_DIM elements). A slot out of the pool writes nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    inside = (slot >= 0) & (slot < pages.to(tl.int64) * PAGE_SIZE)
    page = slot // PAGE_SIZE
    in_page = slot % PAGE_SIZE
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = (element // HEAD_DIM).to(tl.int64)
    dim = element % HEAD_DIM
    ok = (element < KV_HEADS * HEAD_DIM) & inside
    key = tl.load(k + token * k_row + head * k_row_head + dim, mask=ok)
    tl.store(k_pages + page * k_page + in_page * k_token + head * k_head + dim, key, mask=ok)
    value = tl.load(v + token * v_row + head * v_row_head + dim, mask=ok)
    tl.store(v_pages + page * v_page + in_page * v_token + head * v_head + dim, value, mask=ok)


@triton.jit(do_not_specialize=["entries", "pages"])
def copy_page_rows(
    arena, rows, page_stride, outer_stride, inner_stride, token_stride, head_stride, entries, pages,
    PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (outer, inner, blocks of a page's [token, head, dim]). Each program does all entries, one after the other.

    An element of a target comes from the same place in its source, so the program that owns the place needs no other
    program to keep the entries' order.
    """
    base = arena + tl.program_id(0).to(tl.int64) * outer_stride + tl.program_id(1).to(tl.int64) * inner_stride
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dim = element % HEAD_DIM
    head = element // HEAD_DIM % KV_HEADS
    token = element // (HEAD_DIM * KV_HEADS)
    place = token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride + dim
    for entry in range(entries):
        source = tl.load(rows + entry * 3)
        target = tl.load(rows + entry * 3 + 1)
        count = tl.load(rows + entry * 3 + 2)
        legal = (source >= 0) & (source < pages) & (target >= 0) & (target < pages) & (count <= PAGE_SIZE)
        ok = (token < count) & legal
        moved = tl.load(base + source.to(tl.int64) * page_stride + place, mask=ok)
        tl.store(base + target.to(tl.int64) * page_stride + place, moved, mask=ok)
        tl.debug_barrier()  # the next entry may read what another thread of this program has just written


def append(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """BadRequest: the elements of a head do not lie side by side in the pages."""
    pool, page_size, kv_heads, dim = k_pages.shape
    _heads_in_one_piece(k_pages, v_pages)
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    if len(slots) == 0:
        return
    with torch.cuda.device_of(k_pages):
        append_tokens[(len(slots), triton.cdiv(kv_heads * dim, APPEND_BLOCK))](
            k, v, k_pages, v_pages, slots.contiguous(), *k.stride()[:2], *v.stride()[:2],
            *k_pages.stride()[:3], *v_pages.stride()[:3], pool,
            PAGE_SIZE=page_size, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK=APPEND_BLOCK, num_warps=4,
        )  # fmt: skip


def copy_rows(pages: Tensor, rows: Tensor) -> None:
    """BadRequest: the elements of a head do not lie side by side in the pages."""
    _heads_in_one_piece(pages)
    if len(rows) == 0:
        return
    while pages.dim() < 6:
        pages = pages.unsqueeze(1)
    pool, outer, inner, page_size, kv_heads, dim = pages.shape
    with torch.cuda.device_of(pages):
        copy_page_rows[(outer, inner, triton.cdiv(page_size * kv_heads * dim, COPY_BLOCK))](
            pages, rows.contiguous(), *pages.stride()[:5], len(rows), pool,
            PAGE_SIZE=page_size, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK=COPY_BLOCK, num_warps=2, num_stages=1,
        )  # fmt: skip


def _heads_in_one_piece(*pages: Tensor) -> None:
    for tensor in pages:
        if tensor.stride(-1) != 1:
            raise BadRequest("the Triton kernels need each head of a page in one piece", stride=tensor.stride(-1))
