"""Sequences between two sessions: given up by one, not yet adopted by another, each with a deadline."""

from __future__ import annotations

import heapq

from radixkv.engine.sequence import Sequence


class Transit:
    def __init__(self) -> None:
        self._by_ticket: dict[bytes, tuple[Sequence, float]] = {}
        self._ends: list[tuple[float, bytes]] = []
        """Heap of (until, ticket); those that have been taken are skipped."""

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __contains__(self, ticket: bytes) -> bool:
        return ticket in self._by_ticket

    def sequences(self) -> list[Sequence]:
        return [seq for seq, _ in self._by_ticket.values()]

    def put(self, ticket: bytes, seq: Sequence, until: float) -> None:
        self._by_ticket[ticket] = (seq, until)
        heapq.heappush(self._ends, (until, ticket))

    def peek(self, ticket: bytes) -> Sequence | None:
        entry = self._by_ticket.get(ticket)
        return entry[0] if entry else None

    def take(self, ticket: bytes) -> Sequence:
        seq, _ = self._by_ticket.pop(ticket)
        if len(self._ends) > 2 * len(self._by_ticket) + 64:  # whoever passes on all day must not fill the heap
            self._ends = [(until, left) for left, (_, until) in self._by_ticket.items()]
            heapq.heapify(self._ends)
        return seq

    def next_end(self) -> float | None:
        """When the first of them is freed (monotonic seconds)."""
        while self._ends and self._until(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def overdue(self, now: float) -> list[Sequence]:
        """Take out all whose time is over, the first first."""
        late = []
        while (end := self.next_end()) is not None and end <= now:
            _, ticket = heapq.heappop(self._ends)
            late.append(self.take(ticket))
        return late

    def take_all_of(self, pool: str) -> list[Sequence]:
        """Take out those of one pool."""
        tickets = [ticket for ticket, (seq, _) in self._by_ticket.items() if seq.pool == pool]
        return [self.take(ticket) for ticket in tickets]

    def _until(self, ticket: bytes) -> float | None:
        entry = self._by_ticket.get(ticket)
        return entry[1] if entry else None
