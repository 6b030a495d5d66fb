"""Page-granular FIFO, leaf first: what was let go for the first time longest ago, however often it was used since.

Mark: ``(stamp,)`` of the first time that nobody held the page. It can be older than that of the pages which continue
it: those go before it all the same.
"""

from __future__ import annotations

from typing import ClassVar

from radixkv.evictor.leaves import Leaves, OneQueue
from radixkv.evictor.policy import R, Rank


class FIFO(OneQueue[R]):
    counts_uses: ClassVar[bool] = False

    def used(self, path: list[R]) -> None:
        """Of no interest."""

    def add(self, run: R) -> None:
        if not run.mark:
            run.mark = (run.stamp,)
        super().add(run)

    def _queue(self, run: R) -> tuple[Leaves[R], Rank]:
        return self._leaves, run.mark
