"""What stands for a worker's kernels in tests over the fake driver, where an address of the device is one of the CPU's.

Torch and numpy read and write device memory by its address, and rows are copied at once. As a pytest plugin
(``-p tests.cuda.on_fake``), and imported by processes that tests start; ``suites.environment`` has the rest.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from radixkv.client.cuda_mapping import CudaPoolMemory
from radixkv.client.mapping import PoolMemory
from radixkv.kernels.layout import arena_view


def bytes_of(memory: CudaPoolMemory) -> torch.Tensor:
    addresses = memory.range
    buffer = (ctypes.c_uint8 * addresses.size).from_address(addresses.pointer)
    buffer.mapped = addresses  # as with __cuda_array_interface__: mapped as long as a view is in use
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _rows(memory: CudaPoolMemory) -> Any:
    rows = arena_view(bytes_of(memory), memory.layout, memory.pages)
    signed = rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[rows.itemsize]).numpy()
    return signed.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[signed.itemsize])


left_to_the_caller, copied_by_torch = CudaPoolMemory.copy_rows, CudaPoolMemory.copy
"""As they are without this."""
CudaPoolMemory._buffer = bytes_of
CudaPoolMemory._rows = property(_rows)
CudaPoolMemory.copy_rows = PoolMemory.copy_rows
CudaPoolMemory.copy = PoolMemory.copy
