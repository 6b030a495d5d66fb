"""Requests act once: the last replies of a session, kept so that a repeat gets the same answer.

The window slides like an anti-replay window of IPsec (RFC 4303): ids far behind the newest are refused, because
whether they were executed is no longer known; ids may overtake each other within it, since one session sends from
several sockets.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from radixkv.errors import BadRequest

R = TypeVar("R")

SPAN = 1024
"""How far behind the newest id a request may arrive and still be executed."""


class ReplyWindow(Generic[R]):
    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._replies: deque[tuple[int, R]] = deque()
        """With the ids of their requests, the oldest first."""
        self._newest = 0
        self._missing: set[int] = set()
        """Ids below the newest that have not been taken in and still may be."""

    def __len__(self) -> int:
        return len(self._replies)

    def missing(self) -> int:
        """How many ids have been overtaken and may still come."""
        return len(self._missing)

    def admit(self, request: int) -> R | None:
        """None: new, execute it. Otherwise the reply it got already.

        Errors: BadRequest when it is a repeat whose reply is no longer kept, or too old to know.
        """
        newest = self._newest
        if request > newest:
            if request > newest + 1:
                self._overtake(request)
            self._newest = request
            return None
        for kept, reply in self._replies:
            if kept == request:
                return reply
        if request <= newest - SPAN or request not in self._missing:
            raise BadRequest("this request id is too old: its reply is no longer kept", id=request, newest=newest)
        self._missing.remove(request)
        return None

    def _overtake(self, request: int) -> None:
        """The ids between the newest one and ``request`` may still come, as far as the window reaches."""
        oldest = max(1, request - SPAN + 1)
        self._missing = {old for old in self._missing if old >= oldest}
        self._missing.update(range(max(self._newest + 1, oldest), request))

    def keep(self, request: int, reply: R) -> None:
        replies = self._replies
        replies.append((request, reply))
        if len(replies) > self._keep:
            replies.popleft()
