"""Kernels over pages: read them (attention), write them (append), move what they hold (copy_rows, gather, scatter).

Needs torch, and Triton only where a Triton kernel runs. Everything exists twice: in plain torch (``reference_*``, the
oracle, and what a CPU decodes with) and in Triton (``triton_*``, launched for attention by ``attention_launch``);
``dispatch`` checks the arguments and chooses.

Torch is imported by this package, so nothing outside the workers' own code may import it at start.
"""

from radixkv.kernels.dispatch import (
    append,
    copy_rows,
    decode_attention,
    gather_pages,
    mla_decode_attention,
    prefill_attention,
    scatter_pages,
)
from radixkv.kernels.layout import LayerPages, arena_view, views
from radixkv.kernels.options import Rotary
from radixkv.kernels.prefixes import SharedPrefixes, group_prefixes
from radixkv.kernels.quantized import Pages, QuantizedPages

__all__ = [
    "LayerPages", "Pages", "QuantizedPages", "Rotary", "SharedPrefixes", "append", "arena_view", "copy_rows",
    "decode_attention", "gather_pages", "group_prefixes", "mla_decode_attention", "prefill_attention", "scatter_pages",
    "views",
]  # fmt: skip
