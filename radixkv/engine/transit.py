"""Sequences between two sessions: given up by one, not yet adopted by another, each with a deadline."""

from __future__ import annotations

from radixkv.engine.sequence import Sequence


class Transit:
    def __init__(self) -> None:
        self._by_ticket: dict[bytes, tuple[Sequence, float]] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __contains__(self, ticket: bytes) -> bool:
        return ticket in self._by_ticket

    def sequences(self) -> list[Sequence]:
        return [seq for seq, _ in self._by_ticket.values()]

    def put(self, ticket: bytes, seq: Sequence, until: float) -> None:
        self._by_ticket[ticket] = (seq, until)

    def peek(self, ticket: bytes) -> Sequence | None:
        entry = self._by_ticket.get(ticket)
        return entry[0] if entry else None

    def take(self, ticket: bytes) -> Sequence:
        return self._by_ticket.pop(ticket)[0]

    def next_end(self) -> float | None:
        return min((until for _, until in self._by_ticket.values()), default=None)

    def overdue(self, now: float) -> list[Sequence]:
        """Take out all whose time is over."""
        late = [ticket for ticket, (_, until) in self._by_ticket.items() if until <= now]
        return [self.take(ticket) for ticket in late]
