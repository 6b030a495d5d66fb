"""Kernels over pages: read them (decode attention), write them (append), move rows between them (copy_rows).

Needs torch, and Triton only where a Triton kernel runs. Everything exists twice: in plain torch (``reference``, the
oracle, and what a CPU decodes with) and in Triton (``triton_decode``, ``triton_write``); ``dispatch`` checks the
arguments and chooses.

Torch is imported by this package, so nothing outside the workers' own code may import it at start.
"""

from radixkv.kernels.dispatch import append, copy_rows, decode_attention
from radixkv.kernels.layout import LayerPages, arena_view, views

__all__ = ["LayerPages", "append", "arena_view", "copy_rows", "decode_attention", "views"]
