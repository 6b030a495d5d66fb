"""A pytest plugin for runs over the fake driver: torch reads device memory by its address, which here is the CPU's.

``pytest -p tests.cuda.on_fake`` with the environment that ``control.environment`` gives.
"""

from __future__ import annotations

import ctypes

import torch

from radixkv.client.cuda_mapping import CudaPoolMemory


def _bytes_of(memory: CudaPoolMemory) -> torch.Tensor:
    addresses = memory.range
    buffer = (ctypes.c_uint8 * addresses.size).from_address(addresses.pointer)
    buffer.mapped = addresses  # as with __cuda_array_interface__: mapped as long as a view is in use
    return torch.frombuffer(buffer, dtype=torch.uint8)


CudaPoolMemory._buffer = _bytes_of
