"""Launches ``triton_attention``: block sizes, buffers, grids. All from shapes; nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from radixkv.errors import BadRequest
from radixkv.kernels import triton_attention
from radixkv.kernels.blocks import Blocks, arch_of
from radixkv.kernels.layout import LayerPages
from radixkv.kernels.options import Attention, Batch
from radixkv.kernels.prefixes import SharedPrefixes
from radixkv.kernels.quantized import Pages, QuantizedPages
from radixkv.kernels.triton_attention import PLAN_CHUNK
from radixkv.kernels.triton_quantized import FORMATS, raw, strides

HEAD_DIM_MAX, LATENT_DIM_MAX, ROTATED_DIM_MAX = 256, 512, 256
TOKENS_PER_SLICE = 256
"""No slice is planned shorter: its start and its share of the merge would cost more than they save."""

INTERPRETED = not isinstance(triton_attention.attend, triton.runtime.JITFunction)
"""Triton's interpreter runs these kernels, on CPU tensors (TRITON_INTERPRET was set when this was imported)."""


class Slicing(NamedTuple):
    """``items``: how many items for each KV head the cutting of spans may add; None: twice what fills the device, none
    on a CPU. No slice gets fewer tokens than ``tokens``."""

    items: int | None = None
    tokens: int = TOKENS_PER_SLICE


@dataclass(frozen=True, slots=True)
class _Spans:
    """Some spans of a launch, whose blocks have one size. ``first``: their place among all spans."""

    first: int
    count: int
    blocks: Blocks
    items: int
    part_base: int
    causal: bool


@dataclass(frozen=True, slots=True)
class _Launch:
    """One call: what all of its kernels are given."""

    batch: Batch
    options: Attention
    shared: SharedPrefixes | None
    target: int
    least_tokens: int
    slots: Tensor
    out: Tensor
    lse: Tensor
    parts: Tensor
    parts_lse: Tensor

    def plan(self, spans: _Spans) -> None:
        batch, window = self.batch, self.options.window
        triton_attention.plan[(1,)](
            batch.lengths, batch.starts, self._span_table(spans), self.slots[:, spans.first :], spans.count,
            self.slots.shape[1], len(batch.q), _capacity(batch), window or 0, self.target, spans.part_base,
            PER_ROW=batch.per_row, GROUP=_group(batch), BLOCK_M=spans.blocks.m, BLOCK_N=spans.blocks.n,
            LEAST_TILES=triton.cdiv(self.least_tokens, spans.blocks.n), SHARED=self.shared is not None,
            WINDOWED=window is not None, CHUNK=PLAN_CHUNK, num_warps=4,
        )  # fmt: skip

    def attend(self, spans: _Spans) -> None:
        batch, options, blocks = self.batch, self.options, spans.blocks
        (keys, k_scales), (values, v_scales) = (_tensors(side) for side in batch.pages)
        pool, page_size, kv_heads, whole = batch.pages.keys.shape
        dim = batch.pages.values.shape[3]
        triton_attention.attend[(spans.items * kv_heads,)](
            batch.q, keys, values, k_scales, v_scales, batch.page_table, batch.lengths, batch.starts,
            self._span_table(spans), None if self.shared is None else self.shared.members, self.slots[:, spans.first :],
            options.tree, options.sinks, options.alibi_slopes, self.out, self.lse, self.parts, self.parts_lse,
            options.scale, options.softcap or 0.0, options.window or 0,
            *batch.q.stride()[:2], *strides(keys), *strides(values), *strides(k_scales), *strides(v_scales),
            pool, batch.page_table.shape[1], spans.count, self.slots.shape[1], len(batch.q), len(self.parts),
            PER_ROW=batch.per_row, KV_HEADS=kv_heads, GROUP=_group(batch), PAGE_SIZE=page_size, HEAD_DIM=dim,
            ROPE_DIM=whole - dim, BLOCK_R=max(16, triton.next_power_of_2(whole - dim)),
            BLOCK_D=blocks.d, BLOCK_M=blocks.m, BLOCK_N=blocks.n, SHARED=self.shared is not None,
            CAUSAL=spans.causal, WINDOWED=options.window is not None, CAPPED=options.softcap is not None,
            WIDEN=INTERPRETED, FORMAT=_format(batch), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

    def merge(self) -> None:
        batch, shared = self.batch, self.shared
        rows, heads, dim = self.out.shape
        block_h = min(16, triton.next_power_of_2(heads)) if INTERPRETED else 1  # there a program costs, not its size
        chain = (None, None, None) if shared is None else (
            shared.chain_starts, shared.chain_spans, shared.chain_members
        )  # fmt: skip
        triton_attention.merge[(rows, triton.cdiv(heads, block_h))](
            self.parts, self.parts_lse, batch.starts, None if shared is None else shared.span_table, self.slots, *chain,
            self.options.sinks, self.out, self.lse, self.slots.shape[1], len(batch.lengths), len(self.parts),
            PER_ROW=batch.per_row, HEADS=heads, HEAD_DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_H=block_h, CHUNK=4 if INTERPRETED else 16, SHARED=shared is not None, num_warps=4,
        )  # fmt: skip

    def _span_table(self, spans: _Spans) -> Tensor | None:
        return None if self.shared is None else self.shared.span_table[:, spans.first :]


def attention(
    batch: Batch, options: Attention, shared: SharedPrefixes | None = None, slicing: Slicing | None = None
) -> tuple[Tensor, Tensor]:
    """(out [N, Hq, D] in q's dtype, lse [N, Hq] float32). D is the values' head dim; latent keys have more.

    BadRequest: head dim over 256 (latent over 512, or 256 behind it), or a head's elements do not lie side by side.
    """
    rows, heads, _ = batch.q.shape
    dim = batch.pages.values.shape[3]
    _check(batch.pages)
    batch = batch._replace(
        q=batch.q if batch.q.stride(2) == 1 else batch.q.contiguous(),
        page_table=batch.page_table.contiguous(), lengths=batch.lengths.contiguous(),
    )  # fmt: skip
    device = batch.q.device
    out = torch.empty((rows, heads, dim), dtype=batch.q.dtype, device=device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=device)
    if batch.per_row == 0:  # query tokens of no row are nobody's to write
        out.zero_()
        lse.fill_(float("-inf"))
    if rows == 0 or len(batch.lengths) == 0:
        return out, lse
    slicing = slicing or Slicing()
    target = _target(batch, slicing)
    if shared is None:
        classes, parts = _plain(batch, target, causal=batch.per_row != 1 or options.tree is not None)
    else:
        classes, parts = _shared(batch, shared, target, plain=options.plain)
    spans = sum(each.count for each in classes)
    launch = _Launch(
        batch, options, shared, target, slicing.tokens,
        torch.empty((3, spans + 1), dtype=torch.int32, device=device), out, lse,
        torch.empty((parts, heads, dim), dtype=torch.float32, device=device),
        torch.empty((parts, heads), dtype=torch.float32, device=device),
    )  # fmt: skip
    with torch.cuda.device_of(batch.q):  # type: ignore[no-untyped-call]
        for each in classes:  # one after the other: the slot that ends the first's items begins the second's
            launch.plan(each)
            launch.attend(each)
        if parts:
            launch.merge()
    return out, lse


def _plain(batch: Batch, target: int, *, causal: bool) -> tuple[list[_Spans], int]:
    """Each row is a span, written at once if it is in one slice: (its launch, parts that the others may leave)."""
    group, rows = _group(batch), len(batch.lengths)
    average = batch.per_row or max(1, len(batch.q) // rows)
    blocks = _blocks(batch, average * group)
    if batch.per_row:
        most, whole = batch.per_row, rows * triton.cdiv(batch.per_row * group, blocks.m)
    else:
        most, whole = len(batch.q), rows + len(batch.q) * group // blocks.m
    # Spans cut in two or more: at most target slices beyond the first, so at most twice that in all.
    parts = 2 * target * min(most, triton.cdiv(blocks.m, group))
    return [_Spans(0, rows, blocks, whole + target, 0, causal)], parts


def _shared(batch: Batch, shared: SharedPrefixes, target: int, *, plain: bool) -> tuple[list[_Spans], int]:
    """Spans of many rows, which see all of them, in large blocks; then the others in those of one row."""
    per_member = batch.per_row * _group(batch)
    one = _blocks(batch, per_member)
    wide = sum(count > 1 and count * per_member > one.m for count in shared.counts)
    classes, parts = [], 0
    for first, end in ((0, wide), (wide, len(shared.counts))):
        counts = shared.counts[first:end]
        if counts:
            blocks = _blocks(batch, counts[0] * per_member, plain=plain) if first < wide else one
            items = target + sum(triton.cdiv(count * per_member, blocks.m) for count in counts)
            classes.append(_Spans(first, end - first, blocks, items, parts, first >= wide and batch.per_row != 1))
            parts += sum(counts) * batch.per_row + target * triton.cdiv(blocks.m, _group(batch))
    return classes, parts


def _blocks(batch: Batch, query_rows: int, *, plain: bool = False) -> Blocks:
    keys, dim = batch.pages.keys, batch.pages.values.shape[3]
    quantized = keys.dtype if isinstance(keys, QuantizedPages) else ""
    return Blocks.of(arch_of(batch.q.device), batch.q.dtype, dim, query_rows, plain=plain, quantized=quantized)


def _target(batch: Batch, slicing: Slicing) -> int:
    if _capacity(batch) <= slicing.tokens:
        return 0
    if slicing.items is not None:
        return slicing.items
    if batch.q.device.type != "cuda":
        return 0
    processors: int = torch.cuda.get_device_properties(batch.q.device).multi_processor_count
    return max(1, 2 * processors // batch.pages.keys.shape[2])


def _group(batch: Batch) -> int:
    return batch.q.shape[1] // batch.pages.keys.shape[2]


def _capacity(batch: Batch) -> int:
    return batch.page_table.shape[1] * batch.pages.keys.shape[1]


def _format(batch: Batch) -> int:
    """0: plain."""
    return FORMATS[batch.pages.keys.dtype] if isinstance(batch.pages.keys, QuantizedPages) else 0


def _tensors(pages: Pages) -> tuple[Tensor, Tensor | None]:
    """(elements or codes, scales if there are any)."""
    return raw(pages) if isinstance(pages, QuantizedPages) else (pages, None)


def _check(pages: LayerPages) -> None:
    dim = pages.values.shape[3]
    most = HEAD_DIM_MAX if pages.keys.shape[3] == dim else LATENT_DIM_MAX
    if dim > most:
        raise BadRequest(f"the Triton kernels take head dims up to {most}", head_dim=dim)
    if pages.keys.shape[3] - dim > ROTATED_DIM_MAX:
        behind = pages.keys.shape[3] - dim
        raise BadRequest(f"the Triton kernels take latents with up to {ROTATED_DIM_MAX} dims behind them", dims=behind)
    for name, side in zip(pages._fields, pages, strict=True):
        tensor, _ = _tensors(side)
        if tensor.stride(3) != 1:
            raise BadRequest(f"the Triton kernels need each head of {name} in one piece", stride=tensor.stride(3))
        # Within a page 32 bits are enough and save a third of the registers; all that leads to a page has 64.
        if (tensor.shape[1] - 1) * tensor.stride(1) >= 2**31:
            raise BadRequest(f"the rows of a page of {name} lie too far apart", token_stride=tensor.stride(1))
