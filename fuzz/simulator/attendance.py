"""Who is attached to a simulated daemon: the rules of ``ipc/members.py`` without descriptors.

Ends are noticed one at a time and in any order, as an epoll may report them. A member of an earlier daemon's time is a
*ghost* until its worker is back: there is no connection to it, only its pidfd and its lifeline in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuzz.simulator.network import AttachPipe
from radixkv.commands import EndSession, MappingGone


@dataclass(eq=False)
class Process:
    """What pidfd and lifeline show of a worker."""

    number: int
    alive: bool = True
    heirs: int = 0
    stopped: bool = False


@dataclass(eq=False)
class Member:
    """One session's process. ``pipe`` None: a ghost.

    ``over``: the core knows that the session has ended; ``mapped``: and that it may still write. ``released``: its
    lifeline has ended, or there is none.
    """

    session: int
    process: int
    pipe: AttachPipe | None
    released: bool
    over: bool = False
    mapped: bool = False
    dead: bool = False
    closed: bool = False

    @property
    def gone(self) -> bool:
        """Proof that nobody can write to the session's pages any more."""
        return self.closed and self.dead and self.released


class Attendance:
    """``report``: carry out a command; True while pages of the session wait for the end of its mapping.

    ``forget``: take the session's pidfd and lifeline out of the store.
    """

    def __init__(
        self, report: Callable[[EndSession | MappingGone], bool], forget: Callable[[int], None], lifelines: bool
    ) -> None:
        self._report = report
        self._forget = forget
        self._lifelines = lifelines
        self.members: list[Member] = []

    def seat(self, session: int, pipe: AttachPipe) -> None:
        self.members.append(Member(session, pipe.process, pipe, released=not self._lifelines))

    def seat_ghost(self, session: int, process: int) -> None:
        self.members.append(Member(session, process, None, released=False, closed=True))

    def come_back(self, session: int, pipe: AttachPipe) -> None:
        """The ghost's worker has connected again."""
        ghost = self.of(session)
        assert ghost is not None
        ghost.pipe, ghost.closed = pipe, False

    def of(self, session: int) -> Member | None:
        return next((member for member in self.members if member.session == session), None)

    def ended(self, session: int, mapped: bool) -> None:
        """The core ended the session: by bye (not mapped) or by its own judgement."""
        member = self.of(session)
        if member is not None and not member.over:
            member.over, member.mapped = True, mapped

    # -- what a descriptor may tell -------------------------------------------------------------------------------

    def disconnected(self, member: Member) -> None:
        member.closed = True
        if member.pipe is not None:
            member.pipe.daemon_end = False
        self._progress(member, "its connection ended")

    def died(self, member: Member) -> None:
        member.dead = True
        self._progress(member, "its process ended")

    def let_go(self, member: Member) -> None:
        """End of file on the lifeline."""
        member.released = True
        if member.pipe is None or member.over:
            self._progress(member, "its lifeline ended")

    def _progress(self, member: Member, reason: str) -> None:
        if not member.over:
            member.over = True
            member.mapped = self._report(EndSession(member.session, not member.gone, reason))
        if member.gone and member.mapped:
            self._report(MappingGone(member.session))
        if member.gone or (not member.mapped and member.closed):
            self.members.remove(member)
            self._forget(member.session)
