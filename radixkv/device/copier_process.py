"""The copier's process as the daemon sees it: started, asked, reaped. ``device/copying.py`` is what runs in it."""

from __future__ import annotations

import json
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from radixkv.commands import CopyDone, CopyProgress
from radixkv.device.copying import CONTEXT_LOST, TOLD, WELL

_STREAM_BYTES = 32 * 2**10
"""From here on glibc may copy past the caches (from 16 times as much with its fastest loop). By default it does so only
beyond three quarters of the last cache; a smaller target is read before it is overwritten. (Measured: scattered pages
of 0.7 MB and 4 MiB at 0.65 of the speed of one large copy without it, at 0.92 to 0.98 with it.) Other C libraries
ignore it."""
_READ_BYTES = 64 * 2**10


class PoolTiers(NamedTuple):
    """One pool's memory: descriptors of the arenas, one a rank. ``page_bytes``: from a page to the next, in all.

    ``uuids``: each rank's CUDA device, none for CPU memory; ``pages``: how many the device tier has, asked for with it.
    A page begins with ``layers`` of ``layer_bytes`` each.
    """

    page_bytes: int
    device_fds: Sequence[int]
    host_fds: Sequence[int]
    uuids: Sequence[str] = ()
    pages: int = 0
    layers: int = 1
    layer_bytes: int = 0


class Process:
    """One process from its start to its burial. ``lanes``: load, save."""

    def __init__(self, pools: Sequence[PoolTiers], keep_fds: Sequence[int], epoll: select.epoll) -> None:
        """Errors: OSError."""
        with ExitStack() as undo:
            pairs = [socket.socketpair() for _ in range(2)]
            for pair in pairs:
                undo.callback(pair[0].close)
            with pairs[0][1] as load, pairs[1][1] as save:
                self._popen = _spawn(pools, [load.fileno(), save.fileno()], keep_fds)
            undo.callback(self._popen.wait)
            undo.callback(self._popen.kill)
            self._pidfd = os.pidfd_open(self._popen.pid)
            undo.callback(os.close, self._pidfd)
            epoll.register(self._pidfd, select.EPOLLIN)
            self.lanes = [Lane(ours, epoll) for ours, _ in pairs]
            self._undo = undo.pop_all()
        self._started = time.monotonic()
        self._killed = False

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def stuck_at(self) -> float:
        return math.inf if self._killed else min(lane.stuck_at for lane in self.lanes)

    def kill(self) -> None:
        """It is still to be reaped."""
        self._killed = True
        self._popen.kill()

    @property
    def lost_context(self) -> bool:
        """It ended because of an error that leaves nothing of its CUDA context to go on with. Asked when it is gone."""
        return self._popen.returncode == CONTEXT_LOST

    def reap(self) -> bool:
        """Whether it is gone, and nothing of it left."""
        return self._popen.poll() is not None

    def listen(self) -> list[CopyDone | CopyProgress]:
        """What it has said so far; on the way it gets what it did not have room for. One lane's end is its end."""
        said = []
        for lane in self.lanes:
            lane.flush()
            said += lane.listen()
        if any(lane.closed for lane in self.lanes):
            self.kill()
        return said

    def close(self) -> None:
        """Kill and reap it, unless that has been done."""
        self._undo.close()


def _spawn(pools: Sequence[PoolTiers], lanes: list[int], keep_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """A process group of its own, so that a terminal's signals pass it by; the same session, because the kernel may
    compare niceness only within one (autogroups). stderr stays the daemon's: if it fails, somebody should know why.
    """
    pool_orders = [
        [
            [pool.page_bytes, pool.layers, pool.layer_bytes],
            [list(pool.device_fds), list(pool.host_fds)],
            [list(pool.uuids), pool.pages],
        ]
        for pool in pools
    ]
    orders = {"parent": os.getpid(), "lanes": lanes, "pools": pool_orders}
    arena_fds = [fd for pool in pools for fd in (*pool.device_fds, *pool.host_fds)]
    tunables = f"glibc.cpu.x86_non_temporal_threshold={_STREAM_BYTES}", os.environ.get("GLIBC_TUNABLES")
    return subprocess.Popen(
        [sys.executable, "-m", "radixkv.device.copying", json.dumps(orders)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[*lanes, *arena_fds, *keep_fds],
        process_group=0,
        # numpy's linear algebra, which nobody needs here, would start a thread on every core
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "GLIBC_TUNABLES": ":".join(filter(None, tunables))},
    )


class Lane:
    """The daemon's end of one direction: frames leave in order, ends come back in the same order."""

    def __init__(self, ours: socket.socket, epoll: select.epoll) -> None:
        self.asked: deque[tuple[int, float]] = deque()
        """Copies that have not ended, and how many seconds each may take once it is its turn."""
        self._turn = math.inf
        """When the first of them had its turn."""
        self.closed = False
        """The other end is."""
        self._socket = ours
        self._epoll = epoll
        self._unsent: deque[memoryview] = deque()
        self._waits = False
        """For room in the socket."""
        self._got = bytearray()
        ours.setblocking(False)
        epoll.register(ours, select.EPOLLIN)

    @property
    def stuck_at(self) -> float:
        return self._turn + self.asked[0][1] if self.asked else math.inf

    def ask(self, copy: int, frame: bytes, limit_s: float) -> None:
        if not self.asked:
            self._turn = time.monotonic()
        self.asked.append((copy, limit_s))
        self._unsent.append(memoryview(frame))
        self.flush()

    def flush(self) -> None:
        """Send what the socket has room for; if anything is left, the epoll tells when there is room again."""
        try:
            while self._unsent:
                rest = self._unsent[0][self._socket.send(self._unsent[0]) :]
                self._unsent.popleft()
                if rest:
                    self._unsent.appendleft(rest)
        except BlockingIOError:
            pass
        except ConnectionError:  # it is dying; what it said before that is still to be read
            self._unsent.clear()
        if self._waits != bool(self._unsent) and not self.closed:
            self._waits = not self._waits
            self._epoll.modify(self._socket, select.EPOLLIN | (select.EPOLLOUT if self._waits else 0))

    def listen(self) -> list[CopyDone | CopyProgress]:
        """What the process has said so far."""
        while not self.closed:
            try:
                got = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                got = b""
            if not got:
                self.closed = True
                self._unsent.clear()
                self._epoll.unregister(self._socket)  # or it would be readable until the process is gone
            self._got += got
        whole = bytes(self._got[: len(self._got) // TOLD.size * TOLD.size])
        del self._got[: len(whole)]
        said: list[CopyDone | CopyProgress] = []
        for told, seconds in TOLD.iter_unpack(whole):
            if told >= 0:
                said.append(CopyProgress(self.asked[0][0], told))
                continue
            self._turn = time.monotonic()
            said.append(CopyDone(self.asked.popleft()[0], told == WELL, seconds))
        return said
