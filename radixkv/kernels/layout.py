"""Torch views of an arena, made from the layout descriptor's strides alone. No byte is copied.

::

    buffer  |page 0 .......................|pad|page 1 ........
             layer 0            layer 1 ..
             keys     values
             [S, H, D][S, H, D]                 the default order; any other one is other strides

All offsets are 64-bit: torch's strides are, and the kernels widen page ids before they multiply. Of quantized pages an
element is a byte and a token's row is one piece, with its scales in it (``quantized``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from radixkv.config import Layout
from radixkv.errors import BadRequest
from radixkv.kernels import arguments
from radixkv.kernels.quantized import CODES, SCALES, Pages, QuantizedPages

if TYPE_CHECKING:
    from typing_extensions import Buffer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""The names a layout descriptor uses for what torch calls these."""


class LayerPages(NamedTuple):
    """One layer's pages: keys and values, each [pages, page_size, kv_heads, head_dim], strided views of the arena."""

    keys: Pages
    values: Pages


def views(buffer: Buffer | Tensor, layout: Layout, pages: int) -> list[LayerPages]:
    """Each layer's keys and values. ``buffer``: see ``arena_view``."""
    arena = arena_view(buffer, layout, pages)
    return [LayerPages(*(heads_of(arena[:, layer, kind], layout) for kind in (0, 1))) for layer in range(layout.layers)]


def heads_of(rows: Tensor, layout: Layout) -> Pages:
    """One layer's keys, or values, as kernels take them, of the rows [pages, page_size, *row_shape] of an arena."""
    if layout.quantization is None:
        return rows
    rows, how, heads = rows[:, :, 0], layout.quantization, layout.kv_heads
    dtype, width = CODES[layout.dtype], how.code_bytes(layout.head_dim)
    codes = rows[..., : heads * width].view(dtype).view(*rows.shape[:2], heads, width)
    if not how.scale_bytes:
        return QuantizedPages(codes)
    count, (begin, _) = how.scales(layout.head_dim), how.row(heads, layout.head_dim)
    scales = rows[..., begin : begin + heads * count * how.scale_bytes].view(SCALES[dtype])
    return QuantizedPages(codes, scales.view(*rows.shape[:2], heads, count))


def arena_view(buffer: Buffer | Tensor, layout: Layout, pages: int) -> Tensor:
    """All pages as one strided tensor [pages, layers, 2, page_size, kv_heads, head_dim]; [:, :, 0] keys, 1 values.

    Quantized pages: uint8 [pages, layers, 2, page_size, 1, bytes of a row], for whoever moves them.
    ``buffer`` begins with page 0: a writable buffer (mmap, memoryview, bytearray), or a contiguous one-dimensional
    uint8 tensor on any device. It stays alive as long as a view does (an mmap cannot be closed before).
    BadRequest: no buffer, too small for ``pages``, read-only, misaligned, or a layout with impossible strides.
    """
    base = _elements(buffer, layout)
    size, stride = layout.shape(arguments.whole("pages", pages)), layout.strides
    if min(size) < 1 or min(stride) < 1:
        raise BadRequest("sizes and strides of an arena are at least 1", size=min(size), stride=min(stride))
    _check_quantized(layout)
    _check_apart(size, stride)
    last = sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if last >= base.numel():
        raise BadRequest("the buffer is too small for its pages", need_elements=last + 1, elements=base.numel())
    return base.as_strided(size, stride, base.storage_offset())


def _check_apart(size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Whatever the order of the dimensions is, each steps over all that the smaller steps reach."""
    reach = 0
    for step, count in sorted(pair for pair in zip(stride, size, strict=True) if pair[1] > 1):
        if step <= reach:
            raise BadRequest("places of an arena overlap: a stride is too small", stride=step, least=reach + 1)
        reach += step * (count - 1)


def _check_quantized(layout: Layout) -> None:
    """A row of quantized pages is one piece, in the default order, and lies where its scales can be read."""
    how = layout.quantization
    if how is None:
        return
    row = (how.row(layout.kv_heads, layout.head_dim)[1], how.code_bytes(layout.head_dim), 1)
    given = (layout.token_stride, layout.head_stride, layout.dim_stride)
    to_rows = (layout.page_stride, layout.layer_stride, layout.kv_stride)
    if given != row or any(stride % max(1, how.scale_bytes) for stride in to_rows):
        raise BadRequest(
            f"strides of {layout.dtype} pages are not those of whole rows",
            got=str(given),
            need=str(row),
            rows=str(to_rows),
        )


def _elements(buffer: Buffer | Tensor, layout: Layout) -> Tensor:
    """The buffer as a flat tensor of the layout's dtype, a tail shorter than one element left off."""
    dtype = torch.uint8 if layout.dtype in CODES else DTYPES.get(layout.dtype)
    if dtype is None:
        raise BadRequest(f"dtype {layout.dtype!r} is not one of {', '.join((*DTYPES, *CODES))}")
    raw = buffer if isinstance(buffer, Tensor) else _as_tensor(buffer)
    if raw.dtype != torch.uint8 or raw.dim() != 1 or not raw.is_contiguous():
        raise BadRequest("a tensor to make views of is contiguous, one-dimensional and uint8")
    item = max(dtype.itemsize, 1 if layout.quantization is None else layout.quantization.scale_bytes)
    if raw.data_ptr() % item or raw.storage_offset() % item:
        raise BadRequest("the buffer does not begin at a multiple of the element size", item_bytes=item)
    return raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _as_tensor(buffer: Buffer) -> Tensor:
    try:
        given = memoryview(buffer)
    except (TypeError, ValueError) as none:  # no buffer at all, or one that was closed
        raise BadRequest(f"there is no buffer: {none}", type=type(buffer).__name__) from none
    with given as view:
        if view.readonly:
            raise BadRequest("the buffer is read-only; kernels write into pages")
        if view.nbytes == 0 or not view.c_contiguous:
            raise BadRequest("the buffer is empty or not contiguous", bytes=view.nbytes)
    return torch.frombuffer(buffer, dtype=torch.uint8)
