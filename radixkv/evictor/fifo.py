"""Page-granular FIFO, leaf first: what was let go for the first time longest ago, however often it was used since.

Mark: ``(stamp,)`` of the first time that nobody held the page. It can be older than that of the pages which continue
it: those go before it all the same.
"""

from __future__ import annotations

from typing import ClassVar

from radixkv.evictor.leaves import LeafFirst, Leaves
from radixkv.evictor.policy import R, Rank
from radixkv.types import PAGE_ID_BYTES


class FIFO(LeafFirst[R]):
    counts_uses: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._leaves: Leaves[R] = Leaves()

    def used(self, path: list[R]) -> None:
        """Of no interest."""

    def add(self, run: R) -> None:
        if not run.mark:
            run.mark = (run.stamp,)
        super().add(run)

    def victim(self, pages: int) -> R:
        leaf = self._leaves.first()
        assert leaf is not None
        if len(leaf.pages) <= pages * PAGE_ID_BYTES:
            self.remove(leaf)
        return leaf

    def _queue(self, run: R) -> tuple[Leaves[R], Rank]:
        return self._leaves, run.mark
