"""The copiers of all pools, as one: a process for those in the machine's memory, one for each group of CUDA devices.

An error that kills a CUDA context says nothing good about what the device still holds. Its copier's process ends with
it; which pools that was is told by ``take_lost``, after all their copies have been told to have failed.
"""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence

from radixkv.commands import Copy, CopyDone, CopyProgress
from radixkv.device.copier import ProcessCopier
from radixkv.device.copier_process import PoolTiers


class Copiers:
    """Keeps the contract of ``copier.Copier``."""

    def __init__(self, pools: Mapping[str, PoolTiers], keep_fds: Sequence[int] = ()) -> None:
        groups: dict[tuple[str, ...], dict[str, PoolTiers]] = {}
        for name, tiers in pools.items():
            groups.setdefault(tuple(sorted(set(tiers.uuids))), {})[name] = tiers
        self._pools = [list(group) for group in groups.values()]
        self._copiers = [ProcessCopier(group, keep_fds) for group in groups.values()]
        self._of = {name: copier for names, copier in zip(self._pools, self._copiers, strict=True) for name in names}
        self._seen_lost = [0] * len(self._copiers)
        self._epoll = select.epoll()
        for copier in self._copiers:
            self._epoll.register(copier.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def submit(self, copy: Copy) -> None:
        self._of.get(copy.pool, self._copiers[0]).submit(copy)

    def completions(self) -> list[CopyDone | CopyProgress]:
        return [said for copier in self._copiers for said in copier.completions()]

    def take_lost(self) -> list[str]:
        """Pools whose copier has lost a CUDA context since this was last asked."""
        lost = []
        for place, copier in enumerate(self._copiers):
            if copier.lost_contexts != self._seen_lost[place]:
                self._seen_lost[place] = copier.lost_contexts
                lost += self._pools[place]
        return lost

    @property
    def deaths(self) -> int:
        return sum(copier.deaths for copier in self._copiers)

    @property
    def timed_out(self) -> int:
        return sum(copier.timed_out for copier in self._copiers)

    @property
    def stuck_at(self) -> float:
        return min(copier.stuck_at for copier in self._copiers)

    def kill_if_stuck(self, now: float) -> None:
        for copier in self._copiers:
            copier.kill_if_stuck(now)

    def close(self) -> None:
        for copier in self._copiers:
            copier.close()
        self._epoll.close()
