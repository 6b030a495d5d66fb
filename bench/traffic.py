"""Bytes that interpreted kernels read, counted from the addresses they load.

Triton's interpreter carries out every load through one method; while ``counted`` is open, that method also adds up the
elements loaded from the memory of the tensors asked about. A program that reads an address twice, or two programs
that read the same one, count twice: caches are not assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder


@dataclass
class Traffic:
    read_bytes: int = 0


@contextmanager
def counted(memory: Tensor) -> Iterator[Traffic]:
    """Counts what is read from the storage that ``memory`` is a view of, a CPU tensor."""
    storage = memory.untyped_storage()
    low, high = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    traffic = Traffic()
    load = InterpreterBuilder.create_masked_load

    def counting(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        inside = mask.data & (pointers.data >= low) & (pointers.data < high)
        traffic.read_bytes += int(inside.sum()) * memory.itemsize
        return load(self, pointers, mask, *rest)

    InterpreterBuilder.create_masked_load = counting
    try:
        yield traffic
    finally:
        InterpreterBuilder.create_masked_load = load
