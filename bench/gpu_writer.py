"""A kernel that writes for minutes, to be killed inside of (``bench.gpu_memory``)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

MINUTES = 2**31


@triton.jit  # type: ignore[untyped-decorator]
def _count_up(words: Any, n: Any) -> None:
    for _ in range(n):
        tl.atomic_add(words, 1)


def count_up(words: Tensor) -> None:
    """One launch that adds 1 to the first word, again and again; returns when it is launched."""
    _count_up[(1,)](words, MINUTES)
