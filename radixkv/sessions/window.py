"""Requests act once: the last replies of a session, kept so that a repeat gets the same answer.

The window slides like an anti-replay window of IPsec (RFC 4303): ids far behind the newest are refused, because
whether they were executed is no longer known; ids may overtake each other within it, since one session sends from
several sockets.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from radixkv.errors import BadRequest

R = TypeVar("R")

SPAN = 1024
"""How far behind the newest id a request may arrive and still be executed."""
_MASK = (1 << SPAN) - 1


class ReplyWindow(Generic[R]):
    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._replies: OrderedDict[int, R] = OrderedDict()
        self._newest = 0
        self._seen = 0
        """Bit i: id newest - i has been taken in."""

    def __len__(self) -> int:
        return len(self._replies)

    def span_used(self) -> int:
        """How far back the window reaches now, in ids."""
        return self._seen.bit_length()

    def admit(self, request: int) -> R | None:
        """None: new, execute it. Otherwise the reply it got already.

        Errors: BadRequest when it is a repeat whose reply is no longer kept, or too old to know.
        """
        ahead = request - self._newest
        if ahead > 0:
            self._seen = ((self._seen << ahead) & _MASK) | 1 if ahead < SPAN else 1
            self._newest = request
            return None
        kept = self._replies.get(request)
        if kept is not None:
            return kept
        if -ahead >= SPAN or self._seen >> -ahead & 1:
            raise BadRequest("this request id is too old: its reply is no longer kept", id=request, newest=self._newest)
        self._seen |= 1 << -ahead
        return None

    def keep(self, request: int, reply: R) -> None:
        replies = self._replies
        replies[request] = reply
        if len(replies) > self._keep:
            replies.popitem(last=False)
