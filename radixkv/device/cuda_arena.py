"""Device memory that processes share: made and exported by the daemon, imported and mapped by everybody else.

::

    daemon (no context)                            worker, copier (each with a context of its own)
      cuMemCreate ──> export ──> a descriptor ══════> import ──> cuMemMap into the range that was reserved
      cuMemRelease                                    cuMemRelease: the mapping holds the memory

The descriptor is to the daemon what a memfd is: it holds the memory, goes through the attach socket and the keeper's
store, and outlives the daemon. CUDA's documentation of cuMemRelease says so (memory goes when the mappings and the
handles "including its shareable counterparts" are gone); on a device it has not been tried yet.
"""

from __future__ import annotations

import weakref
from typing import Any

from radixkv.device import cuda_driver
from radixkv.device.arena import MemoryTooSmall
from radixkv.device.cuda_driver import CudaError, Device


def _shared(device: Device) -> Any:
    """What kind of memory an arena is."""
    driver = cuda_driver.load()
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device.ordinal
    prop.requestedHandleTypes = _posix_fd()
    return prop


def _posix_fd() -> Any:
    return cuda_driver.load().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def whole_bytes(device: Device, size: int) -> int:
    """``size``, rounded up to what the device can map."""
    least = cuda_driver.load().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity: int = cuda_driver.call("cuMemGetAllocationGranularity", _shared(device), least)
    return -(-size // granularity) * granularity


def create(device: Device, size: int) -> int:
    """Memory of ``whole_bytes`` on the device, as a descriptor; its content is anything. Needs and makes no context.

    Errors: MemoryTooSmall, CudaError.
    """
    try:
        handle = cuda_driver.call("cuMemCreate", size, _shared(device), 0)
    except CudaError as error:
        if error.result != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        raise MemoryTooSmall(
            f"{size} bytes are needed on {device.name} ({device.uuid}), which has {device.total_bytes}, and others may "
            "use some: give the pools fewer pages (pages=, device_bytes=) or free memory",
            needed_bytes=size,
            available_bytes=device.total_bytes,
        ) from error
    try:
        fd: int = cuda_driver.call("cuMemExportToShareableHandle", handle, _posix_fd(), 0)
    finally:
        cuda_driver.call("cuMemRelease", handle)
    return fd


class Range:
    """Addresses of this process, reserved for good: whatever is mapped there, views and captured graphs stay where they
    are. Its memory is let go, and the addresses with it, when nothing refers to this object any more.
    """

    def __init__(self, device: Device, size: int) -> None:
        """``size``: whole bytes. Errors: CudaError, CudaUnavailable."""
        self.device = device
        self.size = size
        with cuda_driver.current(device):
            self.pointer = int(cuda_driver.call("cuMemAddressReserve", size, 0, 0, 0))
        self._mapped = [False]
        weakref.finalize(self, _release, device, self.pointer, size, self._mapped).atexit = False

    def map(self, fd: int) -> None:
        """Map the memory behind a descriptor, which stays the caller's, in place of what was mapped before.

        Errors: CudaError.
        """
        driver = cuda_driver.load()
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device.ordinal
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with cuda_driver.current(self.device):
            _unmap(self.pointer, self.size, self._mapped)
            handle = cuda_driver.call("cuMemImportFromShareableHandle", fd, _posix_fd())
            try:
                cuda_driver.call("cuMemMap", self.pointer, self.size, 0, handle, 0)
                self._mapped[0] = True
            finally:
                cuda_driver.call("cuMemRelease", handle)
            cuda_driver.call("cuMemSetAccess", self.pointer, self.size, [access], 1)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """All of it as bytes, version 3 of the protocol: torch, CuPy and Numba read it."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.pointer, False), "strides": None, "version": 3}


def _unmap(pointer: int, size: int, mapped: list[bool]) -> None:
    """What this process has running on the device may still use the memory: it is waited for."""
    if mapped[0]:
        cuda_driver.call("cuCtxSynchronize")
        cuda_driver.call("cuMemUnmap", pointer, size)
        mapped[0] = False


def _release(device: Device, pointer: int, size: int, mapped: list[bool]) -> None:
    """In a finaliser. After an error that killed the context nothing can be given back but by the process's end."""
    try:
        with cuda_driver.current(device):
            _unmap(pointer, size, mapped)
            cuda_driver.call("cuMemAddressFree", pointer, size)
    except CudaError as error:
        if not error.kills_context:
            raise
