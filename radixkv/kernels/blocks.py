"""Block sizes of ``attend``: as large as registers allow, so that nothing spills (``bench.kernels_report``).

Larger blocks of query rows mean that keys and values are read fewer times: once for up to ``m`` query rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

ON_CPU = "sm_90"
"""What CPU tensors stand for, in the interpreter and when compiling ahead of time."""


class Blocks(NamedTuple):
    """Elements of a head (``d``, padded), query rows, tokens; warps and pipeline stages."""

    d: int
    m: int
    n: int
    warps: int
    stages: int

    @classmethod
    def of(
        cls, arch: str, dtype: torch.dtype, head_dim: int, query_rows: int, *, plain: bool = False, quantized: str = ""
    ) -> Blocks:  # fmt: skip
        """``query_rows`` of a span that share a KV head; a dot takes at least 16 of them, padded. ``plain``: every
        query row sees every token, and no option changes a score, which leaves registers for larger blocks.
        ``quantized``: what the pages hold instead of ``dtype``; to unpack codes takes registers, or more threads.
        """
        d = max(16, triton.next_power_of_2(head_dim))
        m = max(16, triton.next_power_of_2(query_rows))
        if d > 256:
            return _latent(arch, d, m, dtype)
        if arch.startswith("gfx"):
            return _amd_quantized(d, m, dtype, (quantized, plain)) if quantized else _amd(d, m, dtype)
        if dtype == torch.float32:
            return _exact(d, m)
        roomy = arch == "sm_90"
        if m <= 32:
            return cls(d, m, 64, 4, 3) if d <= 128 and not quantized else cls(d, m, 64, 8, 2)
        if m >= 256 and plain and roomy and d <= 128 and not quantized:
            return cls(d, 256, 64, 8, 3) if d <= 64 else cls(d, 256, 32, 16, 3)
        if d <= 128:
            most = 64 if quantized and not plain and arch == "sm_80" else 128
            return cls(d, min(m, most), 64 if roomy else 32, 8, 2 if quantized else 3)
        if not plain:
            return cls(d, 32, 64, 8, 2)
        return cls(d, 128, 32, 8, 2) if m >= 128 and roomy else cls(d, 64, 32, 8, 2)


def _exact(d: int, m: int) -> Blocks:
    """float32: no tensor cores, exact products, by more threads."""
    if d > 64 or m <= 32:
        return Blocks(d, min(m, 32), 64 if d <= 64 else 32 if d <= 128 else 16, 8, 2)
    return Blocks(d, 64, 64, 16, 2)


def _latent(arch: str, d: int, m: int, dtype: torch.dtype) -> Blocks:
    """Latent pages: one head of 512 dims that all query heads read, as keys and as values."""
    if dtype == torch.float32:
        return Blocks(d, 16, 16, 8, 1 if arch.startswith("gfx") else 2)  # on gfx942 this one spills
    if arch.startswith("gfx"):
        return Blocks(d, 16, 16, 4, 1)
    return Blocks(d, min(m, 64 if arch in {"sm_80", "sm_90"} else 32), 32, 8, 2)


def _amd(d: int, m: int, dtype: torch.dtype) -> Blocks:
    """Warps have 64 threads: tiles are just large enough for each to load 16 bytes."""
    if dtype == torch.float32:
        return Blocks(d, min(m, 32 if d <= 128 else 16), 32 if d <= 128 else 16, 8, 1)
    if d > 128:
        return Blocks(d, min(m, 32), 32, 8, 1)
    return Blocks(d, min(m, 128), 64 if d <= 64 else 32, 4 if m <= 64 else 8, 2)


def _amd_quantized(d: int, m: int, dtype: torch.dtype, how: tuple[str, bool]) -> Blocks:
    """``how``: (what the pages hold, plain). A tile of int4 needs twice the tokens, or half the threads, for loads of
    16 bytes; blocks of many query rows leave no registers for that.
    """
    narrow, plain = how[0] == "int4" and m == 16, how[1]
    if dtype == torch.float32:
        return _amd(d, m, dtype)
    if d > 128:
        return Blocks(d, min(m, 32), 32, 4 if narrow else 8, 1)
    if m <= 32:
        return Blocks(d, m, 64 if d <= 64 or narrow else 32, 4, 2)
    return Blocks(d, 128, 32, 8, 1) if plain and m >= 128 else Blocks(d, 64, 32, 8, 2)


def arch_of(device: torch.device) -> str:
    """sm_80, sm_90, ... or gfx942, ..."""
    if device.type != "cuda":
        return ON_CPU
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
