"""In the copier's process: pages between CUDA devices and pinned host memory.

::

    load lane (thread) ── a stream a rank ── cuMemcpyHtoDAsync, run by run ── event ── the end is told
    save lane (thread) ── a stream a rank ── cuMemcpyDtoHAsync, run by run ── event ── the end is told

The ranks' devices copy at the same time, and each device in both directions. The host arena is pinned for that
(``cuMemHostRegister``). When the process ends, by whatever, the driver ends its copies before it lets the memory go;
the daemon reaps the process before it believes anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from radixkv.device import cuda_arena, cuda_driver
from radixkv.device.copying import CONTEXT_LOST, Pages, Progress, Slab, map_pages, runs_of, slabs
from radixkv.device.cuda_arena import Range
from radixkv.device.cuda_driver import CudaError, Device
from radixkv.device.cuda_stream import Stream

_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for the contexts of all devices."""


class _Rank:
    """One rank's arenas and streams."""

    def __init__(self, device: Device, addresses: Range, host: Pages) -> None:
        self.device_at = addresses.pointer
        self.host_at = host.ctypes.data
        self.load, self.save = Stream(device), Stream(device)
        self._kept = addresses, host


class CudaTiers:
    """One pool's memory, mapped and pinned.

    ``shape``: bytes from page to page, layers and bytes of each, as ``copying.Tiers`` has it; and how many pages the
    device tier has.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], device_fds: Sequence[int], host_fds: Sequence[int], uuids: Sequence[str]
    ) -> None:
        """Takes the descriptors over. Errors: CudaUnavailable, CudaError."""
        self._page_bytes, layers, layer_bytes, self._pages = shape
        self._whole = Slab(layers, 0, self._page_bytes)
        self._slabs = slabs(self._page_bytes, layers, layer_bytes)
        self._ranks = []
        for fd, host_fd, device in zip(device_fds, host_fds, cuda_driver.find(uuids), strict=True):
            addresses = Range(device, cuda_arena.whole_bytes(device, self._page_bytes * self._pages))
            addresses.map(fd)
            os.close(fd)
            host = map_pages(host_fd, self._page_bytes)
            _pin(device, host)
            self._host_pages = len(host)
            self._ranks.append(_Rank(device, addresses, host))

    def copy(self, sources: bytes, targets: bytes, to_host: bool, progress: Progress | None = None) -> bool:
        """The contract of ``copying.Copying``. Does not return from an error that has killed a context."""
        giving, taking = (self._pages, self._host_pages) if to_host else (self._host_pages, self._pages)
        found = runs_of(sources, targets, giving, taking)
        if found is None:
            return False
        runs = list(found)
        try:
            for slab in [self._whole] if progress is None else self._slabs:
                for run in runs:
                    for rank in self._ranks:
                        self._ask(rank, run, slab, to_host)
                for event in [(rank.save if to_host else rank.load).record() for rank in self._ranks]:
                    event.synchronize()
                if progress is not None:
                    progress(slab.layers)
        except CudaError as error:
            return self._failed(error, to_host)
        return True

    def _ask(self, rank: _Rank, run: tuple[int, int, int], slab: Slab, to_host: bool) -> None:
        """A run of whole pages is one copy; a slab of each of its pages is one a page."""
        source, target, count = run
        pages, size = [0], count * self._page_bytes
        if slab is not self._whole:
            pages, size = list(range(count)), slab.end - slab.begin
        for page in pages:
            here = (source + page) * self._page_bytes + slab.begin
            there = (target + page) * self._page_bytes + slab.begin
            if to_host:
                rank.save.copy_to_host(rank.host_at + there, rank.device_at + here, size)
            else:
                rank.load.copy_to_device(rank.device_at + there, rank.host_at + here, size)

    def _failed(self, error: CudaError, to_host: bool) -> bool:
        """What has been asked for is waited for, so that nothing writes to the targets when this is told."""
        try:
            for rank in self._ranks:
                (rank.save if to_host else rank.load).synchronize()
        except CudaError as worse:
            error = worse
        print(f"radixkv copier: {error}", file=sys.stderr, flush=True)
        if error.kills_context:
            os._exit(CONTEXT_LOST)
        return False


def _pin(device: Device, host: Pages) -> None:
    """Where the driver refuses, copies go through its own buffers: right, and slower."""
    with cuda_driver.current(device):
        try:
            cuda_driver.call("cuMemHostRegister", host.ctypes.data, host.nbytes, _PORTABLE)
        except CudaError as error:
            if error.kills_context:
                raise
            print(f"radixkv copier: the host tier is not pinned: {error}", file=sys.stderr, flush=True)
