"""The attach socket: who is there, and the way by which memory is handed over.

AF_UNIX, SOCK_SEQPACKET, one MessagePack record a packet (``wire.py``). The kernel says who the peer is (uid, and a
pidfd that stays right when process ids are used again); file descriptors travel by SCM_RIGHTS. The daemon's side never
blocks and takes no descriptors from peers; the worker's side waits up to its timeout.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from radixkv.commands import PROTOCOL_VERSION, AttachReply, Failure, Hello, Join, MapPool, PoolMap, Rejoin, Welcome
from radixkv.errors import BadRequest, PermissionDenied, RadixKVError, Unavailable, VersionMismatch, from_code
from radixkv.ipc import wire
from radixkv.ipc.endpoint import Endpoint, check_directory

PACKET_MAX = 64 * 1024
"""Bytes of a record in either direction."""

NOBODY_THERE = (FileNotFoundError, ConnectionRefusedError)
"""Causes of an Unavailable that mean: no daemon runs at the endpoint, rather than: one runs and does not answer."""

_FDS_MAX = 2
_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = 77


# -- the daemon's side --------------------------------------------------------------------------------------------


class Peer:
    """One accepted connection: its socket and a pidfd of the process that opened it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.pid, self.uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        self.pidfd = _pidfd_of(connection, self.pid)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> bytes | None:
        """The next packet; b"" at the end of the connection; None if nothing is there.

        Errors: BadRequest for a packet that is too long (it is dropped).
        """
        try:
            packet, _, flags, _ = self._socket.recvmsg(PACKET_MAX)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        if flags & socket.MSG_TRUNC:
            raise BadRequest(f"a packet has at most {PACKET_MAX} bytes")
        return packet

    def send(self, record: AttachReply, fds: Sequence[int] = ()) -> bool:
        """False: the peer does not take it (gone, or does not read)."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([wire.encode_attach(record)], rights)
        except OSError:
            return False
        return True

    def is_alive(self) -> bool:
        """Whether the process behind the connection still runs."""
        return _is_alive(self.pidfd)

    def shut(self) -> None:
        """The peer sees an end of the connection; we still see the peer's."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close_connection(self) -> None:
        self._socket.close()

    def close(self) -> None:
        self._socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Ghost:
    """A peer of an earlier daemon's time, of which only the pidfd is left."""

    def __init__(self, pidfd: int) -> None:
        self.pidfd = pidfd
        self.pid = _pid_behind(pidfd)

    def fileno(self) -> int:
        return -1

    def is_alive(self) -> bool:
        return _is_alive(self.pidfd)

    def shut(self) -> None:
        """There is no connection."""

    def close_connection(self) -> None:
        """There is none."""

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _is_alive(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)


def same_process(pidfd: int, other: int) -> bool:
    """Whether two pidfds mean the same living process."""
    return _is_alive(pidfd) and _process(pidfd) == _process(other)


def _pid_behind(pidfd: int) -> int:
    """As this pid namespace knows it; -1 if it is gone already, 0 if it is not known here."""
    line = next(line for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines() if line.startswith("Pid:"))
    return int(line.split()[1])


def _process(pidfd: int) -> tuple[int, str]:
    """Where pidfds have inode numbers of their own (Linux 6.9) the first tells processes apart, else the second."""
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return os.fstat(pidfd).st_ino, next(line for line in lines if line.startswith("Pid:"))


def _pidfd_of(connection: socket.socket, pid: int) -> int:
    """A pidfd of the peer, from the socket where the kernel can (6.5), else by its process id. Raises OSError."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(pid)


class Listener:
    """The listening attach socket (``open_socket``); it is closed with this."""

    def __init__(self, door: socket.socket) -> None:
        self._socket = door

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Peer | None:
        """The next peer of our own user (or root); None if there is none. Others get an answer and are closed.

        Errors: OSError when the process has no file descriptors left.
        """
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        try:
            peer = Peer(connection)
        except OSError:
            connection.close()
            return None
        if peer.uid in (os.getuid(), 0):
            return peer
        peer.send(Failure(PermissionDenied.code, f"uid {peer.uid} may not use the daemon of uid {os.getuid()}"))
        peer.close()
        return None

    def close(self) -> None:
        self._socket.close()


# -- the worker's side --------------------------------------------------------------------------------------------


class Mapping(NamedTuple):
    """A pool as it was handed over. Both descriptors belong to the receiver, who closes them when mapped."""

    pool: PoolMap
    arena_fd: int
    table_fd: int


class Attachment:
    """A worker's connection to the attach socket. As long as it is open the session lives.

    Not thread-safe: one question at a time. Every method may raise Unavailable (no daemon, no answer in time,
    connection closed; the attachment is then over) or the daemon's own refusal.
    """

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        """Connect, at most ``timeout`` seconds a step. Errors: Unavailable, PermissionDenied."""
        try:
            check_directory(endpoint)
        except FileNotFoundError as error:
            raise Unavailable(f"no daemon at {endpoint.address}") from error
        self._timeout = timeout
        self._lifeline = -1
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(os.fsencode(endpoint.attach_path))
        except OSError as error:
            self._socket.close()
            if isinstance(error, PermissionError):
                raise PermissionDenied(f"{endpoint.attach_path}: {error.strerror}") from error
            why = "" if isinstance(error, NOBODY_THERE) else f": {error.strerror or error}"
            raise Unavailable(f"no daemon at {endpoint.address}{why}") from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def hello(self, name: str = "") -> Welcome:
        """Open a session. Errors: VersionMismatch, LimitExceeded, Draining, PermissionDenied."""
        return self._enter(Hello(PROTOCOL_VERSION, name))

    def join(self, session: int, token: bytes, rank: int) -> Welcome:
        """Be a further process of a session. Errors: SessionLost (not known), BadRequest (no such rank, or taken)."""
        return self._enter(Join(PROTOCOL_VERSION, session, token, rank))

    def rejoin(self, session: int, token: bytes, rank: int = 0) -> Welcome:
        """Go on with a session of an earlier daemon's time: the same session, a new epoch.

        Waits as long as the connection stands, whatever the timeout: to hang up on a daemon that then takes the rejoin
        in would end the session. Errors: SessionLost (not known, or another's), Draining.
        """
        self._socket.settimeout(None)
        try:
            return self._enter(Rejoin(PROTOCOL_VERSION, session, token, rank))
        finally:
            if self.fileno() >= 0:
                self._socket.settimeout(self._timeout)

    def take_lifeline(self) -> int:
        """The file descriptor that came with the welcome, now the caller's; -1 if there is none.

        It is to be kept open as long as this process could write to a pool's memory: to the daemons, one after the
        other, its end says that nobody is left who inherited the connection.
        """
        lifeline, self._lifeline = self._lifeline, -1
        return lifeline

    def _enter(self, question: Hello | Rejoin | Join) -> Welcome:
        reply, fds = self._ask(question)
        if isinstance(reply, Welcome) and len(fds) <= 1:
            self._lifeline = fds[0] if fds else -1
            return reply
        _close_all(fds)
        raise _unexpected(reply)

    def map_pool(self, name: str) -> Mapping:
        """The file descriptors of a pool. Errors: BadRequest (no such pool), SessionLost."""
        reply, fds = self._ask(MapPool(name))
        if isinstance(reply, PoolMap) and len(fds) == _FDS_MAX:
            return Mapping(reply, fds[0], fds[1])
        _close_all(fds)
        raise _unexpected(reply)

    def close(self) -> None:
        self._socket.close()
        if self._lifeline >= 0:
            os.close(self.take_lifeline())

    def _ask(self, question: Hello | Rejoin | Join | MapPool) -> tuple[AttachReply, list[int]]:
        try:
            self._socket.send(wire.encode_attach(question))
            packet, fds = _receive(self._socket)
        except OSError as error:
            self.close()
            raise Unavailable(f"the daemon does not answer: {error.strerror or error}") from error
        if not packet:
            _close_all(fds)
            self.close()
            raise Unavailable("the daemon closed the connection")
        try:
            reply = wire.decode_attach_reply(packet)
        except VersionMismatch:
            _close_all(fds)
            raise
        if isinstance(reply, Failure):
            _close_all(fds)
            raise from_code(reply.code, reply.message, dict(reply.details))
        return reply, fds


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and the descriptors that came with it, none of them inheritable."""
    room = socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize)
    packet, messages, _, _ = connection.recvmsg(PACKET_MAX, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in messages:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return packet, list(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _unexpected(reply: AttachReply) -> RadixKVError:
    return VersionMismatch(f"the daemon gave an unexpected answer: {type(reply).__name__}")
