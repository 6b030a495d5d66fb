"""When nothing on a GPU works for a process any more that has died: its kernels may run on when its end has been seen.

::

    process and connection gone ──> the driver shows no context of it ──> its pages may be used again
                                └── 10 s later it still does ──> they stay in quarantine, and somebody is told

The driver's word is NVML's list of processes that compute on a device. It has process ids as the driver knows them: a
worker in another pid namespace is not found in it. Linux closes a dying process's device files, and so ends
its work, before the pidfd tells; the list is there for when that does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from radixkv.device.cuda_driver import INSTALL, CudaUnavailable

LOOK_AGAIN_S = 0.02
QUIET_WITHIN_S = 10.0


def lives(pid: int) -> bool:
    """There is such a process in this pid namespace."""
    return Path(f"/proc/{pid}").exists()


class _Expected(NamedTuple):
    pids: Collection[int]
    until: float


class Quiescence:
    """Ended sessions whose processes are gone. ``processes``: the driver's word; ``processes_on`` for some devices.

    Of a process that ended while no daemon ran the id is not known: of such a one the driver shows nothing when it
    shows only processes that live.
    """

    def __init__(self, processes: Callable[[], Collection[int]], lives: Callable[[int], bool] = lives) -> None:
        self._processes = processes
        self._lives = lives
        self._expected: dict[int, _Expected] = {}
        self.given_up = 0
        """Sessions, so far, whose pages stay in quarantine: the driver never said that their processes are gone."""

    def try_out(self) -> str:
        """Ask once, at the start, for what is asked first takes longest. Returns why there is no word, or nothing."""
        try:
            self._processes()
        except CudaUnavailable as error:
            return error.message
        return ""

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, session: int, pids: Collection[int], now: float) -> None:
        """``pids``: of its processes; what is below 1 is not known."""
        self._expected[session] = _Expected(frozenset(pids), now + QUIET_WITHIN_S)

    def settle(self, now: float) -> tuple[list[int], list[int]]:
        """Sessions of which the driver shows nothing any more, and those for which nobody waits any longer."""
        if not self._expected:
            return [], []
        try:
            there: Collection[int] | None = self._processes()
        except CudaUnavailable:
            there = None  # no word is no leave
        quiet = [one for one, (pids, _) in self._expected.items() if there is not None and self._none_of(pids, there)]
        given_up = [one for one, (_, until) in self._expected.items() if now >= until and one not in quiet]
        self.given_up += len(given_up)
        for session in (*quiet, *given_up):
            del self._expected[session]
        return quiet, given_up

    def _none_of(self, pids: Collection[int], there: Collection[int]) -> bool:
        return not set(there) & set(pids) and (min(pids, default=1) > 0 or all(map(self._lives, there)))


@cache
def _nvml() -> Any:
    """Errors: CudaUnavailable."""
    try:
        from cuda.bindings import nvml
    except ImportError as error:
        raise CudaUnavailable(f"there is no cuda-bindings with nvml (13.5.0 has it); {INSTALL}") from error
    try:
        nvml.init_v2()
    except (RuntimeError, nvml.NvmlError) as error:
        raise CudaUnavailable(f"there is no NVML (libnvidia-ml.so.1) here: {error}; install NVIDIA's driver") from error
    return nvml


def processes_on(uuids: Sequence[str]) -> set[int]:
    """Process ids that the driver shows on any of these devices. Makes no context. Errors: CudaUnavailable."""
    nvml = _nvml()
    found: set[int] = set()
    try:
        for uuid in uuids:
            shown = nvml.device_get_compute_running_processes_v3(nvml.device_get_handle_by_uuid(uuid))
            found.update(int(pid) for pid in np.atleast_1d(shown.pid))
    except (RuntimeError, nvml.NvmlError) as error:
        raise CudaUnavailable(f"NVML does not say who uses a device: {error}") from error
    return found
