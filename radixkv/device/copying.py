"""The copier's process: whole pages from a pool's device arena to its host arena and back, both at once.

``device/copier.py`` starts it, with its orders in one argument. Each direction is a lane: a socket on which frames come
and ends go, in the same order, and a thread that does nothing else. numpy lets go of the interpreter while it copies,
so a long save delays no load. What waits, waits in the socket, and before it in the daemon: here is nothing to queue.

It imports no more than it needs, because the first copy after a death waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from radixkv.device import arena

ASK = struct.Struct("<i?II")
"""A frame's head: place of the pool (NO_POOL: none), whether layer by layer, bytes of source ids, bytes of target ids,
which follow it."""
TOLD = struct.Struct("<id")
"""How far the copy whose turn it is has come: so many layers of all its pages, or WELL or BADLY: it has ended, after so
many seconds."""
WELL, BADLY = -1, -2
NO_POOL = -1
CONTEXT_LOST = 75
"""How the process ends when a CUDA context of it has died: what the device holds is not to be believed any more."""

SLAB_BYTES = 512 * 2**10
"""Layer by layer, so much of a page is copied at once at least: from there on glibc uses its fastest loop (with the
threshold that ``copier_process`` sets). (Measured, load average 11: 256 KiB at 0.6 to 0.9 of the speed of whole pages,
512 KiB at 0.7 to 1.1.)"""

NICENESS = 5
"""Of both threads: they stand back, and yet get a share where all CPUs are busy. What lets others in at once is that
they yield after every ``TURN_BYTES``; the kernel would let them run until its next tick. (Measured on two CPUs,
copy.control_p99_ratio: 3.2 to 6.7 with niceness 10 and 19 and no yielding, 0.7 to 1.3 with this.)"""
TURN_BYTES = 2**20
"""Or one page, if that is more."""
_PR_SET_PDEATHSIG = 1

Pages = NDArray[np.uint8]
"""One rank's arena: [pages, page_bytes], or a slab of it."""


Progress = Callable[[int], None]


class Copying(Protocol):
    """Whatever can copy a pool's pages, on every rank. One direction has one caller, both at the same time."""

    def copy(self, sources: bytes, targets: bytes, to_host: bool, progress: Progress | None = None) -> bool:
        """Returns when all is copied. ``sources``, ``targets``: packed int32 ids. False: they are not equally many, or
        not all pages of these arenas, and nothing is copied; or it could not be done.

        ``progress``: layer by layer, if it can do that: it tells how many layers of all pages are there."""


class Tiers(NamedTuple):
    """One pool's memory, rank by rank, and how it is copied layer by layer."""

    page_bytes: int
    device: list[Pages]
    host: list[Pages]
    slabs: list[Slab]

    @classmethod
    def map(cls, shape: tuple[int, int, int], device_fds: Sequence[int], host_fds: Sequence[int]) -> Tiers:
        """``shape``: bytes from page to page, which begins with so many layers, of so many bytes each."""
        page_bytes, layers, layer_bytes = shape
        device = [map_pages(fd, page_bytes) for fd in device_fds]
        host = [map_pages(fd, page_bytes) for fd in host_fds]
        return cls(page_bytes, device, host, slabs(page_bytes, layers, layer_bytes))

    def copy(self, sources: bytes, targets: bytes, to_host: bool, progress: Progress | None = None) -> bool:
        """Whole pages, or with ``progress`` slab by slab."""
        giving, taking = (self.device, self.host) if to_host else (self.host, self.device)
        if progress is None:
            return copy_pages(sources, targets, giving, taking)
        for slab in self.slabs:
            part = slice(slab.begin, slab.end)
            if not copy_pages(sources, targets, [one[:, part] for one in giving], [one[:, part] for one in taking]):
                return False
            progress(slab.layers)
        return True


class Slab(NamedTuple):
    """Bytes of each page that are copied before the next slab of any; with it so many ``layers`` are there."""

    layers: int
    begin: int
    end: int


def slabs(page_bytes: int, layers: int, layer_bytes: int) -> list[Slab]:
    """As many layers together as it takes; what is behind the last layer goes with it."""
    step = max(1, -(-SLAB_BYTES // max(1, layer_bytes)))
    ends = [*range(step, layers, step), layers]
    begins = [0, *(layer * layer_bytes for layer in ends[:-1])]
    return [Slab(*slab) for slab in zip(ends, begins, [*begins[1:], page_bytes], strict=True)]


def open_tiers(order: Sequence[Any]) -> Copying:
    """``order``: the shape of a page, as ``Tiers.map`` takes it; device and host descriptors; UUIDs of the ranks' CUDA
    devices and how many pages they have."""
    (page_bytes, layers, layer_bytes), (device_fds, host_fds), (uuids, pages) = order
    if not uuids:
        return Tiers.map((page_bytes, layers, layer_bytes), device_fds, host_fds)
    from radixkv.device.cuda_copying import CudaTiers

    return CudaTiers((page_bytes, layers, layer_bytes, pages), device_fds, host_fds, uuids)


def map_pages(fd: int, page_bytes: int) -> Pages:
    """All whole pages of an arena. Its descriptor is closed; the mapping has one of its own."""
    size = os.fstat(fd).st_size
    memory = arena.map_shared(fd, size)
    os.close(fd)
    return np.frombuffer(memory, np.uint8, size - size % page_bytes).reshape(-1, page_bytes)


def behave() -> None:
    """Let the calling thread stand back, unless it does so more already."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def serve(lane: socket.socket, pools: Sequence[Copying], to_host: bool) -> None:
    """Copy what is asked for on a lane until its other end is closed. A frame that makes no sense fails alone."""
    behave()
    with lane.makefile("rb") as frames, contextlib.suppress(ConnectionError):
        while len(head := frames.read(ASK.size)) == ASK.size:
            place, by_layer, *lengths = ASK.unpack(head)
            sources, targets = map(frames.read, lengths)
            begin = time.perf_counter()
            progress = partial(_tell, lane) if by_layer else None
            ok = 0 <= place < len(pools) and pools[place].copy(sources, targets, to_host, progress)
            lane.sendall(TOLD.pack(WELL if ok else BADLY, time.perf_counter() - begin))


def _tell(lane: socket.socket, layers: int) -> None:
    lane.sendall(TOLD.pack(layers, 0.0))


def copy_pages(sources: bytes, targets: bytes, giving: Sequence[Pages], taking: Sequence[Pages]) -> bool:
    """Copy page by page, on every rank. ``sources`` and ``targets`` are packed int32 ids. False, with nothing copied:
    they are not equally many, or not all pages of these arenas."""
    runs = runs_of(sources, targets, min(map(len, giving)), min(map(len, taking)))
    if runs is None:
        return False
    turn = max(1, TURN_BYTES // max(1, giving[0].shape[1]))
    for source, target, count in runs:
        for begin in range(0, count, turn):
            end = min(begin + turn, count)
            for one, other in zip(giving, taking, strict=True):
                other[target + begin : target + end] = one[source + begin : source + end]
                os.sched_yield()
    return True


def runs_of(sources: bytes, targets: bytes, giving: int, taking: int) -> Iterator[tuple[int, int, int]] | None:
    """(source, target, count) of what is to be copied between tiers of so many pages; None if that makes no sense."""
    if len(sources) != len(targets) or len(sources) % 4:
        return None
    come_from, go_to = np.frombuffer(sources, "<i4"), np.frombuffer(targets, "<i4")
    if not (_all_in(come_from, giving) and _all_in(go_to, taking)):
        return None
    return _runs(come_from, go_to)


def _all_in(ids: NDArray[np.int32], pages: int) -> bool:
    return not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < pages)


def _runs(sources: NDArray[np.int32], targets: NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    """(source, target, count): neighbours that go to neighbours are one copy."""
    breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    edges = [0, *breaks.tolist(), len(sources)]
    for begin, end in itertools.pairwise(edges):
        if end > begin:
            yield int(sources[begin]), int(targets[begin]), end - begin


def _bind_to_parent(parent: int) -> None:
    """Die with the daemon, whatever kills it, and outlive the signals that ask it to drain: it ends us when it has."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before that: the frames it may have sent are not to be carried out
        sys.exit(0)


def _fail(failure: threading.ExceptHookArgs) -> None:
    """Half a copier would let copies wait for ever."""
    threading.__excepthook__(failure)
    os._exit(1)


def main(orders: dict[str, Any]) -> None:
    """``orders``: parent (process id), lanes (descriptors: load, save), pools (each as ``open_tiers`` takes it)."""
    _bind_to_parent(orders["parent"])
    pools = [open_tiers(pool) for pool in orders["pools"]]
    load, save = (socket.socket(fileno=fd) for fd in orders["lanes"])
    threading.excepthook = _fail
    threading.Thread(target=serve, args=(load, pools, False), daemon=True).start()
    serve(save, pools, to_host=True)
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
