"""Decode attention over a page table in Triton: ``attend`` over slices of the context, ``merge`` of the slices.

One program of ``attend`` takes one batch row, one KV head (with up to BLOCK_H of the query heads that share it) and one
of ``splits`` slices of the row's tokens, and walks its slice in blocks of BLOCK_N tokens with the running softmax of
FlashAttention. A slice leaves its normalised output and the logarithm of its sum of exponentials; ``merge`` weighs the
slices by it. With one slice ``attend`` writes the result itself.

What keeps garbage out: tokens at or behind the row's length are neither loaded nor scored (a masked score alone would
not do: 0 * NaN is NaN in the value product), page-table entries behind them are not followed. What cannot be checked
without waiting for the device is made loud and harmless: a page id outside the pool or a length beyond the page table
is never dereferenced and makes the row NaN.

Interpreter (TRITON_INTERPRET=1): bfloat16 arithmetic is silently wrong there, hence WIDEN; ``and``/``or`` on blocks
are too, hence ``&``.
"""

# Device functions have no Python types, as many arguments as the hardware needs numbers, and constants in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.errors import BadRequest
from radixkv.kernels.layout import LayerPages

LOG2_E = tl.constexpr(1.4426950408889634)
HEAD_DIM_MAX = 256
SPLITS_MAX = 128
TOKENS_PER_SPLIT = 256
"""No slice is planned shorter: its start and its share of the merge would cost more than they save."""


@triton.jit(do_not_specialize=["pages", "table_width", "splits"])
def attend(
    q, k_pages, v_pages, page_table, lengths, out, lse, scale,
    q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head,
    pages, table_width, splits,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out [B, Hq, splits, HEAD_DIM] and lse [B, Hq, splits] (contiguous) of grid (B, Hkv * head blocks, splits)."""
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    row = tl.program_id(0).to(tl.int64)
    kv_head = (tl.program_id(1) // HEAD_BLOCKS).to(tl.int64)
    split = tl.program_id(2)
    in_group = (tl.program_id(1) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + in_group
    dim = tl.arange(0, BLOCK_D)
    q_ok = (in_group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(q + row * q_row + (head * q_head)[:, None] + dim[None, :], mask=q_ok, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)

    capacity = table_width * PAGE_SIZE
    # One token beyond the table is enough to make the row NaN; what a wrong length says further is not believed.
    length = tl.maximum(tl.minimum(tl.load(lengths + row), capacity + 1), 0)
    slice_tokens = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    begin = split * slice_tokens
    end = tl.minimum(begin + slice_tokens, length)

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    table = page_table + row * table_width
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        token_ok = token < end
        page = tl.load(table + token // PAGE_SIZE, mask=token_ok & (token < capacity), other=-1)
        page_ok = (page >= 0) & (page < pages)
        tile_ok = page_ok[:, None] & (dim < HEAD_DIM)[None, :]
        in_page = token % PAGE_SIZE
        k_row = page.to(tl.int64) * k_page + in_page * k_token + kv_head * k_head
        key = tl.load(k_pages + k_row[:, None] + dim[None, :], mask=tile_ok, other=0.0)
        v_row = page.to(tl.int64) * v_page + in_page * v_token + kv_head * v_head
        value = tl.load(v_pages + v_row[:, None] + dim[None, :], mask=tile_ok, other=0.0)
        if WIDEN:
            key = key.to(tl.float32)
            value = value.to(tl.float32)

        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
        score = tl.where(page_ok[None, :], score, float("nan"))
        score = tl.where(token_ok[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = new_top

    # No token at all: zeros, and a weight of nothing (lse -inf) in the merge.
    none = total == 0.0
    divisor = tl.where(none, 1.0, total)
    log_sum = tl.where(none, float("-inf"), (top + tl.log2(divisor)) / LOG2_E)
    heads = tl.num_programs(1) // HEAD_BLOCKS * GROUP
    part = (row * heads + head) * splits + split
    tl.store(lse + part, log_sum, mask=in_group < GROUP)
    result = (acc / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out + part[:, None] * HEAD_DIM + dim[None, :], result, mask=q_ok)


@triton.jit(do_not_specialize=["splits"])
def merge(
    parts, parts_lse, out, lse, splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS_MAX: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Join the slices of one (row, head): parts [B * Hq, splits, HEAD_DIM] -> out [B * Hq, HEAD_DIM]."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, SPLITS_MAX)
    logs = tl.load(parts_lse + row * splits + every, mask=every < splits, other=float("-inf"))
    top = tl.max(logs, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(logs - top), 0)
    none = total == 0.0
    divisor = tl.where(none, 1.0, total)

    dim = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, splits, CHUNK):
        part = start + tl.arange(0, CHUNK)
        part_ok = part < splits
        log = tl.load(parts_lse + row * splits + part, mask=part_ok, other=float("-inf"))
        place = (row * splits + part)[:, None] * HEAD_DIM + dim[None, :]
        tile = tl.load(parts + place, mask=part_ok[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        acc += tl.sum(tl.exp(log - top)[:, None] * tile, 0)
    tl.store(lse + row, tl.where(none, float("-inf"), top + tl.log(divisor)))
    tl.store(out + row * HEAD_DIM + dim, (acc / divisor).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


INTERPRETED = not isinstance(attend, triton.runtime.JITFunction)
"""Triton's interpreter runs these kernels, on CPU tensors (TRITON_INTERPRET was set when this was imported)."""


class Plan(NamedTuple):
    """Block sizes and warps of ``attend``. Chosen so that nothing spills on sm_90, which a test compiles and checks."""

    block_d: int
    block_h: int
    block_n: int
    warps: int
    stages: int

    @classmethod
    def of(cls, dtype: torch.dtype, head_dim: int, group: int) -> Plan:
        """``group``: query heads that share a KV head. A dot takes at least 16 of them, padded."""
        block_d = max(16, triton.next_power_of_2(head_dim))
        if dtype == torch.float32:  # no tensor cores: exact products, by more threads
            return cls(block_d, 16, 64 if block_d <= 128 else 32, 8, 3)
        return cls(block_d, 16 if group <= 16 else 32, 64, 4 if block_d <= 128 else 8, 3)


def decode_attention(
    q: Tensor, pages: LayerPages, page_table: Tensor, lengths: Tensor, scale: float, splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32). ``splits``: slices of the context; None: as the device needs.

    Launches depend on shapes alone and wait for nothing, so they can be captured in a CUDA graph.
    BadRequest: head dim over 256, or a head's elements do not lie side by side.
    """
    batch, heads, dim = q.shape
    pool, page_size, kv_heads, _ = pages.keys.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    _check(dim, pages)
    group = heads // kv_heads
    plan = Plan.of(q.dtype, dim, group)
    kv_blocks = kv_heads * triton.cdiv(group, plan.block_h)
    if splits is None:
        splits = _splits(batch * kv_blocks, page_table.shape[1] * page_size, q.device)
    out = torch.empty((batch, heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads), dtype=torch.float32, device=q.device)
    if batch == 0:
        return out, lse
    parts, parts_lse = out, lse
    if splits > 1:
        parts = torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=q.device)
        parts_lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        attend[(batch, kv_blocks, splits)](
            q, pages.keys, pages.values, page_table.contiguous(), lengths.contiguous(), parts, parts_lse, scale,
            q.stride(0), q.stride(1), *pages.keys.stride()[:3], *pages.values.stride()[:3],
            pool, page_table.shape[1], splits,
            GROUP=group, PAGE_SIZE=page_size, HEAD_DIM=dim,
            BLOCK_D=plan.block_d, BLOCK_H=plan.block_h, BLOCK_N=plan.block_n, WIDEN=INTERPRETED,
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
        if splits > 1:
            merge[(batch * heads,)](
                parts, parts_lse, out, lse, splits,
                HEAD_DIM=dim, BLOCK_D=plan.block_d, SPLITS_MAX=SPLITS_MAX, CHUNK=16, num_warps=4,
            )  # fmt: skip
    return out, lse


def _check(dim: int, pages: LayerPages) -> None:
    if dim > HEAD_DIM_MAX:
        raise BadRequest(f"the Triton kernels take head dims up to {HEAD_DIM_MAX}", head_dim=dim)
    for name, tensor in zip(pages._fields, pages, strict=True):
        if tensor.stride(3) != 1:
            raise BadRequest(f"the Triton kernels need each head of {name} in one piece", stride=tensor.stride(3))
        # Within a page 32 bits are enough and save a third of the registers; all that leads to a page has 64.
        if (tensor.shape[1] - 1) * tensor.stride(1) >= 2**31:
            raise BadRequest(f"the rows of a page of {name} lie too far apart", token_stride=tensor.stride(1))


def _splits(programs: int, capacity: int, device: torch.device) -> int:
    """Slices, so that a small batch fills the device twice over. By capacity: lengths are not known on the host."""
    if programs == 0 or device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count // programs
    return max(1, min(wanted, -(-capacity // TOKENS_PER_SPLIT), SPLITS_MAX))
