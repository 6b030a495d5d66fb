"""Sessions as a dict, every answer ever given kept, silence found by looking at all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

SPAN = 1024


@dataclass
class Opened:
    slot: int
    seen_s: float
    taken: set[int] = field(default_factory=set)
    answers: list[tuple[int, str]] = field(default_factory=list)
    """Every (request id, answer) in the order of answering."""


class SessionsModel:
    def __init__(self, limit: int, keep: int, lease_s: float) -> None:
        self.limit, self.keep, self.lease_s = limit, keep, lease_s
        self.open: dict[int, Opened] = {}
        self.running_s = 0.0

    def may_open(self) -> bool:
        return len(self.open) < self.limit

    def lapsed(self, besides: int) -> int | None:
        """The session, other than ``besides``, that has been silent longest, if that is longer than its lease."""
        limit = self.running_s - self.lease_s
        silent = [
            (session.seen_s, who) for who, session in self.open.items() if session.seen_s < limit and who != besides
        ]
        oldest = min((seen for seen, _ in silent), default=None)
        return next((who for seen, who in silent if seen == oldest), None)

    def admit(self, who: int, request: int) -> str:
        """``"new"``, ``"old"``, or the answer that the request got already."""
        session = self.open[who]
        for kept, answer in session.answers[-self.keep :]:
            if kept == request:
                return answer
        if request in session.taken or (session.taken and request <= max(session.taken) - SPAN):
            return "old"
        session.taken.add(request)
        return "new"
