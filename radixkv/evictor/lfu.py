"""Page-granular LFU, leaf first: what was used least often leaves, of those what was let go longest ago.

A page's frequency is how often a holder has let go of it since it came in: 1 with the one that computed it, forgotten
when it leaves. Mark: ``(frequency,)``. Mostly a parent was used as often as its children together, but not always (who
shortens a sequence and computes the same again has used the end twice), so the leaves are kept by rank.
"""

from __future__ import annotations

from typing import ClassVar

from radixkv.evictor.leaves import Leaves, OneQueue
from radixkv.evictor.policy import R, Rank


class LFU(OneQueue[R]):
    counts_uses: ClassVar[bool] = True

    def used(self, path: list[R]) -> None:
        for run in path:
            run.mark = (run.mark[0] + 1,) if run.mark else (1,)

    def add(self, run: R) -> None:
        if not run.mark:  # it was there before this daemon
            run.mark = (1,)
        super().add(run)

    def _queue(self, run: R) -> tuple[Leaves[R], Rank]:
        return self._leaves, (*run.mark, run.stamp)
