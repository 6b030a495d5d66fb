"""What is known of the processes behind a session, here and in the store; what their ends mean is in ``members.py``."""

from __future__ import annotations

import contextlib
import os
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


def mark_welcomed(lifeline: int) -> None:
    """Into the write end, when the welcome that it goes with has been sent: a byte that stays there."""
    with contextlib.suppress(OSError):  # a member that was refused: nobody has the other end
        os.write(lifeline, b"w")


def never_welcomed(lifeline: int) -> bool:
    """The daemon was killed between keeping the read end and sending the welcome: nobody ever had the other end."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    return bool(ends := poll.poll(0)) and not ends[0][1] & select.POLLIN
