"""Writing pages in plain torch: the oracle of ``triton_write``, and what a CPU does.

Arguments are as ``dispatch`` documents and has checked them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.kernels.layout import LayerPages
from radixkv.kernels.options import Rotary
from radixkv.kernels.quantized import QuantizedPages, write


def append(
    k: Tensor, v: Tensor, pages: LayerPages, slots: Tensor, rotary: Rotary | None, q: Tensor | None
) -> Tensor | None:  # fmt: skip
    """The rotated q, if there is one."""
    if rotary is not None:
        k = rotated(k, rotary)
    page_size = pages.keys.shape[1]
    kept = slots >= 0
    if not bool(kept.all()):
        k, v, slots = k[kept], v[kept], slots[kept]
    place = (slots // page_size, slots % page_size)
    for target, x in zip(pages, (k, v), strict=True):
        if isinstance(target, QuantizedPages):
            write(target, place, x)
        else:
            target.index_put_(place, x)
    return None if q is None or rotary is None else rotated(q, rotary)


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """x [T, heads, D] in its own dtype, computed in float32."""
    cos = rotary.cos[rotary.positions].float()[:, None, :]
    sin = rotary.sin[rotary.positions].float()[:, None, :]
    reach = cos.shape[2]
    turned = x[..., : 2 * reach].float()
    if rotary.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :reach], turned[..., reach:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(pair, -1).flatten(-2) if rotary.interleaved else torch.cat(pair, -1)
    return torch.cat([joined.to(x.dtype), x[..., 2 * reach :]], -1)


def copy_rows(pages: Tensor, rows: Tensor) -> None:
    for source, target, count in rows.tolist():
        pages[target, ..., :count, :, :] = pages[source, ..., :count, :, :]


def gather_pages(pages: Tensor, ids: Tensor, staging: Tensor) -> None:
    kept = ids >= 0
    if bool(kept.all()):
        torch.index_select(pages, 0, ids, out=staging)
    else:
        staging[kept] = pages.index_select(0, ids[kept])


def scatter_pages(staging: Tensor, pages: Tensor, ids: Tensor) -> None:
    kept = ids >= 0
    if not bool(kept.all()):
        staging, ids = staging[kept], ids[kept]
    pages.index_copy_(0, ids.long(), staging)
