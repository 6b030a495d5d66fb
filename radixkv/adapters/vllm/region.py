"""One range of addresses for an engine's KV cache: blocks of its own first, then a pool's arena.

::

    block    0 ... own - 1 │ own ... own + pages - 1
    memory   anonymous     │ the arena, mapped a second time          block = own + page

So a block table may name both, and vLLM's block 0, which is nobody's, is not a page.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


def region(own_bytes: int, arena: torch.Tensor) -> torch.Tensor:
    """Flat int8: ``own_bytes`` zeros, then all of the arena that the tensor lies in. Mapped until the process ends.

    Errors: ValueError unless the first part is whole pages of the system; OSError.
    """
    if own_bytes % mmap.PAGESIZE:
        raise ValueError(f"{own_bytes} bytes of blocks are not whole pages of {mmap.PAGESIZE} bytes")
    size = own_bytes + arena.untyped_storage().nbytes()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _checked(_libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0))
    memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.int8)
    put(memory, own_bytes, arena)
    return memory


def put(memory: torch.Tensor, own_bytes: int, arena: torch.Tensor) -> None:
    """Map an arena, or another one of the same size, behind the first ``own_bytes`` of a region. Errors: OSError."""
    storage = arena.untyped_storage()
    assert own_bytes + storage.nbytes() == memory.numel()
    # An old size of 0 makes a second mapping of shared memory (mremap(2)); a fixed place replaces what was there.
    how = _MREMAP_MAYMOVE | _MREMAP_FIXED
    _checked(_libc.mremap(storage.data_ptr(), 0, storage.nbytes(), how, memory.data_ptr() + own_bytes))


def _checked(address: int | None) -> int:
    if address is None or address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address
