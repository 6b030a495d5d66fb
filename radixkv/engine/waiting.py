"""The lines of those that wait, for pages or for copies between the tiers: first in, first out, holding nothing."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import NamedTuple

from radixkv.commands import Prefetch, Reserve, WaitLoaded


class Waiting(NamedTuple):
    session: int
    request: int
    body: Reserve | Prefetch | WaitLoaded
    since: float
    until: float
    deadline: float
    """All three monotonic seconds; the last is the request's own."""
    rounds: int = 0
    """How often copies have been begun for it."""


class WaitingLine:
    def __init__(self) -> None:
        self._line: OrderedDict[tuple[int, int], Waiting] = OrderedDict()
        self._ends: list[tuple[float, int, int]] = []
        """Heap of (until, session, request); those that have left the line are skipped."""
        self.news = False
        """Something has happened that some in the line may be waiting for."""

    def __len__(self) -> int:
        return len(self._line)

    def all(self) -> list[Waiting]:
        return list(self._line.values())

    def join(self, waiting: Waiting) -> None:
        self._line[waiting.session, waiting.request] = waiting
        heapq.heappush(self._ends, (waiting.until, waiting.session, waiting.request))

    def leave(self, session: int, request: int) -> Waiting | None:
        left = self._line.pop((session, request), None)
        if len(self._ends) > 2 * len(self._line) + 64:  # whoever joins and leaves all day must not fill the heap
            self._ends = [(waiting.until, *key) for key, waiting in self._line.items()]
            heapq.heapify(self._ends)
        return left

    def find(self, session: int, request: int) -> Waiting | None:
        return self._line.get((session, request))

    def first(self) -> Waiting:
        return next(iter(self._line.values()))

    def next_end(self) -> float | None:
        """When the first of those that wait gives up."""
        ends = self._ends
        while ends and not self._counts(ends[0]):
            heapq.heappop(ends)
        return ends[0][0] if ends else None

    def _counts(self, end: tuple[float, int, int]) -> bool:
        """Who left the line and came back has another end now."""
        waiting = self._line.get(end[1:])
        return waiting is not None and waiting.until == end[0]

    def overdue(self, now: float) -> list[Waiting]:
        """Take out all whose time is over."""
        out = []
        while (end := self.next_end()) is not None and end <= now:
            _, session, request = heapq.heappop(self._ends)
            out.append(self._line.pop((session, request)))
        return out
