"""Bytes that interpreted kernels move, counted from the addresses they load and store.

Triton's interpreter carries out every load and store through one method each; while ``counted`` is open, these also add
up what is accessed. Addresses that one access names twice count once, as a coalesced access would fetch them; programs
that read the same address count twice: no cache is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder


@dataclass
class Traffic:
    """``pages_read``: of ``read_bytes``, those in the memory asked about."""

    read_bytes: int = 0
    written_bytes: int = 0
    pages_read: int = 0


@contextmanager
def counted(pages: Tensor) -> Iterator[Traffic]:
    """Counts all traffic, and what is read from the storage that ``pages`` is a view of, a CPU tensor, by itself."""
    storage = pages.untyped_storage()
    low, high = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def accessed(pointers: Any, mask: Any) -> tuple[Any, int]:
        """(distinct addresses, bytes of each)."""
        return np.unique(pointers.data[mask.data.astype(bool)]), pointers.get_element_ty().primitive_bitwidth // 8

    def loading(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        at, size = accessed(pointers, mask)
        traffic.read_bytes += len(at) * size
        traffic.pages_read += int(((at >= low) & (at < high)).sum()) * size
        return load(self, pointers, mask, *rest)

    def storing(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        at, size = accessed(pointers, mask)
        traffic.written_bytes += len(at) * size
        return store(self, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = loading, storing
    try:
        yield traffic
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
