"""Who is attached: connections, the processes behind them, and what their ends mean for their sessions.

::

    accepted ──hello──> open ──┬─ connection ends ──> EndSession(mapped = process lives) ──┐
        │                      ├─ process ends ─────> EndSession(mapped = not all) ────────┤ the others end too
        │ nothing for 10 s     ├─ bye ──────────────> the core ended it, nothing mapped    ├──> MappingGone, forgotten
        v                      └─ revoked by core ──> still mapped ────────────────────────┘
      closed                    ^
    from the store ──> ghost ───┴─ rejoin; or its process, or its lifeline, ends: EndSession

A connection's end alone does not prove that nobody writes any more (a forked child may hold the mapping's process
open), nor does a process's end alone (a child may have inherited the connection): both must have been seen before
quarantined pages may be used again. A session that left no such pages is forgotten with its connection.

With a store (``fdstore.py``) each member also gets a *lifeline*, the write end of a pipe, which it keeps as it keeps
the connection. Connections end with the daemon; pidfd and read end are in the store, and the next daemon finds out by
them what it could not see: such a member is a *ghost* until its worker is back.

A session may have several processes, its *ranks*: the first said hello, the others join with the session's token. The
end of any of them ends the session; the others are hung up on, so that they learn it at once. Pages come back when all
of them are gone.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Collection, Sequence
from typing import Protocol

from radixkv.commands import (
    PROTOCOL_VERSION,
    EndSession,
    Failure,
    Hello,
    Join,
    MappingGone,
    PoolMap,
    Rejoin,
    Welcome,
    failure,
)
from radixkv.errors import BadRequest, LimitExceeded, RadixKVError, SessionLost, VersionMismatch
from radixkv.ipc import wire
from radixkv.ipc.attach import Ghost, Listener, Peer, same_process
from radixkv.ipc.fdstore import MEMBERS_MAX, Store, Stored
from radixkv.ipc.member import Member, Session, has_ended, mark_welcomed, stored_members, stored_name

HELLO_WITHIN_S = 10.0
"""A connection that has not said hello by then is closed."""

_ACCEPTS_A_ROUND = 16
_STRANGERS_MAX = 64
"""Connections without a session. One more, and the oldest is closed."""


class Host(Protocol):
    """What the daemon does for its members."""

    def open_session(self, session: int, name: str) -> Welcome | Failure: ...

    def rejoin_session(self, session: int, token: bytes) -> Welcome | Failure: ...

    def join_session(self, session: int, token: bytes, rank: int) -> Welcome | Failure: ...

    def map_pool(self, name: str, rank: int) -> tuple[PoolMap, tuple[int, int]] | Failure: ...

    def report(self, command: EndSession | MappingGone, pids: Collection[int] = ()) -> bool:
        """True: pages of the session are out of use until nothing of it maps the arena any longer.

        ``pids``: of the processes whose mappings are gone with them; who said bye may live on.
        """


class Members:
    """All attach connections, watched by one epoll object together with whatever else the daemon registers there."""

    def __init__(self, listener: Listener, epoll: select.epoll, host: Host, limit: int, store: Store | None) -> None:
        self._listener = listener
        self._epoll = epoll
        self._host = host
        self._limit = limit
        self._store = store
        self._by_fd: dict[int, Member] = {}
        """Open descriptors (connections, pidfds, lifelines) and whose they are."""
        self._sessions: dict[int, Session] = {}
        self._strangers: dict[Member, None] = {}
        self._listening = True
        epoll.register(listener.fileno(), select.EPOLLIN)

    def __len__(self) -> int:
        """Sessions whose processes or connections are not known to be gone."""
        return len(self._sessions)

    def adopt(self, stored: Stored, known: Collection[int]) -> list[int]:
        """Watch what the store has of an earlier daemon's members. ``known``: sessions that the core waits for.

        Those that nothing can watch are over, and their private pages stay out of use: nothing will tell when their
        processes are gone. They are returned.
        """
        for (identity, rank), name in stored_members(stored).items():
            fds = {stat.S_ISFIFO(os.fstat(fd).st_mode): fd for fd in stored[name]}
            if False not in fds:
                continue
            ghost = Member(Ghost(fds[False]), 0.0)
            ghost.lifeline = fds.get(True, -1)
            self._seat(ghost, self._sessions.setdefault(identity, Session(identity)), rank)
            self._watch(ghost, ghost.peer.pidfd, select.EPOLLIN)
            if ghost.lifeline >= 0:
                self._watch(ghost, ghost.lifeline, 0)
        unwatched = [identity for identity in known if not self._watches_first(identity)]
        for identity in unwatched:
            mapped = self._host.report(EndSession(identity, True, "the store has nothing to watch it by"))
            self.ended(identity, mapped)
        return unwatched

    def _watches_first(self, identity: int) -> bool:
        session = self._sessions.get(identity)
        return session is not None and 0 in session.members

    def handle(self, fd: int, now: float) -> bool:
        """React to a descriptor that something happened to. False: it is none of ours."""
        if self._listening and fd == self._listener.fileno():
            self._accept(now)
            return True
        member = self._by_fd.get(fd)
        if member is None:
            return False
        # An event may have been meant for an earlier owner of this number: look before believing it.
        if fd == member.peer.pidfd:
            if not member.peer.is_alive():
                self._died(member)
        elif fd == member.lifeline:
            if has_ended(fd):
                self._lifeline_ended(member)
        else:
            self._read(member)
        return True

    @property
    def settled(self) -> bool:
        """There is nothing that a sweep would find, now or later."""
        return self._listening and not self._strangers and (self._store is None or self._store.idle)

    def sweep(self, now: float) -> None:
        """Close connections that never said hello; take new ones again after the process was out of descriptors."""
        if self._store is not None:
            self._store.flush()
        for member in [member for member in self._strangers if now - member.since > HELLO_WITHIN_S]:
            self._forget(member)
        if not self._listening:
            self._listening = True
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def ended(self, identity: int, mapped: bool, *, bye: bool = False) -> None:
        """The core ended this session: by its first process's bye, or by its own judgement."""
        session = self._sessions.get(identity)
        if session is not None and not session.over:
            session.over = True
            session.mapped = mapped
            for rank, member in session.members.items():
                if rank:
                    member.peer.shut()
                else:
                    member.left = bye

    def close(self) -> None:
        """Close everything; what the store has stays there."""
        for member in {*self._by_fd.values()}:
            member.peer.close()
            if member.lifeline >= 0:
                os.close(member.lifeline)
        self._by_fd.clear()

    # -- events ---------------------------------------------------------------------------------------------------

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS_A_ROUND):
            try:
                peer = self._listener.accept()
            except OSError:  # no descriptors left: look again at the next sweep instead of spinning
                self._epoll.unregister(self._listener.fileno())
                self._listening = False
                return
            if peer is None:
                return
            if len(self._strangers) >= _STRANGERS_MAX:
                self._forget(next(iter(self._strangers)))
            member = Member(peer, now)
            self._strangers[member] = None
            for fd in (peer.fileno(), peer.pidfd):
                self._watch(member, fd, select.EPOLLIN)

    def _read(self, member: Member) -> None:
        peer = member.peer
        assert isinstance(peer, Peer)
        given: Sequence[int] = ()
        try:
            packet = peer.receive()
            if packet is None:
                return
            if not packet:
                self._disconnected(member)
                return
            answer, fds, given = self._answer(member, packet)
        except RadixKVError as error:
            answer, fds = failure(error), ()
        sent = peer.send(answer, fds)
        for fd in given:
            mark_welcomed(fd)
            os.close(fd)
        if not sent:
            self._disconnected(member)

    def _answer(self, member: Member, packet: bytes) -> _Answer:
        """The answer, the descriptors that go with it, and those of them that are not ours any more."""
        request = wire.decode_attach_request(packet)
        match request:
            case Hello():
                return self._hello(member, request)
            case Rejoin():
                return self._rejoin(member, request), (), ()
            case Join():
                return self._join(member, request)
        if member.session is None:
            raise BadRequest("say hello first")
        if member.session.over:
            raise SessionLost("this session is over")
        answer = self._host.map_pool(request.pool, member.rank)
        return (answer, (), ()) if isinstance(answer, Failure) else (*answer, ())

    def _hello(self, member: Member, hello: Hello) -> _Answer:
        self._check_new(member, hello.version)
        if len(self._sessions) >= 2 * self._limit:
            raise LimitExceeded("too many processes of ended sessions still live", limit=2 * self._limit)
        identity = int.from_bytes(os.urandom(8), "little") >> 2 or 1
        theirs = self._keep(member, identity, 0)
        answer = self._host.open_session(identity, hello.name)
        if isinstance(answer, Welcome):
            del self._strangers[member]
            self._seat(member, self._sessions.setdefault(identity, Session(identity)), 0)
        else:
            self._unkeep(member, identity, 0)
        return answer, theirs, theirs

    def _rejoin(self, member: Member, rejoin: Rejoin) -> Welcome | Failure:
        """The process behind a ghost is back. Nothing is new to the store: its pidfd and lifeline go on."""
        self._check_new(member, rejoin.version)
        session = self._sessions.get(rejoin.session)
        ghost = session.members.get(rejoin.rank) if session is not None and not session.over else None
        if session is None or ghost is None or not isinstance(ghost.peer, Ghost):
            raise SessionLost("there is no session to go on with")
        if not same_process(ghost.peer.pidfd, member.peer.pidfd):
            raise SessionLost("the session belongs to another process")
        if rejoin.rank:
            answer = self._host.join_session(session.id, rejoin.token, rejoin.rank)
        else:
            answer = self._host.rejoin_session(session.id, rejoin.token)
        if isinstance(answer, Welcome):
            del self._strangers[member]
            self._unwatch(ghost.peer.pidfd)
            ghost.peer.close()
            member.lifeline = ghost.lifeline
            if member.lifeline >= 0:
                self._by_fd[member.lifeline] = member
            self._seat(member, session, rejoin.rank)
        return answer

    def _join(self, member: Member, join: Join) -> _Answer:
        """A further process of a session that is there. Its end will be the session's."""
        self._check_new(member, join.version)
        session = self._sessions.get(join.session)
        if session is None or session.over:
            raise SessionLost("there is no session to join")
        if join.rank in session.members:
            raise BadRequest("this rank is taken", rank=join.rank)
        theirs = self._keep(member, session.id, join.rank)
        answer = self._host.join_session(session.id, join.token, join.rank)
        if isinstance(answer, Welcome):
            del self._strangers[member]
            self._seat(member, session, join.rank)
        else:
            self._unkeep(member, session.id, join.rank)
        return answer, theirs, theirs

    def _check_new(self, member: Member, version: int) -> None:
        if member.session is not None:
            raise BadRequest("this connection has a session already")
        if version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"this daemon speaks version {PROTOCOL_VERSION}, not {version}", daemon=PROTOCOL_VERSION, client=version
            )

    def _disconnected(self, member: Member) -> None:
        if member.closed:
            return
        self._unwatch(member.peer.fileno())
        member.peer.close_connection()
        member.closed = True
        if not member.dead and not member.peer.is_alive():
            self._died(member)
        else:
            self._progress(member, "its connection ended")

    def _died(self, member: Member) -> None:
        self._unwatch(member.peer.pidfd)
        member.dead = True
        if member.lifeline >= 0 and has_ended(member.lifeline):
            self._close_lifeline(member)
        self._progress(member, "its process ended")

    def _lifeline_ended(self, member: Member) -> None:
        """For a ghost this is what the end of its connection would be."""
        self._close_lifeline(member)
        if isinstance(member.peer, Ghost) or (member.session is not None and member.session.over):
            self._progress(member, "its lifeline ended")

    def _progress(self, member: Member, reason: str) -> None:
        """Tell the core what is new; forget the session when nothing more can come."""
        session = member.session
        if session is None:
            self._forget(member)
            return
        if not session.over:
            session.over = True
            session.mapped = self._host.report(EndSession(session.id, not session.gone, reason))
            for each in session.members.values():
                if not each.closed:
                    each.peer.shut()  # so that it learns it; its end is still seen here
        if session.gone and session.mapped:
            died = [each.peer.pid for each in session.members.values() if not each.left]
            self._host.report(MappingGone(session.id), died)
        if session.gone or (not session.mapped and session.closed):
            del self._sessions[session.id]
            for each in session.members.values():
                self._forget(each)

    # -- descriptors ----------------------------------------------------------------------------------------------

    def _seat(self, member: Member, session: Session, rank: int) -> None:
        member.session = session
        member.rank = rank
        session.members[rank] = member

    def _keep(self, member: Member, session: int, rank: int) -> tuple[int, ...]:
        """Have a member's pidfd and a new lifeline kept by the store, if there is one: the end that is the worker's.

        Errors: Unavailable, LimitExceeded.
        """
        if self._store is None:
            return ()
        if sum(len(each.members) for each in self._sessions.values()) >= MEMBERS_MAX:
            raise LimitExceeded("the store has no room for another process", limit=MEMBERS_MAX)
        try:
            ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise LimitExceeded(f"no pipe for another session: {error.strerror}") from error
        try:
            self._store.keep(stored_name(session, rank), member.peer.pidfd, ours)
        except RadixKVError:
            os.close(ours)
            os.close(theirs)
            raise
        member.lifeline = ours
        self._watch(member, ours, 0)
        return (theirs,)

    def _unkeep(self, member: Member, session: int, rank: int) -> None:
        if self._store is not None:
            self._store.drop(stored_name(session, rank))
        if member.lifeline >= 0:
            self._close_lifeline(member)

    def _forget(self, member: Member) -> None:
        self._strangers.pop(member, None)
        if not member.closed:
            self._unwatch(member.peer.fileno())
        if not member.dead:
            self._unwatch(member.peer.pidfd)
        if member.session is not None:
            self._unkeep(member, member.session.id, member.rank)
        member.peer.close()

    def _close_lifeline(self, member: Member) -> None:
        self._unwatch(member.lifeline)
        os.close(member.lifeline)
        member.lifeline = -1

    def _watch(self, member: Member, fd: int, events: int) -> None:
        """``events`` 0: only its end. The store has the same pipe open, so that epoll is told before we close ours."""
        self._by_fd[fd] = member
        self._epoll.register(fd, events)

    def _unwatch(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            self._epoll.unregister(fd)


_Answer = tuple[Welcome | PoolMap | Failure, Sequence[int], Sequence[int]]
