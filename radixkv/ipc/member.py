"""What is known of the processes behind a session, here and in the store; what their ends mean is in ``members.py``."""

from __future__ import annotations

import select

from radixkv.ipc.attach import Ghost, Peer
from radixkv.ipc.fdstore import Stored


class Session:
    """What processes share a session. ``over``: the core knows that it has ended; ``mapped``: and may still write."""

    __slots__ = ("id", "mapped", "members", "over")

    def __init__(self, identity: int) -> None:
        self.id = identity
        self.members: dict[int, Member] = {}
        """By rank. The first is 0."""
        self.over = False
        self.mapped = False

    @property
    def gone(self) -> bool:
        return all(member.gone for member in self.members.values())

    @property
    def closed(self) -> bool:
        return all(member.closed for member in self.members.values())


class Member:
    """One process of a session, or a connection that has not said hello (``session`` None).

    ``lifeline``: the read end, -1 when it has ended or there is none.
    """

    __slots__ = ("closed", "dead", "left", "lifeline", "peer", "rank", "session", "since")

    def __init__(self, peer: Peer | Ghost, since: float) -> None:
        self.peer = peer
        self.since = since
        self.session: Session | None = None
        self.rank = 0
        self.lifeline = -1
        self.closed = isinstance(peer, Ghost)
        self.dead = False
        self.left = False
        """It has said bye: by its own word it does not touch the memory any more."""

    @property
    def gone(self) -> bool:
        return self.left or (self.closed and self.dead and self.lifeline < 0)


def stored_name(session: int, rank: int) -> str:
    return f"member-{session:x}-{rank}"


def stored_members(stored: Stored) -> dict[tuple[int, int], str]:
    """The members that a store holds: their names by session and rank."""
    found = {}
    for name in stored:
        kind, *place = name.split("-")
        if kind == "member" and len(place) == 2:
            found[int(place[0], 16), int(place[1])] = name
    return found


def has_ended(lifeline: int) -> bool:
    """Nobody has the other end open any more."""
    poll = select.poll()
    poll.register(lifeline, 0)
    return bool(poll.poll(0))
