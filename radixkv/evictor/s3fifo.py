"""S3-FIFO adapted to a tree: a small queue for newcomers, a main queue for what was asked for again, a ghost.

As published (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023): what is new
enters the small queue, or the main one if the ghost remembers that it left the small queue not long ago. From the small
queue (a tenth of the pool) the oldest leaves; used at least twice since it came in, it goes to the main queue instead.
From the main queue the oldest leaves; used, it goes back to the end, its count less by one. Counts stop at 3.

What a tree changes: only leaves leave. A second chance is given to the leaf and the pages before it, as far as they
have the same mark and no branch. What came in with one path stays together: its first new page asks the ghost for all.
Time in the small queue is counted in pages that came after, which for a FIFO is its length, without any size to keep.
The ghost is a table of 8 bytes a page of the pool: a page evicted later takes the place of one before it. It goes by
a hash of the page's tokens and some before them (``BEHIND_BYTES``), made when a page leaves or comes: nothing else
needs one, and no answer takes longer behind a long prompt.

Mark: ``(queue, entry, frequency)``, ranked by entry. Second chances are paid for by uses; one question passes over no
more than ``CHANCES`` leaves and takes the next as if it had not been used, so that no answer takes long.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from radixkv.evictor.leaves import LeafFirst, Leaves
from radixkv.evictor.policy import Mark, R, Rank

SMALL, MAIN = 0, 1
STAYS_AT = (1, 0)
"""By queue: the highest frequency with which the oldest leaf goes."""
MOST = 3
CHANCES = 32
BEHIND_BYTES = 1024
"""So many tokens before a page, 256, tell it from others for the ghost: with the same behind it, it is the same."""


class S3FIFO(LeafFirst[R]):
    counts_uses: ClassVar[bool] = True

    def __init__(self, pool_pages: int, seed_of: Callable[[R], int]) -> None:
        """``seed_of`` gives each root a number of its own: the same tokens elsewhere are other pages."""
        super().__init__()
        self._seed_of = seed_of
        self._queues: tuple[Leaves[R], Leaves[R]] = (Leaves(), Leaves())
        self._ghost = array("Q", bytes(8 * pool_pages))
        self._small_pages = max(1, pool_pages // 10)
        self._came = 0
        """Pages that have entered the small queue, ever."""
        self._entries = 0
        """Entries into the main queue, ever."""

    def used(self, path: list[R]) -> None:
        new = [run for run in path if not run.mark]
        mark = self._enter(new) if new else ()
        for run in path:
            if run.mark:
                queue, entry, frequency = run.mark
                run.mark = (queue, entry, min(frequency + 1, MOST))
            else:
                run.mark = mark

    def add(self, run: R) -> None:
        if not run.mark:  # it was there before this daemon: what came in with one path has one stamp
            self._came = max(self._came, run.stamp)
            run.mark = (SMALL, run.stamp, 0)
        super().add(run)

    def victim(self, pages: int) -> R:
        leaf = self._next()
        queue, _, frequency = leaf.mark
        chances = CHANCES
        while frequency > STAYS_AT[queue]:
            if chances == 0:
                self._renew(leaf, (*leaf.mark[:2], 0))
                break
            chances -= 1
            self._renew(leaf, self._main_mark(0 if queue == SMALL else frequency - 1))
            leaf = self._next()
            queue, _, frequency = leaf.mark
        if queue == SMALL:
            whole = leaf.page_count
            for tag in reversed(self._tags(leaf, max(0, whole - pages), whole)):
                self._ghost[tag % len(self._ghost)] = tag
        if leaf.page_count <= pages:
            self.remove(leaf)
        return leaf

    def _next(self) -> R:
        """The small queue's oldest leaf if that queue is too long or the main one has no leaf, else the main one's."""
        small, main = (queue.first() for queue in self._queues)
        if small is not None and (main is None or self._came - small.mark[1] >= self._small_pages):
            return small
        assert main is not None
        return main

    def _enter(self, new: list[R]) -> Mark:
        """The first mark of runs that have come in together, leaf to root."""
        (tag,) = self._tags(new[-1], 0, 1)
        if self._ghost[tag % len(self._ghost)] == tag:
            return self._main_mark(0)
        self._came += sum(run.page_count for run in new)
        return (SMALL, self._came, 0)

    def _main_mark(self, frequency: int) -> Mark:
        self._entries += 1
        return (MAIN, self._entries, frequency)

    def _renew(self, leaf: R, mark: Mark) -> None:
        """Another mark for a leaf and what is before it, as far as that has the same one and no other continuation."""
        old, run = leaf.mark, leaf
        self._queues[old[0]].discard(leaf)
        run.mark = mark
        while (above := run.parent) is not None and above in self._idle and above.mark == old:
            if above.children is None or len(above.children) != 1:
                break
            run = above
            run.mark = mark
        self._file(leaf)

    def _queue(self, run: R) -> tuple[Leaves[R], Rank]:
        return self._queues[run.mark[0]], run.mark[1:2]

    def _tags(self, run: R, begin: int, end: int) -> list[int]:
        """What the ghost knows pages ``begin`` to ``end`` (not with it) of ``run`` by."""
        size = len(run.tokens) // run.page_count
        first = max(0, begin * size - BEHIND_BYTES)
        text, missing, root = bytes(run.tokens[first : end * size]), BEHIND_BYTES - begin * size, run
        while root.parent is not None:
            root = root.parent
            if missing > 0 and root.tokens:
                text = bytes(root.tokens[-missing:]) + text
                missing -= len(root.tokens)
        seed = self._seed_of(root)
        ends = range(len(text) - (end - begin - 1) * size, len(text) + 1, size)
        return [xxh3_64_intdigest(text[max(0, at - size - BEHIND_BYTES) : at], seed) for at in ends]
