"""What attention means beyond softmax(q k) v, and the batch it is computed for: shared by all implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from radixkv.kernels import arguments
from radixkv.kernels.layout import LayerPages

QUERIES_MAX = 8
"""Query tokens a row in decode attention: more are a prefill."""


class Options(TypedDict, total=False):
    """Keywords of ``decode_attention`` and ``prefill_attention``; None or left out: not used.

    scale: factor of q k, 1 / sqrt(D) by default. softcap: c > 0, a scaled score s becomes c tanh(s / c) (Gemma 2).
    window: w >= 1, a query sees its own position and the w - 1 before it. sinks [Hq]: a learned logit a head that takes
    part in the softmax and has no value (gpt-oss), -inf for none; added after everything else. alibi_slopes [Hq]: slope
    * (key's position - query's position) is added to the scaled and capped score (ALiBi). Both float32.
    """

    scale: float | None
    softcap: float | None
    window: int | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None


@dataclass(frozen=True, slots=True)
class Attention:
    """The options as the implementations take them. ``tree`` [B * T] int32: bit u of entry (b, t) is set where draft
    token t of row b sees draft token u."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    tree: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Nothing but the scale changes a score, and a query sees all before it."""
        return self.softcap is None and self.window is None and self.alibi_slopes is None

    @classmethod
    def of(
        cls, head_dim: int, tree: Tensor | None, *, scale: float | None = None, softcap: float | None = None,
        window: int | None = None, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    ) -> Attention:  # fmt: skip
        """Of the keywords in ``Options``. BadRequest for a number that is none."""
        return cls(
            head_dim**-0.5 if scale is None else arguments.real("scale", scale),
            None if softcap is None else arguments.real("softcap", softcap),
            None if window is None else arguments.whole("window", window),
            sinks, alibi_slopes, tree,
        )  # fmt: skip


class Rotary(NamedTuple):
    """A rotary embedding: row p of cos and sin [positions, R / 2] turns a token at position p.

    The first R of a head's D dims are turned, in pairs (i, i + R / 2), or (2 i, 2 i + 1) if interleaved. cos and sin
    are contiguous, of any dtype that pages may have; positions [T] int64, one for each token, within cos.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    interleaved: bool = False


class Batch(NamedTuple):
    """Query tokens of all rows, row after row, and where their keys and values are.

    A row's query tokens are its last ones: query t of n in a row of length l stands at position l - n + t.
    ``per_row``: query tokens of each row; 0: row b has those from ``starts[b]`` to ``starts[b + 1]``.
    """

    q: Tensor  # [N, Hq, D]
    pages: LayerPages
    page_table: Tensor  # [B, M] int32
    lengths: Tensor  # [B] int32
    per_row: int
    starts: Tensor | None = None  # [B + 1] int32


def tree_bits(tree_mask: Tensor) -> Tensor:
    """[B, T, T] bool (or [T, T] for all rows alike) -> [B * T] int32, as ``Attention.tree``. No wait for the device."""
    shifts = torch.arange(tree_mask.shape[-1], device=tree_mask.device, dtype=torch.int32)
    return (tree_mask.to(torch.int32) << shifts).sum(-1, dtype=torch.int32).flatten()
