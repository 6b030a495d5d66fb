"""Streams and events of the driver, for those who have no torch: the copier, and workers that want a fence."""

from __future__ import annotations

import weakref
from typing import Any

from radixkv.device import cuda_driver
from radixkv.device.cuda_driver import CudaError, Device


class Stream:
    """Work on one device, in order. Does not wait for the default stream, nor that for it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        flags = cuda_driver.load().CUstream_flags.CU_STREAM_NON_BLOCKING
        with cuda_driver.current(device):
            self.handle = cuda_driver.call("cuStreamCreate", flags)
        weakref.finalize(self, _give_back, "cuStreamDestroy", self.handle).atexit = False

    def copy_to_host(self, target: int, source: int, size: int) -> None:
        """Addresses and bytes. Returns at once where the host's memory is pinned."""
        with cuda_driver.current(self.device):
            cuda_driver.call("cuMemcpyDtoHAsync", target, source, size, self.handle)

    def copy_to_device(self, target: int, source: int, size: int) -> None:
        with cuda_driver.current(self.device):
            cuda_driver.call("cuMemcpyHtoDAsync", target, source, size, self.handle)

    def record(self) -> Event:
        """Done when all is done that was asked of this stream so far."""
        event = Event(self.device)
        with cuda_driver.current(self.device):
            cuda_driver.call("cuEventRecord", event.handle, self.handle)
        return event

    def synchronize(self) -> None:
        with cuda_driver.current(self.device):
            cuda_driver.call("cuStreamSynchronize", self.handle)


class Event:
    """A fence for ``after=``. Of a context that has died both methods raise CudaError: what it fenced is not good."""

    def __init__(self, device: Device) -> None:
        self.device = device
        flag = cuda_driver.load().CUevent_flags
        with cuda_driver.current(device):
            self.handle: Any = cuda_driver.call(
                "cuEventCreate", flag.CU_EVENT_DISABLE_TIMING.value | flag.CU_EVENT_BLOCKING_SYNC.value
            )
        weakref.finalize(self, _give_back, "cuEventDestroy", self.handle).atexit = False

    def query(self) -> bool:
        try:
            cuda_driver.call("cuEventQuery", self.handle)
        except CudaError as error:
            if error.result != "CUDA_ERROR_NOT_READY":
                raise
            return False
        return True

    def synchronize(self) -> None:
        cuda_driver.call("cuEventSynchronize", self.handle)


def _give_back(how: str, handle: Any) -> None:
    """In a finaliser: what a dead context had goes with its process."""
    try:
        cuda_driver.call(how, handle)
    except CudaError as error:
        if not error.kills_context:
            raise
