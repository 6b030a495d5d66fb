"""One thread's way to the daemon: a DEALER socket of its own, so that nobody waits behind another's reply.

A line also watches the session's attach connection: when that ends, no reply will come any more, and whoever waits is
told at once. Sockets are made and closed by their own thread, or by ``close`` while no exchange runs.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from typing import TypeAlias

import zmq

from radixkv.client import forks
from radixkv.client.batch import Outgoing
from radixkv.client.connection import ENDED, HANGUP, Connection
from radixkv.client.core import Core, no_reply
from radixkv.client.effects import Ask
from radixkv.client.session import Session
from radixkv.commands import Failure, Reply
from radixkv.errors import LimitExceeded, RadixKVError, Timeout, Unavailable
from radixkv.ipc import wire
from radixkv.ipc.endpoint import Endpoint

Steps: TypeAlias = Generator[Sequence[Outgoing], None, None]
"""What is to be done on a socket; yields where something has to come first: the answers to these messages, or, if there
are none, room to send."""

RECONNECT_MS = 20
LAST_WORDS_S = 0.1
"""How long a reply may take that left the daemon before the session ended."""


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
        """In a forked child."""
        self._context = None
        self._lock = threading.Lock()


_contexts = _Contexts()
os.register_at_fork(after_in_child=_contexts.forget)


class Patience:
    """Waiting for a socket: until a time, or shortly beyond the end of the session, whichever is first."""

    def __init__(self, core: Core, connection: Connection, socket_fd: int, until: float) -> None:
        self._core = core
        self._connection = connection
        self._until = until
        self._ended = False
        self._poll = select.poll()
        self._poll.register(socket_fd, select.POLLIN)
        self._poll.register(connection.fileno(), select.POLLRDHUP)

    def wait(self) -> None:
        """Until something happens. Errors: Timeout; Unavailable when the session has ended and nothing comes."""
        left = self._until - self._core.clock()
        ready = self._poll.poll(left * 1000) if left > 0 else []
        if not ready:
            raise Unavailable(ENDED) if self._ended else no_reply(self._core)
        for fd, events in ready:
            if fd == self._connection.fileno() and events & HANGUP:
                self._end()

    def _end(self) -> None:
        """No reply will leave any more; one that has left may still be on its way."""
        self._ended = True
        self._core.left(self._connection.session, self._connection.epoch)
        self._poll.unregister(self._connection.fileno())
        self._until = min(self._until, self._core.clock() + LAST_WORDS_S)


class Line:
    """Socket and waiting of one thread. ``sockets``: where the client keeps all its sockets, also beyond a thread."""

    def __init__(self, core: Core, endpoint: Endpoint, sockets: set[zmq.Socket[bytes]]) -> None:
        self._core = core
        self._endpoint = endpoint
        self._sockets = sockets
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._socket: zmq.Socket[bytes] | None = None
        self._connected: Connection | None = None

    def exchange(self, connection: Connection, ask: Ask, until: float) -> None:
        """Send what is asked and take in replies until all are there. Errors: Timeout, Unavailable, Away."""
        with self._lock, connection:
            socket = self._prepare(connection)
            patience = Patience(self._core, connection, int(socket.getsockopt(zmq.FD)), until)
            steps = self._steps(connection, ask, until)
            with closing(steps), suppress(StopIteration):
                next(steps)
                while True:
                    try:
                        patience.wait()
                    except BaseException as error:  # noqa: BLE001 - it is raised again, once the exchange is wound up
                        steps.throw(error)
                    next(steps)

    def _steps(self, connection: Connection, ask: Ask, until: float) -> Steps:
        """An exchange without its waiting. Who drives it throws in what ends the waiting too early."""
        socket, session = self._prepare(connection), connection.session
        yield from self._writable(socket)
        outgoing = self._core.envelop(ask, until, connection.epoch)
        try:
            for out in outgoing:
                yield from self._send(socket, out, session)
            while unanswered := [out for out in outgoing if out.reply is None]:
                if not self._take_in(socket, session):
                    yield unanswered
        except BaseException as error:
            interrupted = Timeout("the call was interrupted")
            self._core.abandon(outgoing, session, error if isinstance(error, RadixKVError) else interrupted)
            raise

    def close(self) -> bool:
        """Close the socket unless an exchange runs (then its thread does it). True if it is closed."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._close_socket()
        finally:
            self._lock.release()
        return True

    def _writable(self, socket: zmq.Socket[bytes]) -> Steps:
        """Until the daemon has accepted this socket: nothing may be queued for a daemon that is yet to come."""
        try:
            while not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                yield ()
        except Timeout as error:
            raise Unavailable(f"no daemon answers at {self._endpoint.address}") from error

    def _send(self, socket: zmq.Socket[bytes], out: Outgoing, session: Session) -> Steps:
        frame = wire.encode_request(out.request)
        limit = session.welcome.message_bytes
        if limit and len(frame) > limit:
            refusal = Failure(LimitExceeded.code, "too many bytes in a message", {"value": len(frame), "limit": limit})
            self._core.receive(out.request.id, refusal, session)
            return
        while True:
            try:
                socket.send(frame, zmq.NOBLOCK)
                return
            except zmq.Again:
                yield ()

    def _take_in(self, socket: zmq.Socket[bytes], session: Session) -> bool:
        """One reply, if one is there."""
        frame = _receive(socket)
        if frame is None:
            return False
        request, reply = wire.decode_reply(frame)
        if request != wire.UNREADABLE:
            self._settle(request, reply, session)
        elif isinstance(reply, Failure):
            raise LimitExceeded(f"the daemon could not read a message: {reply.message}")
        return True

    def _settle(self, request: int, reply: Reply, session: Session) -> None:
        self._core.receive(request, reply, session)

    def _prepare(self, connection: Connection) -> zmq.Socket[bytes]:
        """A socket of this connection's own: one that knew an earlier daemon may hold what nobody wants now."""
        if self._connected is not connection or self._socket is None:
            self._close_socket()
            self._socket = self._open_socket()
            self._connected = connection
        return self._socket

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
        self._connected = None

    def __del__(self) -> None:
        """With its thread; not in a forked child, which must not touch ZeroMQ."""
        if self._pid == os.getpid():
            self._close_socket()


def _receive(socket: zmq.Socket[bytes]) -> bytes | None:
    """The next reply; None if there is none yet. What has more than one frame is no reply."""
    try:
        while True:
            frame = socket.recv(zmq.NOBLOCK)
            if not socket.getsockopt(zmq.RCVMORE):
                return frame
            while socket.getsockopt(zmq.RCVMORE):
                socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
