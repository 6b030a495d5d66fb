"""The copier's side of its contract: copies end late, in any order, badly, or never, because the copier died.

There is one tier so far, so that no copy is ever asked for: what can come are ends of copies that nobody knows.
"""

from __future__ import annotations

from fuzz.simulator.stage import Stage
from radixkv.commands import Copy, CopyDone


class Copier:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._running: list[Copy] = []

    def take(self, copy: Copy) -> None:
        self._running.append(copy)

    def next_end(self) -> CopyDone:
        """Some copy ends, whichever; or somebody speaks of one that never was (or ended before)."""
        rng = self._stage.rng
        if not self._running or rng.random() < 0.1:
            self._stage.note("unknown copy")
            return CopyDone(rng.randint(0, 99), rng.random() < 0.5)
        copy = self._running.pop(rng.randrange(len(self._running)))
        return CopyDone(copy.copy, rng.random() < 0.8)

    def die(self) -> list[CopyDone]:
        """All that were running have failed."""
        ends = [CopyDone(copy.copy, False) for copy in self._running]
        self._running.clear()
        return ends
