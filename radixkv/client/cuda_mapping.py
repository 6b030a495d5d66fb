"""A pool on a CUDA device, mapped into this process at addresses that stay.

When a cold daemon follows, its memory is mapped where the old one was: views and captured graphs go on, and the
sequences made before are told by their generations that what they read is not theirs any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from radixkv.client.mapping import PoolMemory
from radixkv.commands import CopyRow
from radixkv.device import cuda_driver
from radixkv.device.cuda_arena import Range
from radixkv.device.cuda_driver import CudaError, CudaUnavailable
from radixkv.ipc.attach import Mapping

if TYPE_CHECKING:
    from torch import Tensor


class CudaPoolMemory(PoolMemory):
    """Uses this process's primary context on the device, as torch does. Copies nothing by itself: the caller has the
    streams.
    """

    def __init__(self, mapping: Mapping, before: object = None) -> None:
        """Errors: VersionMismatch, CudaUnavailable, CudaError."""
        self._before = before if isinstance(before, CudaPoolMemory) else None
        super().__init__(mapping)
        self._before = None

    @property
    def cache_id(self) -> str:
        """Which memory this is: the same as long as daemons go on with it."""
        return self._table.geometry.cache_id

    @property
    def range(self) -> Range:
        """Where the arena is: ``pointer``, ``size``, ``device``; with ``__cuda_array_interface__``."""
        assert isinstance(self._arena, Range)
        return self._arena

    def copy_rows(self, rows: Iterable[CopyRow]) -> bool:  # noqa: ARG002 - of the memory that copies by itself
        """The caller does, on its stream, before it uses the targets."""
        return False

    def copy(self, rows: Iterable[CopyRow]) -> None:
        """On torch's current stream."""
        from radixkv.kernels.layout import arena_view

        view = arena_view(self._buffer(), self.layout, self.pages)
        for source, target, n in rows:
            view[target, :, :, :n] = view[source, :, :, :n]

    def take_page(self, page: int) -> NDArray[Any] | None:
        """Waits for the copy; what writes to the page has been waited for by the caller (``suspend(after=)``)."""
        if self.ranks > 1:
            return None
        content = np.empty(self.spec.page_bytes, np.uint8)
        with cuda_driver.current(self.range.device):
            cuda_driver.call("cuMemcpyDtoH", content.ctypes.data, self._address(page), content.nbytes)
        return content

    def put_page(self, page: int, content: NDArray[Any]) -> None:
        """There when this returns: the next thing is a commit."""
        with cuda_driver.current(self.range.device):
            cuda_driver.call("cuMemcpyHtoD", self._address(page), content.ctypes.data, content.nbytes)
            cuda_driver.call("cuCtxSynchronize")

    def _address(self, page: int) -> int:
        return self.range.pointer + page * self.spec.page_bytes

    def _map_arena(self, mapping: Mapping) -> Range:
        size, uuid, before = mapping.pool.arena_bytes, mapping.pool.device, self._before
        try:
            (device,) = cuda_driver.find([uuid])
            fits = before is not None and (before.range.size, before.range.device) == (size, device)
            addresses = before.range if before is not None and fits else Range(device, size)
            if before is None or not fits or before.cache_id != self.cache_id:  # else it is mapped there already
                addresses.map(mapping.arena_fd)
        except (CudaUnavailable, CudaError) as error:
            error.add_note(f"pool {mapping.pool.name!r} is on the CUDA device {uuid}, which this process needs as well")
            raise
        return addresses

    def _buffer(self) -> Tensor:
        """All bytes, as torch sees them; it keeps the addresses mapped as long as a view of them is in use."""
        import torch

        return torch.as_tensor(self.range, device=f"cuda:{self.range.device.ordinal}")
