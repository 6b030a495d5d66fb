"""Who is attached: connections, the processes behind them, and what their ends mean for their sessions.

::

    accepted ──hello──> open ──┬─ connection ends ──> EndSession(mapped = process lives) ──┐
        │                      ├─ process ends ─────> EndSession(mapped = not both) ───────┤ the other one ends too
        │ nothing for 10 s     ├─ bye ──────────────> the core ended it, nothing mapped    ├──> MappingGone, forgotten
        v                      └─ revoked by core ──> still mapped ────────────────────────┘
      closed

A connection's end alone does not prove that nobody writes any more (a forked child may hold the mapping's process
open), nor does a process's end alone (a child may have inherited the connection): both must have been seen before
quarantined pages may be used again. A session that left no such pages is forgotten with its connection.
"""

from __future__ import annotations

import select
from typing import Protocol

from radixkv.commands import (
    PROTOCOL_VERSION,
    EndSession,
    Failure,
    Hello,
    MappingGone,
    MapPool,
    PoolMap,
    Welcome,
    failure,
)
from radixkv.errors import BadRequest, LimitExceeded, RadixKVError, SessionLost, VersionMismatch
from radixkv.ipc import wire
from radixkv.ipc.attach import Listener, Peer

HELLO_WITHIN_S = 10.0
"""A connection that has not said hello by then is closed."""

_ACCEPTS_A_ROUND = 16
_STRANGERS_MAX = 64
"""Connections without a session. One more, and the oldest is closed."""


class Host(Protocol):
    """What the daemon does for its members."""

    def open_session(self, name: str) -> Welcome | Failure: ...

    def map_pool(self, name: str) -> tuple[PoolMap, tuple[int, int]] | Failure: ...

    def report(self, command: EndSession | MappingGone) -> bool:
        """True: pages of the session are out of use until nothing of it maps the arena any longer."""


class _Member:
    """One connection. ``over``: the core knows that the session has ended; ``mapped``: and that it may still write."""

    __slots__ = ("closed", "dead", "mapped", "over", "peer", "session", "since")

    def __init__(self, peer: Peer, since: float) -> None:
        self.peer = peer
        self.since = since
        self.session = 0
        self.over = False
        self.mapped = False
        self.closed = False
        self.dead = False


class Members:
    """All attach connections, watched by one epoll object together with whatever else the daemon registers there."""

    def __init__(self, listener: Listener, epoll: select.epoll, host: Host, limit: int) -> None:
        self._listener = listener
        self._epoll = epoll
        self._host = host
        self._limit = limit
        self._by_fd: dict[int, _Member] = {}
        """Open descriptors, connections and pidfds, and whose they are."""
        self._by_session: dict[int, _Member] = {}
        self._strangers: dict[_Member, None] = {}
        self._listening = True
        epoll.register(listener.fileno(), select.EPOLLIN)

    def __len__(self) -> int:
        """Sessions whose process or connection is not known to be gone."""
        return len(self._by_session)

    def handle(self, fd: int, now: float) -> bool:
        """React to a readable descriptor. False: it is none of ours."""
        if self._listening and fd == self._listener.fileno():
            self._accept(now)
            return True
        member = self._by_fd.get(fd)
        if member is None:
            return False
        if fd == member.peer.pidfd:
            if not member.peer.is_alive():  # the event may have been meant for an earlier owner of this number
                self._died(member)
        else:
            self._read(member)
        return True

    def sweep(self, now: float) -> None:
        """Close connections that never said hello; take new ones again after the process was out of descriptors."""
        for member in [member for member in self._strangers if now - member.since > HELLO_WITHIN_S]:
            self._forget(member)
        if not self._listening:
            self._listening = True
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def ended(self, session: int, mapped: bool) -> None:
        """The core ended this session: by bye (not mapped) or by its own judgement (mapped)."""
        member = self._by_session.get(session)
        if member is not None and not member.over:
            member.over = True
            member.mapped = mapped

    def close(self) -> None:
        for member in {*self._by_fd.values()}:
            member.peer.close()
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
            member = _Member(peer, now)
            self._strangers[member] = None
            for fd in (peer.fileno(), peer.pidfd):
                self._by_fd[fd] = member
                self._epoll.register(fd, select.EPOLLIN)

    def _read(self, member: _Member) -> None:
        try:
            packet = member.peer.receive()
            if packet is None:
                return
            if not packet:
                self._disconnected(member)
                return
            answer, fds = self._answer(member, packet)
        except RadixKVError as error:
            answer, fds = failure(error), ()
        if not member.peer.send(answer, fds):
            self._disconnected(member)

    def _answer(self, member: _Member, packet: bytes) -> tuple[Welcome | PoolMap | Failure, tuple[int, ...]]:
        request = wire.decode_attach_request(packet)
        if isinstance(request, Hello):
            return self._hello(member, request), ()
        if not member.session:
            raise BadRequest("say hello first")
        if member.over:
            raise SessionLost("this session is over")
        assert isinstance(request, MapPool)
        answer = self._host.map_pool(request.pool)
        return (answer, ()) if isinstance(answer, Failure) else answer

    def _hello(self, member: _Member, hello: Hello) -> Welcome | Failure:
        if member.session:
            raise BadRequest("this connection has a session already")
        if hello.version != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"this daemon speaks version {PROTOCOL_VERSION}, not {hello.version}",
                daemon=PROTOCOL_VERSION,
                client=hello.version,
            )
        if len(self._by_session) >= 2 * self._limit:
            raise LimitExceeded("too many processes of ended sessions still live", limit=2 * self._limit)
        answer = self._host.open_session(hello.name)
        if isinstance(answer, Welcome):
            member.session = answer.session
            self._by_session[member.session] = member
            del self._strangers[member]
        return answer

    def _disconnected(self, member: _Member) -> None:
        if member.closed:
            return
        self._unwatch(member.peer.fileno())
        member.peer.close_connection()
        member.closed = True
        if not member.dead and not member.peer.is_alive():
            self._died(member)
        else:
            self._progress(member, "its connection ended")

    def _died(self, member: _Member) -> None:
        self._unwatch(member.peer.pidfd)
        member.dead = True
        self._progress(member, "its process ended")

    def _progress(self, member: _Member, reason: str) -> None:
        """Tell the core what is new; forget the member when nothing more can come."""
        if not member.session:
            self._forget(member)
            return
        gone = member.closed and member.dead
        if not member.over:
            member.over = True
            member.mapped = self._host.report(EndSession(member.session, not gone, reason))
        if gone and member.mapped:
            self._host.report(MappingGone(member.session))
        if gone or (not member.mapped and member.closed):
            self._forget(member)

    def _forget(self, member: _Member) -> None:
        self._strangers.pop(member, None)
        self._by_session.pop(member.session, None)
        if not member.closed:
            self._unwatch(member.peer.fileno())
        if not member.dead:
            self._unwatch(member.peer.pidfd)
        member.peer.close()

    def _unwatch(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            self._epoll.unregister(fd)
