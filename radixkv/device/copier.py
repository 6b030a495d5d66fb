"""Copying pages between a pool's device arena and its host arena: the daemon asks, a process of its own copies.

::

    daemon   submit ──> lane of the direction ──> copier process (device/copying.py): copy, every rank
             completions <──── ends, in order ──┘
    it dies  reaped ──> all that it had not ended has failed ──> the next one, after a pause if it dies again and again

The daemon's single thread never copies a byte and never waits. A process that takes far too long for a copy is killed
(``kill_if_stuck``). A copy is over when ``completions`` says so, not before:
until then its process may write to the targets. That goes on beyond the daemon's own death, for as long as it takes the
kernel to end the process (PR_SET_PDEATHSIG); so it holds the daemon's lock on the memory too, and the next daemon gets
that when both are gone.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from radixkv.commands import Copy, CopyDone, CopyProgress
from radixkv.device.copier_process import PoolTiers, Process
from radixkv.device.copying import ASK, NO_POOL
from radixkv.types import PAGE_ID_BYTES

YOUNG_S = 5.0
"""A process that dies within this time has crashed; after a second crash in a row the next one has to wait."""
PAUSE_FIRST_S, PAUSE_MAX_S = 0.1, 5.0
STUCK_S, SLOWEST_BYTES_PER_S = 5.0, 10e6
"""A copy may take so long, and besides as long as its bytes take at this speed, from when it is its turn."""


class Copier(Protocol):
    """Whoever copies pages. Copies of one direction run in the order of submission, both directions at once.

    One that is to be done by layer copies the first layer of all its pages before the second of any.

    For pools on CUDA devices its process does it with other means (``cuda_copying.py``); the contract is the same.
    """

    def submit(self, copy: Copy) -> None:
        """Have pages copied: source i to target i, on every rank. Never blocks, never fails: that is told as an end."""

    def fileno(self) -> int:
        """Readable when ``completions`` has something to do. The same descriptor as long as the copier is open."""

    def completions(self) -> list[CopyDone | CopyProgress]:
        """What has ended since the last call, without blocking. Each copy ends once.

        Not ok: the targets' content is undefined, and nothing writes to them any more. Of one that is done by layer it
        also says, on the way, how many layers of all its pages are there.
        """

    def close(self) -> None:
        """End it, whatever runs; then nothing writes to any page any more. Nothing is told about copies left over."""


class ProcessCopier:
    """The copier of some pools, on a CPU or on CUDA devices.

    The descriptors given stay the caller's and must stay open until ``close``.

    Memory: page ids of what has not ended yet, here and in the sockets. As no page is in two copies, that is at most 8
    bytes for every page there is.
    """

    def __init__(self, pools: Mapping[str, PoolTiers], keep_fds: Sequence[int] = ()) -> None:
        """``keep_fds``: what the process shall hold as long as it lives; the locks that ``arena.lock`` gave."""
        self._pools = {name: place for place, name in enumerate(pools)}
        self._tiers = list(pools.values())
        self._keep_fds = list(keep_fds)
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._refused: list[CopyDone] = []
        self._process: Process | None = None
        self._crashes = 0
        self._pause_until = 0.0
        self.deaths = 0
        """Of processes, so far."""
        self.timed_out = 0
        """Copies, so far, that took far too long."""
        self.lost_contexts = 0
        """How often a process has ended because of an error that kills a CUDA context."""
        self._start()

    @property
    def pid(self) -> int | None:
        """The process that copies now; None while there is none."""
        return self._process.pid if self._process else None

    def fileno(self) -> int:
        """An epoll, over whatever the process of the moment has to be watched for."""
        return self._epoll.fileno()

    def submit(self, copy: Copy) -> None:
        if self._process is None:
            self._start()
        if self._process is None:
            self._refused.append(CopyDone(copy.copy, ok=False))
            os.eventfd_write(self._bell, 1)
            return
        head = ASK.pack(self._pools.get(copy.pool, NO_POOL), copy.by_layer, len(copy.sources), len(copy.targets))
        self._process.lanes[copy.to_host].ask(copy.copy, head + copy.sources + copy.targets, self._limit_s(copy))

    def completions(self) -> list[CopyDone | CopyProgress]:
        ended: list[CopyDone | CopyProgress] = [*self._refused]
        self._refused.clear()
        if ended:
            os.eventfd_read(self._bell)
        process = self._process
        if process is None:
            return ended
        dead = process.reap()  # first: whatever it said before it died is read below
        ended += process.listen()
        if dead:
            ended += [CopyDone(copy, ok=False) for lane in process.lanes for copy, _ in lane.asked]
            self._bury(process)
        return ended

    @property
    def stuck_at(self) -> float:
        """When the process is to be taken for stuck if nothing ends before (monotonic seconds; inf: nothing runs)."""
        return self._process.stuck_at if self._process else math.inf

    def kill_if_stuck(self, now: float) -> None:
        """Kill a process that is. What it was asked for has failed when ``completions`` says so."""
        if now >= self.stuck_at:
            assert self._process is not None
            self.timed_out += sum(now >= lane.stuck_at for lane in self._process.lanes)
            self._process.kill()

    def _limit_s(self, copy: Copy) -> float:
        tiers = self._tiers[self._pools.get(copy.pool, 0)]
        size = len(copy.sources) // PAGE_ID_BYTES * tiers.page_bytes * len(tiers.device_fds)
        return STUCK_S + size / SLOWEST_BYTES_PER_S

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        self._epoll.close()
        os.close(self._bell)

    def _start(self) -> None:
        """Start a process, unless it is too early for the next one."""
        if time.monotonic() < self._pause_until:
            return
        try:
            self._process = Process(self._tiers, self._keep_fds, self._epoll)
        except OSError:  # the machine has no process, memory or descriptor left for it
            self._count_death(lived_s=0.0)

    def _bury(self, process: Process) -> None:
        self.lost_contexts += process.lost_context
        process.close()
        self._process = None
        self._count_death(process.lived_s)
        self._start()

    def _count_death(self, lived_s: float) -> None:
        self.deaths += 1
        self._crashes = self._crashes + 1 if lived_s < YOUNG_S else 0
        pause_s = PAUSE_FIRST_S * 2.0 ** min(self._crashes - 2, 16) if self._crashes > 1 else 0.0
        self._pause_until = time.monotonic() + min(pause_s, PAUSE_MAX_S)
