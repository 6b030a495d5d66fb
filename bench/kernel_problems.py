"""Random small attention problems, of every kind that the kernels know, each from a seed: for tests and ``fuzz``."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bench.kernel_cases import Case, Shape, Terms, make_case, naive_attention, sliced
from bench.kernel_strides import restrided
from radixkv.config import QUANTIZED
from radixkv.kernels import SharedPrefixes, decode_attention, group_prefixes, prefill_attention

if TYPE_CHECKING:
    from radixkv.kernels.dispatch import Impl

HEADS = ((1, 1), (2, 2), (4, 2), (9, 3), (5, 1), (17, 1), (33, 3))
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 192, 256, 8, 40, 200)
PAGE_SIZES = (1, 3, 16, 32, 256, 7, 64)
KINDS = ("decode", "draft", "tree", "grouped", "grouped_tree", "prefill")


@dataclass(frozen=True)
class Problem:
    """``items``: how many items the Triton launcher may add by slicing; 0: none."""

    seed: int
    kind: str
    shape: Shape
    terms: Terms
    items: int

    @classmethod
    def of(cls, seed: int) -> Problem:
        rng = random.Random(seed)
        kind = rng.choice(KINDS)
        lengths = [rng.choice((0, 1, rng.randint(1, 200), rng.randint(1, 200))) for _ in range(rng.randint(1, 3))]
        if kind.startswith("grouped"):
            lengths = [rng.randint(0, 150) for _ in range(rng.randint(2, 5))]
        queries = rng.randint(1 + (kind != "tree"), 8) if kind in {"draft", "tree", "grouped_tree"} else None
        shape = Shape(
            lengths, *rng.choice(HEADS), rng.choice(HEAD_DIMS), rng.choice(PAGE_SIZES),
            rng.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16)),
            queries=queries, shared=kind.startswith("grouped"),
            new_tokens=[rng.randint(0, length) for length in lengths] if kind == "prefill" else None,
        )  # fmt: skip
        terms, items = _terms(rng, kind, shape), rng.choice((0, 5, 33))
        quantized = rng.choice(("", "", "", *QUANTIZED))
        return cls(seed, kind, replace(shape, quantized=quantized), terms, items)

    def case(self, device: str = "cpu") -> Case:
        """With any strides, for every other seed."""
        case = make_case(self.shape, self.seed, device=device)
        return restrided(case, self.seed) if self.seed % 2 else case

    def wanted(self) -> tuple[Tensor, Tensor]:
        return naive_attention(self.case(), **self.terms)

    def got(self, impl: Impl, device: str = "cpu") -> tuple[Tensor, Tensor]:
        case = self.case(device)
        terms: Terms = {name: value.to(device) if isinstance(value, Tensor) else value  # type: ignore[assignment]
                        for name, value in self.terms.items()}  # fmt: skip
        if impl == "triton" and self.items:
            return sliced(case, self.items, self._prefixes(case), **terms)
        if case.starts is not None:
            options = {name: value for name, value in terms.items() if name != "tree_mask"}
            return prefill_attention(*case.arguments, case.starts, return_lse=True, impl=impl, **options)  # type: ignore[call-overload,no-any-return]
        return decode_attention(*case.arguments, return_lse=True, prefixes=self._prefixes(case), impl=impl, **terms)

    def _prefixes(self, case: Case) -> SharedPrefixes | None:
        if not self.kind.startswith("grouped"):
            return None
        page_size, queries, window = self.shape.page_size, self.shape.queries or 1, self.terms.get("window")
        return group_prefixes(case.page_table, case.lengths, page_size, queries=queries, window=window)


def random_tree(rows: int, queries: int, seed: int) -> Tensor:
    """bool [rows, queries, queries]: a draft token continues an earlier one, or the context, and sees its ancestors."""
    rng = random.Random(seed)
    mask = torch.eye(queries, dtype=torch.bool).repeat(rows, 1, 1)
    for row in range(rows):
        for query in range(1, queries):
            parent = rng.randint(-1, query - 1)
            if parent >= 0:
                mask[row, query] |= mask[row, parent]
    return mask


def _terms(rng: random.Random, kind: str, shape: Shape) -> Terms:
    draw = torch.Generator().manual_seed(rng.randrange(2**32))
    terms: Terms = {}
    if rng.random() < 0.3:
        terms["scale"] = rng.choice((0.3, -0.1))
    if rng.random() < 0.3:
        terms["softcap"] = rng.choice((2.0, 30.0, 1000.0))
    if rng.random() < 0.4:
        terms["window"] = rng.choice((1, 5, 40, 500))
    if rng.random() < 0.3:
        terms["sinks"] = torch.randn(shape.query_heads, generator=draw)
    if rng.random() < 0.3:
        terms["alibi_slopes"] = torch.rand(shape.query_heads, generator=draw) * 0.2
    if kind.endswith("tree"):
        rows = rng.choice((1, len(shape.lengths)))
        mask = random_tree(rows, shape.queries or 1, rng.randrange(2**32))
        if rng.random() < 0.3:  # masks need not be those of trees
            mask = torch.rand(mask.shape, generator=draw) < rng.choice((0.0, 0.5, 1.0))
        terms["tree_mask"] = mask[0] if rows == 1 else mask
    return terms
