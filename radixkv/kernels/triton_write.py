"""Writing pages in Triton: ``append`` new tokens, ``copy_rows`` between pages, ``gather_pages`` and ``scatter_pages``.

Masks are comparisons of blocks alone: of a scalar truth and a block the interpreter makes no mask that it accepts.
Elements are moved as they are; only what a rotary embedding turns is computed, in float32, and rounded once.
"""

# Device functions have no Python types, as many arguments as the hardware needs numbers, and constants in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.errors import BadRequest
from radixkv.kernels.layout import LayerPages
from radixkv.kernels.options import Rotary

APPEND_BLOCK = 1024
MOVE_BLOCK = 2048
COPY_BLOCK = 512
"""Elements of a page that one program copies, for every entry in turn: small, as the programs are the parallelism."""


@triton.jit
def place_of(token, slots, pages, PAGE_SIZE: tl.constexpr):
    """(whether it is in the pool, page, row of the page) of a token's slot."""
    slot = tl.load(slots + token)
    inside = (slot >= 0) & (slot < pages.to(tl.int64) * PAGE_SIZE)
    return inside, slot // PAGE_SIZE, slot % PAGE_SIZE


@triton.jit
def angles_of(token, positions, angles, REACH: tl.constexpr):
    """(where the row of a token's angles begins, dims that would be turned and have none); 0 with no embedding."""
    row = token * 0
    unknown_dims = 0
    if positions is not None:
        position = tl.load(positions + token)
        known = (position >= 0) & (position < angles)
        row = tl.where(known, position, 0) * REACH
        unknown_dims = tl.where(known, 0, 2 * REACH)
    return row, unknown_dims


@triton.jit
def rotate(source, at, dim, ok, cos, sin, angle_row, REACH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Elements ``at`` (of head dims ``dim``) of ``source`` with the first 2 * REACH dims of their heads rotated."""
    plain = tl.load(source + at, mask=ok, other=0.0)
    turned = ok & (dim < 2 * REACH)
    if INTERLEAVED:  # dims 2 i and 2 i + 1 are a pair
        second = dim % 2 == 1
        angle = dim // 2
        partner = tl.where(second, -1, 1)
    else:  # dims i and i + REACH are
        second = dim >= REACH
        angle = tl.where(second, dim - REACH, dim)
        partner = tl.where(second, -REACH, REACH)
    other = tl.load(source + at + partner, mask=turned, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle_row + angle, mask=turned, other=1.0).to(tl.float32)
    sine = tl.load(sin + angle_row + angle, mask=turned, other=0.0).to(tl.float32)
    rotated = plain.to(tl.float32) * cosine + tl.where(second, other, -other) * sine
    return tl.where(turned, rotated.to(plain.dtype), plain)


@triton.jit
def turn_query(
    q, q_out, token, element, q_row, q_row_head, cos, sin, angle_row, unknown_dims,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, REACH: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Elements of a token's query heads, rotated, to ``q_out``."""
    dim = element % HEAD_DIM
    ok = element < HEADS * HEAD_DIM
    at = token * q_row + (element // HEAD_DIM).to(tl.int64) * q_row_head + dim
    query = rotate(q, at, dim, ok, cos, sin, angle_row, REACH, INTERLEAVED)
    query = tl.where(dim < unknown_dims, float("nan"), query.to(tl.float32)).to(query.dtype)
    tl.store(q_out + token * (HEADS * HEAD_DIM) + element, query, mask=ok)


@triton.jit(do_not_specialize=["pages", "angles"])
def append_tokens(
    k, v, k_pages, v_pages, slots, q, q_out, cos, sin, positions,
    k_row, k_row_head, v_row, v_row_head, q_row, q_row_head,
    k_page, k_token, k_head, v_page, v_token, v_head, pages, angles,
    PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    REACH: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of a token's KV_HEADS * HEAD_DIM elements and, behind them, of its query heads').

    A slot out of the pool writes nothing; a position without angles makes NaN of what it would have rotated.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    kv_blocks: tl.constexpr = (KV_HEADS * HEAD_DIM + BLOCK - 1) // BLOCK
    angle_row, unknown_dims = angles_of(token, positions, angles, REACH)
    if block < kv_blocks:
        inside, page, in_page = place_of(token, slots, pages, PAGE_SIZE)
        element = block * BLOCK + tl.arange(0, BLOCK)
        head = (element // HEAD_DIM).to(tl.int64)
        dim = element % HEAD_DIM
        ok = element < tl.where(inside, KV_HEADS * HEAD_DIM, 0)
        at = token * k_row + head * k_row_head + dim
        if cos is not None:
            key = rotate(k, at, dim, ok, cos, sin, angle_row, REACH, INTERLEAVED)
            key = tl.where(dim < unknown_dims, float("nan"), key.to(tl.float32)).to(key.dtype)
        else:
            key = tl.load(k + at, mask=ok)
        tl.store(k_pages + page * k_page + in_page * k_token + head * k_head + dim, key, mask=ok)
        value = tl.load(v + token * v_row + head * v_row_head + dim, mask=ok)
        tl.store(v_pages + page * v_page + in_page * v_token + head * v_head + dim, value, mask=ok)
    elif q is not None:
        element = (block - kv_blocks) * BLOCK + tl.arange(0, BLOCK)
        turn_query(
            q, q_out, token, element, q_row, q_row_head, cos, sin, angle_row, unknown_dims,
            HEADS, HEAD_DIM, REACH, INTERLEAVED,
        )  # fmt: skip


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
        ok = token < tl.where(legal, count, 0)
        moved = tl.load(base + source.to(tl.int64) * page_stride + place, mask=ok)
        tl.store(base + target.to(tl.int64) * page_stride + place, moved, mask=ok)
        tl.debug_barrier()  # the next entry may read what another thread of this program has just written


@triton.jit(do_not_specialize=["pages"])
def move_pages(
    arena, staging, ids, page_stride, outer_stride, inner_stride, token_stride, head_stride, pages,
    INNER: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Grid (entries, outer * INNER, blocks of [token, head, dim]): pages to their places in the staging, or back."""
    entry = tl.program_id(0).to(tl.int64)
    page = tl.load(ids + entry)
    outer = (tl.program_id(1) // INNER).to(tl.int64)
    inner = (tl.program_id(1) % INNER).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dim = element % HEAD_DIM
    head = element // HEAD_DIM % KV_HEADS
    token = element // (HEAD_DIM * KV_HEADS)
    ok = token < tl.where((page >= 0) & (page < pages), PAGE_SIZE, 0)
    base = arena + page.to(tl.int64) * page_stride + outer * outer_stride + inner * inner_stride
    at = base + token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride + dim
    place = (entry * tl.num_programs(1) + tl.program_id(1)) * (PAGE_SIZE * KV_HEADS * HEAD_DIM) + element
    if GATHER:
        tl.store(staging + place, tl.load(at, mask=ok), mask=ok)
    else:
        tl.store(at, tl.load(staging + place, mask=ok), mask=ok)


def append(
    k: Tensor, v: Tensor, pages: LayerPages, slots: Tensor, rotary: Rotary | None, q: Tensor | None
) -> Tensor | None:  # fmt: skip
    """BadRequest: the elements of a head do not lie side by side in the pages."""
    keys, values = (cast("Tensor", side) for side in pages)
    pool, page_size, kv_heads, dim = keys.shape
    _heads_in_one_piece(keys, values)
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    rotated, heads = None, 0
    if q is not None:
        q = q if q.stride(2) == 1 else q.contiguous()
        rotated, heads = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.shape[1]
    if len(slots) == 0:
        return rotated
    cos, sin, positions = (None, None, None) if rotary is None else rotary[:3]
    blocks = triton.cdiv(kv_heads * dim, APPEND_BLOCK) + triton.cdiv(heads * dim, APPEND_BLOCK)
    with torch.cuda.device_of(k):
        append_tokens[(len(slots), blocks)](
            k, v, keys, values, slots.contiguous(), q, rotated, cos, sin, positions,
            *k.stride()[:2], *v.stride()[:2], *(q.stride()[:2] if q is not None else (0, 0)),
            *keys.stride()[:3], *values.stride()[:3], pool, 0 if cos is None else len(cos),
            PAGE_SIZE=page_size, KV_HEADS=kv_heads, HEADS=heads, HEAD_DIM=dim, REACH=0 if cos is None else cos.shape[1],
            INTERLEAVED=rotary is not None and rotary.interleaved, BLOCK=APPEND_BLOCK, num_warps=4,
        )  # fmt: skip
    return rotated


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


def gather_pages(pages: Tensor, ids: Tensor, staging: Tensor) -> None:
    _move(pages, ids, staging, gather=True)


def scatter_pages(staging: Tensor, pages: Tensor, ids: Tensor) -> None:
    _move(pages, ids, staging, gather=False)


def _move(pages: Tensor, ids: Tensor, staging: Tensor, *, gather: bool) -> None:
    """BadRequest: the elements of a head do not lie side by side in the pages."""
    _heads_in_one_piece(pages)
    if len(ids) == 0:
        return
    while pages.dim() < 6:
        pages = pages.unsqueeze(1)
    pool, outer, inner, page_size, kv_heads, dim = pages.shape
    with torch.cuda.device_of(pages):
        move_pages[(len(ids), outer * inner, triton.cdiv(page_size * kv_heads * dim, MOVE_BLOCK))](
            pages, staging, ids.contiguous(), *pages.stride()[:5], pool,
            INNER=inner, PAGE_SIZE=page_size, KV_HEADS=kv_heads, HEAD_DIM=dim,
            BLOCK=MOVE_BLOCK, GATHER=gather, num_warps=4,
        )  # fmt: skip


def _heads_in_one_piece(*pages: Tensor) -> None:
    for tensor in pages:
        if tensor.stride(-1) != 1:
            raise BadRequest("the Triton kernels need each head of a page in one piece", stride=tensor.stride(-1))
