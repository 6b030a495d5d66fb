"""Inputs for the kernels, hostile on purpose, and one independent answer: shared by their tests and ``bench.gpu``.

A case has a whole arena (three layers, padded pages, made from the layout descriptor) full of garbage, in which only
the valid tokens of the middle layer are written. Entries of the page table behind a row's length point nowhere or at
pages of garbage.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from radixkv.config import KVSpec, Layout
from radixkv.kernels import LayerPages, QuantizedPages, SharedPrefixes, append, arena_view
from radixkv.kernels.layout import heads_of
from radixkv.kernels.quantized import Pages, as_bytes, dequantize, write

if TYPE_CHECKING:
    from typing import Unpack

LAYERS, LAYER = 3, 1
NAN, INF = math.nan, math.inf
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Absolute and relative, on outputs of unit-variance inputs: a few roundings of the dtype itself."""
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Shape:
    """``spare_entries``: page-table entries beyond the longest row; ``shared``: rows begin with the same pages.

    ``queries``: query tokens of each row, q is [B, T, Hq, D]; None: one, and q is [B, Hq, D]. ``new_tokens``: query
    tokens of each row for a prefill, q is [N, Hq, D].
    """

    lengths: Sequence[int]
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    spare_entries: int = 1
    shared: bool = False
    queries: int | None = None
    new_tokens: Sequence[int] | None = None
    quantized: str = ""

    @property
    def layout(self) -> Layout:
        kept = self.quantized or NAMES[self.dtype]
        return Layout.of(KVSpec(LAYERS, self.kv_heads, self.head_dim, kept, self.page_size))


@dataclass(frozen=True)
class Case:
    """``keys`` and ``values``: one dense tensor a row, [length, kv_heads, head_dim], what the pages of it hold.

    ``layout``: of quantized pages.
    """

    arena: Tensor
    q: Tensor
    page_table: Tensor
    lengths: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    starts: Tensor | None = None
    layout: Layout | None = None

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values as the arena has them: the pages themselves, unless those are quantized."""
        return self.arena[:, LAYER, 0], self.arena[:, LAYER, 1]

    @property
    def pages(self) -> LayerPages:
        keys, values = self.rows
        if self.layout is not None:
            return LayerPages(heads_of(keys, self.layout), heads_of(values, self.layout))
        return LayerPages(keys, values)

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values in one layer, with their scales."""
        sides = [[side] if isinstance(side, Tensor) else [side.codes, side.scales] for side in self.pages]
        return sum(part[0, 0].numel() * part.itemsize for side in sides for part in side if part is not None)

    @property
    def arguments(self) -> tuple[Tensor, Pages, Pages, Tensor, Tensor]:
        """What ``decode_attention`` takes."""
        return self.q, *self.pages, self.page_table, self.lengths


def make_case(shape: Shape, seed: int = 0, fill: float = NAN, padding: int = -1, device: str = "cpu") -> Case:
    """The same tokens in the same pages for one seed, whatever surrounds them: ``fill`` in memory, ``padding`` ids."""
    draw, shuffle = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    size = shape.page_size
    layout = shape.layout if shape.quantized else None
    used = [-(-length // size) for length in shape.lengths]
    width = max(used, default=0) + shape.spare_entries
    pool = sum(used) + 2
    order = torch.randperm(pool, generator=shuffle).tolist()
    table = torch.full((len(used), width), padding, dtype=torch.int32)
    for row, count in enumerate(used):
        for entry in range(count):
            table[row, entry] = order.pop()
    if shape.shared and used:
        common = min((length for length in shape.lengths if length), default=0) // size
        table[:, :common] = table[used.index(max(used)), :common].clone()
    table = table.to(device)

    arena = empty_arena(shape.layout, pool, fill, device)
    places = []
    for row, length in enumerate(shape.lengths):
        token = torch.arange(length, device=device)
        places.append((table[row, token // size].long(), token % size))
        for kind in (0, 1):
            drawn = torch.randn((length, shape.kv_heads, shape.head_dim), generator=draw)
            _put(arena[:, LAYER, kind], shape, places[row], drawn.to(device, shape.dtype))
    # Of rows that share pages the last one written is what they hold.
    keys, values = ([_get(arena[:, LAYER, kind], shape, place) for place in places] for kind in (0, 1))
    lengths = torch.tensor(list(shape.lengths), dtype=torch.int32, device=device)
    counts = [shape.queries or 1] * len(used) if shape.new_tokens is None else shape.new_tokens
    q = torch.randn((sum(counts), shape.query_heads, shape.head_dim), generator=draw).to(device, shape.dtype)
    if shape.new_tokens is not None:
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
        return Case(arena, q, table, lengths, keys, values, starts, layout)
    if shape.queries is not None:
        q = q.view(len(used), shape.queries, shape.query_heads, shape.head_dim)
    return Case(arena, q, table, lengths, keys, values, None, layout)


def _put(rows: Tensor, shape: Shape, place: tuple[Tensor, Tensor], heads: Tensor) -> None:
    pages = heads_of(rows, shape.layout)
    if isinstance(pages, QuantizedPages):
        write(pages, place, heads)
    else:
        pages[place] = heads


def _get(rows: Tensor, shape: Shape, place: tuple[Tensor, Tensor]) -> Tensor:
    """What pages hold there, dequantized."""
    pages = heads_of(rows, shape.layout)
    if isinstance(pages, QuantizedPages):
        codes = as_bytes(pages.codes)[place].view(pages.codes.dtype)
        return dequantize(codes, None if pages.scales is None else pages.scales[place])
    return pages[place]


def empty_arena(layout: Layout, pages: int, fill: float, device: str = "cpu") -> Tensor:
    """[pages, layers, 2, page_size, kv_heads, head_dim] in memory that is all ``fill``, the gaps between pages too.

    Quantized: all bits set for a ``fill`` that is no number, which makes NaN of fp8 codes and of scales; with 0x7f in
    each byte for any other but 0, which makes them as large as they get.
    """
    if layout.quantization is not None:
        bits = 0xFF if math.isnan(fill) else 0x7F if fill else 0
        memory = torch.full((pages * layout.page_stride,), bits, dtype=torch.uint8, device=device)
        return arena_view(memory, layout, pages)
    dtype = next(dtype for dtype, name in NAMES.items() if name == layout.dtype)
    memory = torch.full((pages * layout.page_stride,), fill, dtype=dtype, device=device)
    return arena_view(memory.view(torch.uint8), layout, pages)


class Terms(TypedDict, total=False):
    """What ``naive_attention`` knows: the options of the kernels."""

    scale: float
    softcap: float
    window: int
    sinks: Tensor
    alibi_slopes: Tensor
    tree_mask: Tensor


def random_case(shape: Shape, device: str) -> Case:
    """Rows of one length whose pages lie in random order, made on the device: drawing on the host takes minutes."""
    batch, used = len(shape.lengths), -(-shape.lengths[0] // shape.page_size)
    arena = empty_arena(shape.layout, batch * used, 0.0, device)
    if not shape.quantized:
        arena.normal_()
    table = torch.randperm(batch * used, device=device).int().view(batch, used)
    queries = () if shape.queries is None else (shape.queries,)
    q = torch.randn(batch, *queries, shape.query_heads, shape.head_dim, device=device).to(shape.dtype)
    lengths = torch.tensor(list(shape.lengths), dtype=torch.int32, device=device)
    case = Case(arena, q, table, lengths, [], [], None, shape.layout if shape.quantized else None)
    if shape.quantized:
        slots = torch.arange(batch * used * shape.page_size, device=device)
        k, v = torch.randn(2, len(slots), shape.kv_heads, shape.head_dim, device=device).to(shape.dtype)
        append(k, v, *case.pages, slots)
    return case


def naive_attention(case: Case, **terms: Unpack[Terms]) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 by the definition, query by query from the dense keys and values."""
    heads, dim = case.q.shape[-2:]
    q = case.q.reshape(-1, heads, dim).double().cpu()
    out = torch.zeros((*q.shape[:2], case.values[0].shape[2] if case.values else dim), dtype=torch.float64)
    lse = torch.full(q.shape[:2], -INF, dtype=torch.float64)
    batch = len(case.lengths)
    starts = range(0, len(q) + 1, max(1, len(q) // max(1, batch))) if case.starts is None else case.starts.tolist()
    slopes, sinks = terms.get("alibi_slopes", torch.zeros(heads)), terms.get("sinks", torch.full((heads,), -INF))
    for row in range(batch):
        group = heads // case.pages.keys.shape[2]
        keys, values = (dense[row].double().cpu().repeat_interleave(group, 1) for dense in (case.keys, case.values))
        for query in range(starts[row], starts[row + 1]):
            seen, distance = _seen(row, len(keys), query - starts[row], starts[row + 1] - starts[row], terms)
            if not seen:
                continue
            scores = (keys[seen] * q[query]).sum(-1).T * terms.get("scale", 1 / math.sqrt(dim))
            if "softcap" in terms:
                scores = terms["softcap"] * (scores / terms["softcap"]).tanh()
            scores = scores - slopes.double().cpu()[:, None] * distance
            lse[query] = torch.cat([scores, sinks.double().cpu()[:, None]], 1).logsumexp(1)
            out[query] = ((scores - lse[query, :, None]).exp().T[:, :, None] * values[seen]).sum(0)
    return out.view(*case.q.shape[:-1], out.shape[2]), lse.view(case.q.shape[:-1])


def _seen(row: int, length: int, query: int, queries: int, terms: Terms) -> tuple[list[int], Tensor]:
    """(the tokens that the row's query sees, its distance to each)."""
    first = length - queries
    tree = terms.get("tree_mask")
    if tree is not None:
        tree = tree.cpu() if tree.dim() == 2 else tree[row].cpu()

    def position(token: int) -> int:
        return token if tree is None or token < first else first + max(1, int(tree[token - first].sum())) - 1

    def sees(token: int) -> bool:
        in_tree = token < first or bool(tree[query, token - first]) if tree is not None else token <= first + query
        return in_tree and position(first + query) - position(token) < terms.get("window", INF)

    seen = [token for token in range(length) if sees(token)]
    return seen, torch.tensor([position(first + query) - position(token) for token in seen], dtype=torch.float64)


def sliced(
    case: Case, items: int, prefixes: SharedPrefixes | None = None, **terms: Unpack[Terms]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by the Triton launcher itself: any number of slices, short ones, values unchecked."""
    from radixkv.kernels.attention_launch import Slicing, attention
    from radixkv.kernels.options import Attention, Batch, Options, tree_bits

    q = case.q if case.q.dim() == 3 else case.q.flatten(0, 1)
    tree = terms.get("tree_mask")
    bits = None if tree is None else tree_bits(tree.expand(len(case.lengths), -1, -1))
    per_row = 0 if case.starts is not None else 1 if case.q.dim() == 3 else case.q.shape[1]
    batch = Batch(q, case.pages, case.page_table, case.lengths, per_row, case.starts)
    options: Options = {name: terms[name] for name in terms if name != "tree_mask"}  # type: ignore[assignment,literal-required]
    out, lse = attention(batch, Attention.of(q.shape[2], bits, **options), prefixes, Slicing(items, 64))
    return out.view(case.q.shape), lse.view(case.q.shape[:-1])


def assert_near(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Outputs within the tolerance of the dtype; the log-sum-exp, always float32, within that of float32."""
    for mine, right, kind in ((got[0], want[0], dtype), (got[1], want[1], torch.float32)):
        bound = TOLERANCE[kind]
        torch.testing.assert_close(mine.double().cpu(), right.double().cpu(), rtol=bound, atol=bound)


def sparse_arena(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """[2050, 1, 2, 16, 1, 64], pages 2**20 elements apart: the last one lies beyond element 2**31.

    On a CPU only what is touched takes memory; on a GPU all of it does, 4 GiB for the 16-bit dtypes.
    """
    stride, pages = 2**20, 2**11 + 2
    layout = dataclasses.replace(Layout.of(KVSpec(1, 1, 64, NAMES[dtype], 16)), page_stride=stride)
    size = pages * stride * dtype.itemsize
    if device != "cpu":
        return arena_view(torch.empty(size, dtype=torch.uint8, device=device), layout, pages)
    file = os.memfd_create("sparse")
    try:
        os.ftruncate(file, size)
        memory = mmap.mmap(file, 0)
    finally:
        os.close(file)
    return arena_view(memory, layout, pages)


def bits(tensor: Tensor) -> Tensor:
    """What two tensors must have in common to be the same bit for bit, NaN included."""
    return tensor.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Latent:
    """A case of latent attention, and what it should give by the definition in float64."""

    q: Tensor
    pages: Tensor
    page_table: Tensor
    lengths: Tensor
    wanted: tuple[Tensor, Tensor]

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.pages, self.page_table, self.lengths


LATENT_SCALE = 192**-0.5
"""Of a model whose heads have 128 + 64 dims before absorption."""


def latent_case(shape: Shape, latent: int, rope: int, device: str = "cpu", fill: float = NAN) -> Latent:
    """``shape``'s lengths, query heads, page size, dtype, queries, sharing; ``latent`` and ``rope`` dims."""
    plain = dataclasses.replace(shape, kv_heads=1, head_dim=latent + rope)
    case = make_case(plain, fill=fill, device=device)
    values = [dense[..., :latent] for dense in case.keys]
    out, lse = naive_attention(dataclasses.replace(case, values=values), scale=LATENT_SCALE)
    return Latent(case.q, case.arena[:, LAYER, 0, :, 0], case.page_table, case.lengths, (out, lse))
