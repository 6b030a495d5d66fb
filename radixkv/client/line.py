"""One thread's way to the daemon: a DEALER socket of its own, so that nobody waits behind another's reply.

A line also watches the session's attach connection: when that ends, no reply will come any more, and whoever waits is
told at once. Sockets are made and closed by their own thread, or by ``close`` while no exchange runs.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable

import zmq

from radixkv.client import forks
from radixkv.client.batch import Outgoing
from radixkv.client.core import Core
from radixkv.client.effects import Ask, Repeat
from radixkv.client.session import Session
from radixkv.errors import LimitExceeded, RadixKVError, Timeout, Unavailable
from radixkv.ipc import wire
from radixkv.ipc.attach import Attachment
from radixkv.ipc.endpoint import Endpoint

RECONNECT_MS = 20
HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class _Contexts:
    """One ZeroMQ context a process. A forked child makes one of its own and leaves its parent's alone.

    Never terminated, nor finalised: that would wait for, or close, sockets of other threads.
    """

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._lock = threading.Lock()

    def get(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context()
                forks.keep_for_good(self._context)
            return self._context

    def forget(self) -> None:
        self.__init__()  # type: ignore[misc]


_contexts = _Contexts()
os.register_at_fork(after_in_child=_contexts.forget)


class Connection:
    """A session's attach connection. The session lives as long as it is open; anyone may watch it and hang up."""

    def __init__(self, attachment: Attachment, session: Session) -> None:
        self.attachment = attachment
        self.session = session
        self._pid = os.getpid()
        self._fd = os.dup(attachment.fileno())

    def fileno(self) -> int:
        return self._fd

    def hang_up(self) -> None:
        """End the session. All who watch the connection wake up; its descriptor stays valid as long as they do."""
        try:
            with socket.socket(fileno=os.dup(self._fd)) as end:
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster

    def ended(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        return bool(poll.poll(0))

    def forget(self) -> None:
        """In a forked child: let go of the connection without ending it."""
        self.attachment.close()
        os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if self._pid == os.getpid() and self._fd >= 0:
            self.attachment.close()
            os.close(self._fd)


class Line:
    """Socket and waiting of one thread. ``sockets``: where the client keeps all its sockets, also beyond a thread."""

    def __init__(self, core: Core, endpoint: Endpoint, sockets: set[zmq.Socket[bytes]]) -> None:
        self._core = core
        self._endpoint = endpoint
        self._sockets = sockets
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._socket: zmq.Socket[bytes] | None = None
        self._connection: Connection | None = None
        self._why_ended: Callable[[], RadixKVError] = _gone

    def explain(self, why: Callable[[], RadixKVError]) -> Line:
        """What to raise when the session ends while somebody waits."""
        self._why_ended = why
        return self

    def exchange(self, connection: Connection, effect: Ask | Repeat, until: float) -> None:
        """Send what is asked and take in replies until all are there. Errors: Timeout, Unavailable, LimitExceeded."""
        with self._lock:
            poll = self._prepare(connection)
            self._wait_writable(poll, until)
            outgoing = self._messages(effect, until)
            try:
                for out in outgoing:
                    self._send(poll, wire.encode_request(out.request), until)
                while any(out.reply is None for out in outgoing):
                    self._take_in(poll, connection.session, until)
            except BaseException as error:
                reason = error if isinstance(error, RadixKVError) else Timeout("the call was interrupted")
                if isinstance(effect, Ask):
                    self._core.abandon(outgoing, connection.session, reason)
                raise

    def _messages(self, effect: Ask | Repeat, until: float) -> list[Outgoing]:
        if isinstance(effect, Ask):
            return self._core.envelop(effect, until)
        self._core.again(effect.outgoing)
        return [effect.outgoing]

    def close(self) -> bool:
        """Close the socket unless an exchange runs (then its thread does it). True if it is closed."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._close_socket()
        finally:
            self._lock.release()
        return True

    # -- waiting --------------------------------------------------------------------------------------------------

    def _take_in(self, poll: select.poll, session: Session, until: float) -> None:
        """One reply, or wait for one."""
        frame = self._receive()
        if frame is None:
            self._wait(poll, until)
            return
        request, reply = wire.decode_reply(frame)
        if request == wire.UNREADABLE:
            raise LimitExceeded("the daemon could not read a message: it is larger than the daemon takes")
        self._core.receive(request, reply, session)

    def _receive(self) -> bytes | None:
        """The next reply; None if there is none yet, b"" never."""
        assert self._socket is not None
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
            if not self._socket.getsockopt(zmq.RCVMORE):
                return frame
            while self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._receive()

    def _send(self, poll: select.poll, frame: bytes, until: float) -> None:
        assert self._socket is not None
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
                return
            except zmq.Again:
                self._wait(poll, until)

    def _wait_writable(self, poll: select.poll, until: float) -> None:
        """Until the daemon has accepted this socket: nothing may be queued for a daemon that is yet to come."""
        assert self._socket is not None
        while not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            try:
                self._wait(poll, until)
            except Timeout as error:
                raise Unavailable(f"no daemon answers at {self._endpoint.address}") from error

    def _wait(self, poll: select.poll, until: float) -> None:
        """Until something happens on the socket. Errors: Timeout; Unavailable when the session ended meanwhile."""
        assert self._connection is not None
        left = until - self._core.clock()
        ready = poll.poll(max(0.0, left) * 1000) if left > 0 else []
        if not ready:
            raise Timeout("no reply in time", limit_s=self._core.timeout)
        for fd, events in ready:
            if fd == self._connection.fileno() and events & HANGUP:
                self._end_wait(ready)

    def _end_wait(self, ready: list[tuple[int, int]]) -> None:
        """The connection ended; replies that were faster still count."""
        if len(ready) > 1:
            return
        assert self._connection is not None
        self._core.ended(self._connection.session)
        raise self._why_ended()

    # -- the socket -----------------------------------------------------------------------------------------------

    def _prepare(self, connection: Connection) -> select.poll:
        """A socket that was connected for this session, and what to wait for."""
        if self._connection is not connection or self._socket is None:
            self._close_socket()
            self._socket = self._open_socket()
            self._connection = connection
        poll = select.poll()
        poll.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)
        poll.register(connection.fileno(), select.POLLRDHUP)
        return poll

    def _open_socket(self) -> zmq.Socket[bytes]:
        fresh = _contexts.get().socket(zmq.DEALER)
        fresh.setsockopt(zmq.LINGER, 0)
        fresh.setsockopt(zmq.IMMEDIATE, 1)
        fresh.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        fresh.connect(self._endpoint.address)
        self._sockets.add(fresh)
        return fresh

    def _close_socket(self) -> None:
        if self._socket is not None and self._pid == os.getpid():
            self._sockets.discard(self._socket)
            self._socket.close()
        self._socket = None
        self._connection = None

    def __del__(self) -> None:
        """With its thread; not in a forked child, which must not touch ZeroMQ."""
        if self._pid == os.getpid():
            self._close_socket()


def _gone() -> RadixKVError:
    return Unavailable("the daemon went away")
