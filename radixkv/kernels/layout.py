"""Torch views of an arena, made from the layout descriptor's strides alone. No byte is copied.

::

    buffer  |page 0 .......................|pad|page 1 ........
             layer 0            layer 1 ..
             keys     values
             [S, H, D][S, H, D]                 the default order; any other one is other strides

All offsets are 64-bit: torch's strides are, and the kernels widen page ids before they multiply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from radixkv.config import Layout
from radixkv.errors import BadRequest

if TYPE_CHECKING:
    from typing_extensions import Buffer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""The names a layout descriptor uses for what torch calls these."""


class LayerPages(NamedTuple):
    """One layer's pages: keys and values, each [pages, page_size, kv_heads, head_dim], strided views of the arena."""

    keys: Tensor
    values: Tensor


def views(buffer: Buffer | Tensor, layout: Layout, pages: int) -> list[LayerPages]:
    """Each layer's keys and values. ``buffer``: see ``arena_view``."""
    arena = arena_view(buffer, layout, pages)
    return [LayerPages(arena[:, layer, 0], arena[:, layer, 1]) for layer in range(layout.layers)]


def arena_view(buffer: Buffer | Tensor, layout: Layout, pages: int) -> Tensor:
    """All pages as one strided tensor [pages, layers, 2, page_size, kv_heads, head_dim]; [:, :, 0] keys, 1 values.

    ``buffer`` begins with page 0: a writable buffer (mmap, memoryview, bytearray), or a contiguous one-dimensional
    uint8 tensor on any device. It stays alive as long as a view does (an mmap cannot be closed before).
    BadRequest: too small for ``pages``, read-only, misaligned, or a layout with impossible strides.
    """
    base = _elements(buffer, layout)
    size = (pages, layout.layers, 2, layout.page_size, layout.kv_heads, layout.head_dim)
    stride = (
        layout.page_stride, layout.layer_stride, layout.kv_stride,
        layout.token_stride, layout.head_stride, layout.dim_stride,
    )  # fmt: skip
    if min(size) < 1 or min(stride) < 1:
        raise BadRequest("sizes and strides of an arena are at least 1", size=min(size), stride=min(stride))
    last = sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if last >= base.numel():
        raise BadRequest("the buffer is too small for its pages", need_elements=last + 1, elements=base.numel())
    return base.as_strided(size, stride, base.storage_offset())


def _elements(buffer: Buffer | Tensor, layout: Layout) -> Tensor:
    """The buffer as a flat tensor of the layout's dtype, a tail shorter than one element left off."""
    dtype = DTYPES.get(layout.dtype)
    if dtype is None:
        raise BadRequest(f"dtype {layout.dtype!r} is not one of {', '.join(DTYPES)}")
    raw = buffer if isinstance(buffer, Tensor) else _as_tensor(buffer)
    if raw.dtype != torch.uint8 or raw.dim() != 1 or not raw.is_contiguous():
        raise BadRequest("a tensor to make views of is contiguous, one-dimensional and uint8")
    if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
        raise BadRequest("the buffer does not begin at a multiple of the element size", item_bytes=dtype.itemsize)
    return raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _as_tensor(buffer: Buffer) -> Tensor:
    with memoryview(buffer) as view:
        if view.readonly:
            raise BadRequest("the buffer is read-only; kernels write into pages")
        if view.nbytes == 0 or not view.c_contiguous:
            raise BadRequest("the buffer is empty or not contiguous", bytes=view.nbytes)
    return torch.frombuffer(buffer, dtype=torch.uint8)
