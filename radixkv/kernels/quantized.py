"""Quantized pages in plain torch: what their bytes mean, and the oracle of ``triton_quantized``.

=========  ==============================  ====================================================  =================
dtype      a number x is kept as           scale                                                 |x - kept| at most
=========  ==============================  ====================================================  =================
fp8_e4m3   the nearest of its 253 values   none; beyond 448 it is 448                            |x| / 16, or 2^-10
int8       round(x / scale), -127 to 127   max |x| / 127 of a token's head, float32               scale / 2
int4       round(x / scale), -8 to 7       the number of largest size / -8 of 32, float16         |scale|
=========  ==============================  ====================================================  =================

int8 is the idea of llama.cpp's Q8_0 with one group a head, int4 its Q4_0: the largest number of a group is met exactly,
only numbers of the other sign near it are cut off, at 7 steps instead of 8; all others are within half a step. A group
with a NaN or an infinity in it reads as NaN, as a single number does with fp8: damage stays as loud as in plain pages.

A token's keys (or values) in one layer are a row of bytes: all heads' codes, then all heads' scales. So whoever moves
rows, pages or the whole arena knows nothing of scales. A byte of int4 has dims 2 i (low) and 2 i + 1, each plus 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from radixkv.config import QUANTIZED

CODES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
"""The torch dtype of each quantized dtype's codes, by which it is told."""
SCALES = {torch.float8_e4m3fn: torch.float32, torch.int8: torch.float32, torch.uint8: torch.float16}
"""And of its scales, if it has any."""
NAMES = {codes: name for name, codes in CODES.items()}
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class QuantizedPages:
    """One layer's keys, or values: strided views of the arena, like the tensors of plain pages.

    codes [pages, page_size, kv_heads, code bytes of a head], scales [pages, page_size, kv_heads, groups] or None.
    """

    codes: Tensor
    scales: Tensor | None = None

    @property
    def dtype(self) -> str:
        """The name in the KV spec, or torch's where it is none of those."""
        return NAMES.get(self.codes.dtype, str(self.codes.dtype))

    @property
    def shape(self) -> torch.Size:
        """As of plain pages: [pages, page_size, kv_heads, head_dim]."""
        *outer, width = self.codes.shape
        return torch.Size([*outer, 2 * width if self.codes.dtype == torch.uint8 else width])

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        return self.codes.is_cuda

    def data_ptr(self) -> int:
        return self.codes.data_ptr()


Pages: TypeAlias = Tensor | QuantizedPages
"""One layer's keys, or values: [pages, page_size, kv_heads, head_dim], or the same quantized."""


def quantize(x: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """(codes, scales) of heads [..., D] of any float dtype, as ``QuantizedPages`` has them; computed in float32."""
    numbers = x.float()
    if dtype == "fp8_e4m3":
        kept = torch.where(numbers.isfinite(), numbers.clamp(-FP8_MAX, FP8_MAX), torch.nan)
        return kept.to(torch.float8_e4m3fn), None
    dims, count = x.shape[-1], QUANTIZED[dtype].scales(x.shape[-1])
    width = min(QUANTIZED[dtype].group, dims)
    groups = torch.nn.functional.pad(numbers, (0, count * width - dims)).view(*x.shape[:-1], count, width)
    if dtype == "int8":
        scales = groups.abs().amax(-1) / 127
    else:
        low, high = groups.aminmax(dim=-1)
        scales = torch.where(high > -low, high, low) / -8 + 0.0  # no -0
    damaged = groups.isfinite().logical_not().any(-1)
    scales = torch.where(damaged, torch.nan, scales).to(SCALES[CODES[dtype]])
    usable = scales.isfinite() & (scales != 0)
    steps = groups / torch.where(usable, scales.float(), 1.0)[..., None]
    steps = torch.where(usable[..., None], steps.round(), 0.0).flatten(-2)[..., :dims]
    if dtype == "int8":
        return steps.clamp(-127, 127).to(torch.int8), scales
    nibbles = (steps.clamp(-8, 7) + 8).to(torch.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, scales


def dequantize(codes: Tensor, scales: Tensor | None, out: Tensor | None = None) -> Tensor:
    """float32 [..., D] of codes and scales as ``quantize`` gives them, in ``out`` if it is given."""
    if out is None:
        dims = codes.shape[-1] * (2 if codes.dtype == torch.uint8 else 1)
        out = torch.empty((*codes.shape[:-1], dims), dtype=torch.float32, device=codes.device)
    if scales is None:
        return out.copy_(codes)
    if codes.dtype == torch.int8:
        return torch.mul(codes, scales, out=out)
    pairs = out.view(*codes.shape, 2)
    pairs[..., 0], pairs[..., 1] = codes & 15, codes >> 4
    return out.sub_(8).mul_(scales.float().repeat_interleave(QUANTIZED["int4"].group, -1)[..., : out.shape[-1]])


def write(pages: QuantizedPages, place: tuple[Tensor, Tensor], x: Tensor) -> None:
    """Heads x [T, Hkv, D] to (pages [T], rows [T])."""
    codes, scales = quantize(x, pages.dtype)
    as_bytes(pages.codes).index_put_(place, as_bytes(codes))
    if pages.scales is not None and scales is not None:
        pages.scales.index_put_(place, scales)


def read(pages: QuantizedPages, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """float32 [len(ids) * page_size, Hkv, D]: all tokens of some pages, in ``out`` if it is given."""
    codes = as_bytes(pages.codes).index_select(0, ids).view(pages.codes.dtype)
    scales = None if pages.scales is None else pages.scales.index_select(0, ids)
    into = None if out is None else out.view(*codes.shape[:3], -1)
    return dequantize(codes, scales, into).flatten(0, 1)


def as_bytes(codes: Tensor) -> Tensor:
    """For what does nothing but move: torch moves no fp8 on a CPU."""
    return codes.view(torch.uint8)
