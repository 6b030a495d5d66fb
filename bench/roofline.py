"""``python -m bench.roofline``: bytes that must move against bytes that a launch moves, from the addresses it touches.

What must move: keys and values of the tokens attended to, each page once however many rows share it; q, the page-table
entries and lengths; the output and its log-sum-exp. ``..._pages`` is keys and values alone. Caches are not counted on,
so a value of 1 is the best there is.
No GPU: the kernels run in Triton's interpreter, whose addresses are a GPU's. One row each, in docs/kernels.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if __name__ == "__main__":  # whoever imports this for its list of rows keeps the Triton that he has
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from bench.kernel_cases import LATENT_SCALE, Case, Shape, Terms, empty_arena, latent_case, make_case, sliced
from bench.kernel_problems import random_tree
from bench.rows import Row, report, single
from bench.traffic import Traffic, counted
from radixkv.config import QUANTIZED
from radixkv.kernels import (
    Rotary,
    append,
    copy_rows,
    gather_pages,
    group_prefixes,
    mla_decode_attention,
    scatter_pages,
)

if TYPE_CHECKING:
    from torch import Tensor

BRAIN, GQA, PAGE = torch.bfloat16, (8, 2), 16
COMMON = [512 + 3 * row for row in range(8)]
INT = torch.int32


@dataclass(frozen=True)
class Launch:
    """One launch. ``bar``: the most that its bytes may be of those that must move. ``levels``: of rows with a common
    prefix each four have eight pages more in common. ``tree``: a mask for the query tokens."""

    name: str
    shape: Shape
    items: int = 0
    grouped: bool = False
    window: int | None = None
    levels: bool = False
    tree: bool = False
    bar: float | None = None


LAUNCHES = (
    Launch("decode", Shape([512] * 8, *GQA, 64, PAGE, BRAIN), bar=1.02),
    *(
        Launch(f"decode_{dtype}", Shape([256] * 4, *GQA, 64, PAGE, BRAIN, quantized=dtype), bar=1.02)
        for dtype in QUANTIZED
    ),
    Launch("decode_sliced", Shape([2048, 64, 64, 64], *GQA, 64, PAGE, BRAIN), items=16, bar=1.1),
    Launch("decode_8_queries", Shape([512] * 4, *GQA, 64, PAGE, BRAIN, queries=8), bar=1.02),
    Launch("decode_window_128", Shape([1024] * 4, *GQA, 64, PAGE, BRAIN), window=128, bar=1.02),
    Launch("prefill_32_over_a_prefix", Shape([512, 300], *GQA, 64, PAGE, BRAIN, new_tokens=[32, 32]), bar=1.02),
    Launch("prefill_window_64", Shape([512, 300], *GQA, 64, PAGE, BRAIN, new_tokens=[32, 32]), window=64, bar=1.02),
    Launch("decode_tree_of_4", Shape([512] * 4, *GQA, 64, PAGE, BRAIN, queries=4), tree=True, bar=1.02),
    Launch("decode_common_prefix", Shape(COMMON, *GQA, 64, PAGE, BRAIN, shared=True)),
    Launch("decode_shared_prefix", Shape(COMMON, *GQA, 64, PAGE, BRAIN, shared=True), grouped=True),
    Launch("decode_shared_levels", Shape(COMMON, *GQA, 64, PAGE, BRAIN, shared=True), grouped=True, levels=True),
    Launch("decode_shared_64_rows", Shape([260] * 64, *GQA, 64, PAGE, BRAIN, shared=True), grouped=True),
    Launch("decode_shared_8_queries", Shape([300] * 8, *GQA, 64, PAGE, BRAIN, queries=8, shared=True), grouped=True),
)


def attention_rows() -> Iterator[Row]:
    for launch in LAUNCHES:
        case, queries = make_case(launch.shape), launch.shape.queries or 1
        if launch.levels:
            case.page_table[:, 16:24] = case.page_table[torch.arange(len(case.lengths)) // 4 * 4, 16:24]
        prefixes = group_prefixes(case.page_table, case.lengths, PAGE, queries=queries) if launch.grouped else None
        options: Terms = {} if launch.window is None else {"window": launch.window}
        if launch.tree:
            options["tree_mask"] = random_tree(len(case.lengths), queries, 0)
        with counted(case.arena) as traffic:
            sliced(case, launch.items, prefixes, **options)
        pages, others = attention_bytes(case, launch.window)
        yield single(f"roofline.{launch.name}", "x", _moved(traffic) / (pages + others), bar=launch.bar)
        if launch.shape.shared:
            bar = 1.1 if launch.grouped else None
            yield single(f"roofline.{launch.name}_pages", "x", traffic.pages_read / pages, bar=bar)


def latent_rows() -> Iterator[Row]:
    """A token's latent and rotated key once, for all heads, as key and as value; q is as wide, the output less."""
    shape = Shape([300] * 2, 16, 1, 0, PAGE, BRAIN)
    case = latent_case(shape, 512, 64)
    with counted(case.pages) as traffic:
        mla_decode_attention(*case.arguments, latent_dim=512, scale=LATENT_SCALE, impl="triton")
    pages, q = 300 * 2 * 576 * 2, _bytes(case.q)
    others = q + q * 512 // 576 + 2 * 16 * 4 + 2 * (-(-300 // PAGE) + 1) * 4
    yield single("roofline.decode_latent", "x", _moved(traffic) / (pages + others), bar=1.02)


def attention_bytes(case: Case, window: int | None) -> tuple[int, int]:
    """Bytes that must move for decode attention, or a prefill, of this case: (from pages, all others)."""
    size, token = case.q.itemsize, case.token_bytes
    seen: set[tuple[int, int]] = set()
    queries = [1 if case.q.dim() == 3 else case.q.shape[1]] * len(case.lengths)
    if case.starts is not None:
        queries = case.starts.diff().tolist()
    entries = 0
    for row, (length, count) in enumerate(zip(case.lengths.tolist(), queries, strict=True)):
        first = 0 if window is None else max(0, length - count + 1 - window)
        pages = case.page_table[row].tolist()
        seen |= {(pages[token // PAGE], token % PAGE) for token in range(first, length)}
        entries += -(-length // PAGE) - first // PAGE
    outputs = case.q.numel() * size + case.q.numel() // case.q.shape[-1] * 4
    return len(seen) * token, case.q.numel() * size + (entries + len(case.lengths)) * 4 + outputs


def write_rows() -> Iterator[Row]:
    arena = empty_arena(Shape([], kv_heads=2, dtype=BRAIN).layout, 6, 0.0)
    k, v = torch.zeros(2, 8, 2, 64, dtype=BRAIN)
    with counted(arena) as traffic:
        append(k, v, arena[:, 1, 0], arena[:, 1, 1], torch.arange(8), impl="triton")
    yield single("roofline.append", "x", _moved(traffic) / (4 * _bytes(k) + 8 * 8), bar=1.02)
    q = torch.zeros(8, 8, 64, dtype=BRAIN)
    rotary = Rotary(torch.zeros(8, 32), torch.zeros(8, 32), torch.arange(8))
    with counted(arena) as traffic:
        append(k, v, arena[:, 1, 0], arena[:, 1, 1], torch.arange(8), rotary=rotary, q=q, impl="triton")
    must = 4 * _bytes(k) + 2 * _bytes(q) + 2 * 8 * 8 + 2 * _bytes(rotary.cos)
    yield single("roofline.append_rotary", "x", _moved(traffic) / must)
    with counted(arena) as traffic:
        copy_rows(arena, torch.tensor([[0, 1, 16], [2, 3, 5]], dtype=INT), impl="triton")
    must = 2 * (_bytes(arena[0]) + _bytes(arena[0, :, :, :5])) + 2 * 3 * 4
    yield single("roofline.copy_rows", "x", _moved(traffic) / must, bar=1.1)
    staging = torch.zeros(3, *arena.shape[1:], dtype=BRAIN)
    with counted(arena) as traffic:
        gather_pages(arena, torch.tensor([0, 4, 2], dtype=INT), staging, impl="triton")
    yield single("roofline.gather", "x", _moved(traffic) / (2 * _bytes(staging) + 3 * 4), bar=1.02)
    with counted(arena) as traffic:
        scatter_pages(staging, arena, torch.tensor([0, 4, 2], dtype=INT), impl="triton")
    yield single("roofline.scatter", "x", _moved(traffic) / (2 * _bytes(staging) + 3 * 4), bar=1.02)


def _moved(traffic: Traffic) -> int:
    return traffic.read_bytes + traffic.written_bytes


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def rows() -> Iterator[Row]:
    yield from attention_rows()
    yield from latent_rows()
    yield from write_rows()


def main() -> None:
    report(rows(), sys.argv[1:])


if __name__ == "__main__":
    main()
