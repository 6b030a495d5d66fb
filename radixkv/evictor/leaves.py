"""Idle runs of which only the leaves can go, for policies in which a parent may rank below its child.

A parent becomes a leaf when its last child leaves, and then goes by its own rank, at once if that is below the child's.
So the rank that counts for a run is the highest in its subtree, and the order of eviction follows from the leaves
alone: a heap of them, O(log leaves) a change on average. (Clearing the heap out, once in as many changes as there are
leaves, takes 0.4 us a leaf: with more than some 25,000 leaves it is the one thing here that takes over 10 ms.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic

from radixkv.errors import BrokenInvariant
from radixkv.evictor.policy import R, Rank


class Leaves(Generic[R]):
    """Leaves by rank. Removing one leaves its entry in the heap, to be skipped; too many of those are cleared out."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, R]] = []
        self._ticket: dict[R, int] = {}
        """Of each leaf the number of the entry that counts."""
        self._tickets = 0

    def __contains__(self, leaf: object) -> bool:
        return leaf in self._ticket

    def __len__(self) -> int:
        return len(self._ticket)

    def add(self, rank: Rank, leaf: R) -> None:
        self._tickets += 1
        self._ticket[leaf] = self._tickets
        heappush(self._heap, (rank, self._tickets, leaf))
        if len(self._heap) > 2 * len(self._ticket) + 64:
            self._heap = [entry for entry in self._heap if self._ticket.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def discard(self, leaf: R) -> None:
        self._ticket.pop(leaf, None)

    def remove(self, leaf: R) -> None:
        del self._ticket[leaf]

    def __iter__(self) -> Iterator[R]:
        """By rank, looking at no more of the heap than is asked for."""
        heap = self._heap
        ahead = [(*heap[0][:2], 0)] if heap else []
        while ahead:
            _, ticket, at = heappop(ahead)
            leaf = heap[at][2]
            if self._ticket.get(leaf) == ticket:
                yield leaf
            for below in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(ahead, (*heap[below][:2], below))

    def first(self) -> R | None:
        """The leaf of the lowest rank; the one added first if several have it."""
        heap = self._heap
        while heap and self._ticket.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        return heap[0][2] if heap else None


class LeafFirst(ABC, Generic[R]):
    """What such policies share: which runs are idle, and which of them are leaves now."""

    def __init__(self) -> None:
        self._idle: dict[R, None] = {}

    @abstractmethod
    def _queue(self, run: R) -> tuple[Leaves[R], Rank]:
        """Where this leaf is, or would be, filed, and its rank there; by its mark."""

    def add(self, run: R) -> None:
        self._idle[run] = None
        if not run.children:
            self._file(run)

    def remove(self, run: R) -> None:
        del self._idle[run]
        self._queue(run)[0].discard(run)
        above = run.parent
        if above is not None and above in self._idle and above.children is not None and len(above.children) == 1:
            self._file(above)  # a leaf as soon as this one has left; if this one wakes, so does it, and is removed next

    def _file(self, leaf: R) -> None:
        queue, rank = self._queue(leaf)
        queue.add(rank, leaf)

    def check(self) -> None:
        for run in self._idle:
            if (run in self._queue(run)[0]) != (not run.children):
                raise BrokenInvariant("I7", "what is filed as a leaf is none, or a leaf is not filed")

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[R]:
        return iter(self._idle)


class OneQueue(LeafFirst[R]):
    """All leaves in one queue: the victim is its first."""

    def __init__(self) -> None:
        super().__init__()
        self._leaves: Leaves[R] = Leaves()

    def victim(self, pages: int) -> R:
        leaf = self._leaves.first()
        assert leaf is not None
        if leaf.page_count <= pages:
            self.remove(leaf)
        return leaf
