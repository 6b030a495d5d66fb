"""Random small problems of the kernels that write: append (rotary embedding and all), copy_rows, gather, scatter.

Each from a seed, with odd sizes and any strides; the torch reference and the Triton kernel must leave the same bytes,
also where nothing is written. For tests and ``fuzz``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bench.kernel_cases import INF, NAN, bits
from bench.kernel_strides import relaid, spread
from radixkv.kernels import Rotary, append, copy_rows, gather_pages, scatter_pages

if TYPE_CHECKING:
    from radixkv.kernels.dispatch import Impl

KINDS = ("append", "append_rotary", "copy_rows", "gather", "scatter")
ROUNDED = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2**-6}
"""What a rotated element may differ by: a rounding of its dtype, two where the interpreter cuts bfloat16 off."""
GAP = 7.0


@dataclass(frozen=True)
class WriteProblem:
    seed: int
    kind: str
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, seed: int) -> WriteProblem:
        rng = random.Random(seed)
        kind = rng.choice(KINDS)
        return cls(
            seed, kind, rng.randint(1, 5), rng.choice((1, 2, 5, 16, 17)), rng.choice((1, 2, 3, 9)),
            rng.choice((2, 5, 8, 40, 64, 80, 128, 192, 256)), rng.choice(tuple(ROUNDED)),
        )  # fmt: skip

    def check(self, impls: tuple[Impl, Impl] = ("torch", "triton")) -> None:
        """AssertionError unless both leave the same memory and give the same result."""
        (memory, result), (other_memory, other_result) = (self._done(impl) for impl in impls)
        pairs = [(memory, other_memory)] if result is None or other_result is None else [
            (memory, other_memory), (result, other_result)
        ]  # fmt: skip
        assert (result is None) == (other_result is None)
        for mine, theirs in pairs:
            if self.kind == "append_rotary":
                bound = ROUNDED[self.dtype]
                torch.testing.assert_close(theirs, mine, atol=bound, rtol=bound, equal_nan=True)
            else:
                assert torch.equal(bits(mine), bits(theirs)), self.kind

    def _done(self, impl: Impl) -> tuple[Tensor, Tensor | None]:
        """(the memory of the arena and the gaps in it, what the kernel gave)."""
        rng, draw = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        arena = torch.randn(self.pages, 2, 2, *self._page, generator=draw).to(self.dtype)
        arena[torch.rand(arena.shape, generator=draw) < 0.05] = rng.choice((NAN, INF, -INF))
        memory, arena = relaid(arena, rng, GAP)
        if self.kind.startswith("append"):
            return memory, self._append(arena, rng, draw, impl)
        part = rng.choice((arena, arena[:, 1], arena[:, 0, 1]))
        if self.kind == "copy_rows":
            ends = (self.pages, self.pages, self.page_size + 1)
            rows = torch.tensor([[rng.randrange(end) for end in ends] for _ in range(rng.randint(0, 8))])
            copy_rows(part, rows.int().reshape(-1, 3).t().contiguous().t(), impl=impl)
            return memory, None
        ids = self._some(self.pages, self.pages, rng, draw).int()
        staging = torch.randn(len(ids), *part.shape[1:], generator=draw).to(self.dtype)
        if self.kind == "gather":
            gather_pages(part, ids, staging, impl=impl)
            return memory, staging
        scatter_pages(staging, part, ids, impl=impl)
        return memory, None

    def _append(self, arena: Tensor, rng: random.Random, draw: torch.Generator, impl: Impl) -> Tensor | None:
        slots = self._some(self.pages * self.page_size, 6, rng, draw)
        k, v, q = (
            relaid(torch.randn(len(slots), heads, self.head_dim, generator=draw).to(self.dtype), rng, NAN)[1]
            for heads in (self.kv_heads, self.kv_heads, self.kv_heads * rng.choice((1, 2, 4)))
        )
        k = spread(k, NAN) if rng.random() < 0.3 else k
        layer = (arena[:, 1, 0], arena[:, 1, 1])
        if self.kind == "append":
            append(k, v, *layer, slots, impl=impl)
            return None
        angles = torch.rand(11, rng.randint(1, self.head_dim // 2), generator=draw) * 6
        kept = rng.choice((torch.float32, self.dtype))
        positions = torch.randint(0, 11, (len(slots),), generator=draw)
        rotary = Rotary(angles.cos().to(kept), angles.sin().to(kept), positions, rng.random() < 0.5)
        if rng.random() < 0.3:
            append(k, v, *layer, slots, rotary=rotary, impl=impl)
            return None
        return append(k, v, *layer, slots, rotary=rotary, q=q, impl=impl)

    def _some(self, end: int, most: int, rng: random.Random, draw: torch.Generator) -> Tensor:
        """Up to ``most`` different numbers below ``end``, some of them -1, lying apart in memory."""
        chosen = torch.randperm(end, generator=draw)[: rng.randint(0, min(most, end))]
        chosen = torch.where(torch.rand(len(chosen), generator=draw) < 0.2, -1, chosen)
        return torch.stack([chosen, chosen], 1)[:, 0]

    @property
    def _page(self) -> tuple[int, int, int]:
        return self.page_size, self.kv_heads, self.head_dim
