"""Quantized pages in Triton: reading codes inside attention, and quantizing what is appended.

fp8 is converted by integer arithmetic, not by Triton's own type: that one does not exist on sm_80, is emulated on
gfx942 (whose hardware has another e4m3), and Triton 3.7.1's interpreter rounds it wrongly and reads NaN as 480. These
few operations are the same numbers everywhere.

Rounding to the nearest, ties to even, is an addition: the sum with 1.5 * 2^23 has whole numbers as its last bits.
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
from radixkv.kernels.quantized import QuantizedPages
from radixkv.kernels.triton_write import APPEND_BLOCK, angles_of, place_of, rotate, turn_query

PLAIN, FP8, INT8, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FORMATS = {"fp8_e4m3": 1, "int8": 2, "int4": 3}
GROUP_DIMS = tl.constexpr(32)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23
ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def load_quantized(
    codes, scales, at, scale_at, token_ok, FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """[tokens, BLOCK_D], heads whose codes begin at ``codes + at`` and scales at ``scales + scale_at``.

    float32; of fp8, which it holds exactly, float16.
    """
    if FORMAT == INT4:
        byte = tl.arange(0, BLOCK_D // 2)
        ok = token_ok[:, None] & (byte < HEAD_DIM // 2)[None, :]
        pair = tl.load(codes + at[:, None] + byte[None, :], mask=ok, other=0x88).to(tl.int32)
        number = (tl.interleave(pair & 15, pair >> 4) - 8).to(tl.float32)
        GROUPS: tl.constexpr = (BLOCK_D + GROUP_DIMS - 1) // GROUP_DIMS
        group = tl.arange(0, GROUPS)
        ok = token_ok[:, None] & (group < (HEAD_DIM + GROUP_DIMS - 1) // GROUP_DIMS)[None, :]
        scale = tl.load(scales + scale_at[:, None] + group[None, :], mask=ok, other=0.0).to(tl.float32)
        grouped = tl.reshape(number, [number.shape[0], GROUPS, BLOCK_D // GROUPS]) * scale[:, :, None]
        number = tl.reshape(grouped, [number.shape[0], BLOCK_D])
    else:
        dim = tl.arange(0, BLOCK_D)
        ok = token_ok[:, None] & (dim < HEAD_DIM)[None, :]
        code = tl.load(codes + at[:, None] + dim[None, :], mask=ok, other=0)
        number = of_fp8(code) if FORMAT == FP8 else code.to(tl.float32)
        if FORMAT == INT8:
            number *= tl.load(scales + scale_at, mask=token_ok, other=0.0)[:, None]
    return number


@triton.jit
def of_fp8(code):
    """e4m3 to float16. Its bits, moved into those of a float16, are the number times 2^-8, subnormal ones too."""
    wide = code.to(tl.int16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half * 256.0)


@triton.jit
def nearest(number):
    """float32 within 2^22 of 0 to the nearest int32, ties to even."""
    return (number + ROUNDER).to(tl.int32, bitcast=True) - ROUNDER_BITS


@triton.jit
def to_fp8(number):
    """float32 to the bits of the nearest e4m3, in int32; beyond 448 it is 448, NaN and infinities are NaN."""
    bits = number.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(number), 448.0)
    own = size.to(tl.int32, bitcast=True)
    normal = ((own + 0x7FFFF + ((own >> 20) & 1)) >> 20) - (120 << 3)  # 20 bits less, exponent bias 7 instead of 127
    code = tl.where(size < 0.015625, nearest(size * 512.0), normal)
    code = tl.where((bits & 0x7F800000) == 0x7F800000, 0x7F, code)
    return ((bits >> 24) & 0x80) | code


@triton.jit
def store_quantized(
    number, codes, scales, head, head_ok, c_head, s_head,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Quantize float32 [BLOCK_H, BLOCK_D], zeros behind HEAD_DIM, into one token's rows at ``codes`` and ``scales``."""
    at = codes + head[:, None] * c_head
    dim = tl.arange(0, BLOCK_D)
    if FORMAT == FP8:
        ok = head_ok[:, None] & (dim < HEAD_DIM)[None, :]
        tl.store(at + dim[None, :], to_fp8(number).to(tl.uint8), mask=ok)
    else:
        GROUPS: tl.constexpr = (BLOCK_D + GROUP_DIMS - 1) // GROUP_DIMS if FORMAT == INT4 else 1
        USED: tl.constexpr = (HEAD_DIM + GROUP_DIMS - 1) // GROUP_DIMS if FORMAT == INT4 else 1
        grouped = tl.reshape(number, [BLOCK_H, GROUPS, BLOCK_D // GROUPS])
        damaged = tl.max(grouped.to(tl.int32, bitcast=True) & 0x7F800000, 2) == 0x7F800000  # by NaN or infinity
        grouped = tl.where(damaged[:, :, None], 0.0, grouped)
        if FORMAT == INT8:
            scale = tl.math.div_rn(tl.max(tl.abs(grouped), 2), tl.full([BLOCK_H, GROUPS], 127.0, tl.float32))
            scale = tl.where(damaged, float("nan"), scale)
        else:
            high, low = tl.max(grouped, 2), tl.min(grouped, 2)
            scale = tl.where(high > -low, high, low) * -0.125 + 0.0  # no -0
            scale = tl.where(damaged, float("nan"), scale).to(tl.float16)
        group = tl.arange(0, GROUPS)
        ok = head_ok[:, None] & (group < USED)[None, :]
        tl.store(scales + head[:, None] * s_head + group[None, :], scale, mask=ok)
        scale = scale.to(tl.float32)
        usable = (tl.abs(scale) < float("inf")) & (scale != 0.0)
        divisor = tl.broadcast_to(tl.where(usable, scale, 1.0)[:, :, None], grouped.shape)
        steps = nearest(tl.math.div_rn(tl.where(usable[:, :, None], grouped, 0.0), divisor))
        steps = tl.reshape(steps, [BLOCK_H, BLOCK_D])
        if FORMAT == INT8:
            ok = head_ok[:, None] & (dim < HEAD_DIM)[None, :]
            tl.store(at + dim[None, :], tl.minimum(tl.maximum(steps, -127), 127).to(tl.int8), mask=ok)
        else:
            nibbles = tl.minimum(tl.maximum(steps, -8), 7) + 8
            even, odd = tl.split(tl.reshape(nibbles, [BLOCK_H, BLOCK_D // 2, 2]))
            byte = tl.arange(0, BLOCK_D // 2)
            ok = head_ok[:, None] & (byte < HEAD_DIM // 2)[None, :]
            tl.store(at + byte[None, :], (even | (odd << 4)).to(tl.uint8), mask=ok)


@triton.jit(do_not_specialize=["pages", "angles"])
def append_quantized(
    k, v, k_pages, v_pages, k_scales, v_scales, slots, q, q_out, cos, sin, positions,
    k_row, k_row_head, v_row, v_row_head, q_row, q_row_head,
    k_page, k_token, k_head, v_page, v_token, v_head,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head, pages, angles,
    FORMAT: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    REACH: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """As ``append_tokens``, but a program takes whole heads, BLOCK_H of them, since they share scales."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    kv_blocks: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    angle_row, unknown_dims = angles_of(token, positions, angles, REACH)
    if block < kv_blocks:
        inside, page, in_page = place_of(token, slots, pages, PAGE_SIZE)
        head = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        head_ok = head < tl.where(inside, KV_HEADS, 0)
        dim = tl.arange(0, BLOCK_D)[None, :] + tl.zeros([BLOCK_H, 1], tl.int32)
        ok = head_ok[:, None] & (dim < HEAD_DIM)
        at = token * k_row + head[:, None] * k_row_head + dim
        if cos is not None:
            key = rotate(k, at, dim, ok, cos, sin, angle_row, REACH, INTERLEAVED).to(tl.float32)
            key = tl.where(ok & (dim < unknown_dims), float("nan"), key)
        else:
            key = tl.load(k + at, mask=ok, other=0.0).to(tl.float32)
        codes, scales = k_pages + page * k_page + in_page * k_token, None
        if k_scales is not None:
            scales = k_scales + page * ks_page + in_page * ks_token
        store_quantized(key, codes, scales, head, head_ok, k_head, ks_head, FORMAT, HEAD_DIM, BLOCK_H, BLOCK_D)
        value = tl.load(v + token * v_row + head[:, None] * v_row_head + dim, mask=ok, other=0.0).to(tl.float32)
        codes = v_pages + page * v_page + in_page * v_token
        if v_scales is not None:
            scales = v_scales + page * vs_page + in_page * vs_token
        store_quantized(value, codes, scales, head, head_ok, v_head, vs_head, FORMAT, HEAD_DIM, BLOCK_H, BLOCK_D)
    elif q is not None:
        element = (block - kv_blocks) * BLOCK + tl.arange(0, BLOCK)
        turn_query(
            q, q_out, token, element, q_row, q_row_head, cos, sin, angle_row, unknown_dims,
            HEADS, HEAD_DIM, REACH, INTERLEAVED,
        )  # fmt: skip


def raw(pages: QuantizedPages) -> tuple[Tensor, Tensor | None]:
    """Codes as kernels take them, fp8 as bytes, and scales. BadRequest: those of a head do not lie side by side."""
    for tensor in (pages.codes, pages.scales):
        if tensor is not None and tensor.stride(-1) != 1:
            raise BadRequest("the Triton kernels need each head of a page in one piece", stride=tensor.stride(-1))
    codes = pages.codes.view(torch.uint8) if pages.codes.dtype == torch.float8_e4m3fn else pages.codes
    return codes, pages.scales


def strides(tensor: Tensor | None) -> tuple[int | None, ...]:
    """[page, token, head]; where there are no scales no numbers either, which a kernel then does not take."""
    return (None, None, None) if tensor is None else tensor.stride()[:3]


def append(
    k: Tensor, v: Tensor, pages: LayerPages, slots: Tensor, rotary: Rotary | None, q: Tensor | None
) -> Tensor | None:  # fmt: skip
    """As ``triton_write.append``, into quantized pages."""
    sides = [cast("QuantizedPages", side) for side in pages]
    keys, values = map(raw, sides)
    pool, page_size, kv_heads, dim = pages.keys.shape
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    rotated, heads = None, 0
    if q is not None:
        q = q if q.stride(2) == 1 else q.contiguous()
        rotated, heads = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.shape[1]
    if len(slots) == 0:
        return rotated
    cos, sin, positions = (None, None, None) if rotary is None else rotary[:3]
    block_d = max(16, triton.next_power_of_2(dim))
    block_h = max(1, min(APPEND_BLOCK // block_d, triton.next_power_of_2(kv_heads)))
    blocks = triton.cdiv(kv_heads, block_h) + triton.cdiv(heads * dim, APPEND_BLOCK)
    with torch.cuda.device_of(k):
        append_quantized[(len(slots), blocks)](
            k, v, keys[0], values[0], keys[1], values[1], slots.contiguous(), q, rotated, cos, sin, positions,
            *k.stride()[:2], *v.stride()[:2], *(q.stride()[:2] if q is not None else (0, 0)),
            *strides(keys[0]), *strides(values[0]), *strides(keys[1]), *strides(values[1]),
            pool, 0 if cos is None else len(cos), FORMAT=FORMATS[sides[0].dtype], PAGE_SIZE=page_size,
            KV_HEADS=kv_heads, HEADS=heads, HEAD_DIM=dim, REACH=0 if cos is None else cos.shape[1],
            INTERLEAVED=rotary is not None and rotary.interleaved, BLOCK=APPEND_BLOCK, BLOCK_H=block_h,
            BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
    return rotated
