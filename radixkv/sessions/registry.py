"""Who is there: sessions, what each holds, and for how long it may be silent.

::

    open ──(any request)──> open ──(silent for lease_s)──> lapsed ──(any request)──> open
      │                                                       │
      └──────────── bye, process or connection ends ──────────┴── or someone else is short ──> over

A lapsed session loses nothing as long as nobody needs its pages. One that is over is unknown from then on: what it
sends is answered ``session_lost`` and not executed. Silence is counted in the daemon's running time, so a daemon that
was stopped for minutes expires nobody.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Generic, TypeVar

from radixkv.errors import LimitExceeded, SessionLost
from radixkv.sessions.window import ReplyWindow

S = TypeVar("S")
"""A sequence, as the engine knows it."""
R = TypeVar("R")


class Session(Generic[S, R]):
    """One connected worker. ``charged`` counts pages a pool by name; ``waiting`` are its queued request ids."""

    __slots__ = (
        "absent",
        "charged",
        "epoch",
        "id",
        "name",
        "ranks",
        "seen_s",
        "sequences",
        "slot",
        "token",
        "waiting",
        "window",
    )

    def __init__(self, identity: int, slot: int, token: bytes, name: str) -> None:
        self.id = identity
        self.slot = slot
        self.token = token
        self.name = name
        self.epoch = 1
        self.ranks = {0}
        """Processes that are, or have been, attached; the end of any of them is the session's."""
        self.absent = False
        """Of an earlier daemon's time and not back yet."""
        self.seen_s = 0.0
        self.sequences: dict[int, S] = {}
        self.charged: defaultdict[str, int] = defaultdict(int)
        self.waiting: dict[int, str] = {}
        self.window: ReplyWindow[R]


class Registry(Generic[S, R]):
    def __init__(self, limit: int, keep_replies: int, lease_s: float) -> None:
        self._limit = limit
        self._keep_replies = keep_replies
        self._lease_s = lease_s
        self._sessions: dict[int, Session[S, R]] = {}
        self._free_slots = list(range(limit - 1, -1, -1))
        self.running_s = 0.0

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> list[Session[S, R]]:
        return list(self._sessions.values())

    def open(self, identity: int, token: bytes, name: str) -> Session[S, R]:
        """Errors: LimitExceeded when as many are open as the configuration allows."""
        if not self._free_slots:
            raise LimitExceeded("too many sessions", sessions=len(self._sessions), limit=self._limit)
        session: Session[S, R] = Session(identity, self._free_slots.pop(), token, name)
        session.window = ReplyWindow(self._keep_replies)
        session.seen_s = self.running_s
        self._sessions[identity] = session
        return session

    def restore(self, slot: int, identity: int, epoch: int, token: bytes) -> None:
        """A session of an earlier daemon's time: nothing is executed for it until it is back."""
        session: Session[S, R] = Session(identity, slot, token, "")
        session.window = ReplyWindow(self._keep_replies)
        session.epoch = epoch
        session.absent = True
        self._sessions[identity] = session
        self._free_slots.remove(slot)

    def rejoin(self, identity: int, token: bytes) -> Session[S, R]:
        """An absent session is back, with a new epoch: what was sent under the old one is not executed any more.

        Errors: SessionLost.
        """
        session = self._sessions.get(identity)
        if session is None or not session.absent or session.token != token:
            raise SessionLost("the daemon does not know this session")
        session.absent = False
        session.epoch += 1
        session.seen_s = self.running_s
        return session

    def join(self, identity: int, token: bytes, rank: int) -> Session[S, R]:
        """A further process of a session. Errors: SessionLost."""
        session = self._sessions.get(identity)
        if session is None or session.token != token:
            raise SessionLost("the daemon does not know this session")
        session.ranks.add(rank)
        return session

    def find(self, identity: int, epoch: int) -> Session[S, R]:
        """The session, which has now given a sign of life. Errors: SessionLost."""
        session = self._sessions.get(identity)
        if session is None or session.epoch != epoch or session.absent:
            raise SessionLost("the daemon does not know this session; nothing was executed")
        session.seen_s = self.running_s
        return session

    def find_quietly(self, identity: int) -> Session[S, R]:
        """A session known to be there; no sign of life of it."""
        return self._sessions[identity]

    def end(self, identity: int) -> Session[S, R] | None:
        """Forget a session; None if it is over already. Its slot may be used again."""
        session = self._sessions.pop(identity, None)
        if session is not None:
            self._free_slots.append(session.slot)
        return session

    def lapsed(self, besides: int) -> Session[S, R] | None:
        """The session, other than ``besides``, that has been silent longest beyond its lease, if there is one."""
        limit = self.running_s - self._lease_s
        silent = [s for s in self._sessions.values() if s.seen_s < limit and s.id != besides]
        return min(silent, key=lambda session: session.seen_s) if silent else None
