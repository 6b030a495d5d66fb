"""The daemon's ZeroMQ socket: requests in, each with the way back; replies out, none of which ever blocks.

A peer that does not read, or is gone, loses its replies: they are counted here and still kept in the session's reply
window, where a repeat of the request finds them. Frame ids are used for the way back and mean nothing else.
"""

from __future__ import annotations

import socket

import zmq

from radixkv.commands import Failure, Granted, Reply, Request
from radixkv.config import Limits
from radixkv.errors import BadRequest, RadixKVError
from radixkv.ipc import wire
from radixkv.ipc.endpoint import Endpoint

SEND_QUEUE = 256
RECEIVE_QUEUE = 32
"""Messages libzmq holds for one peer and direction. A peer that sends faster is held back by its own socket."""

_NOBLOCK = int(zmq.NOBLOCK)
_WITH_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
"""As plain numbers: each operation on pyzmq's enums costs the daemon 1 us."""

_HANDSHAKE_MS = 3_000
_LINGER_MS = 200

Incoming = tuple[bytes, Request, int]
"""The way back, the request, the bytes of its frame."""


class Router:
    """The ROUTER on a listening unix socket (``open_socket``), which is closed with it. One thread uses it.

    libzmq is given a socket instead of a path, so that a socket somebody else keeps can go on after our end.
    """

    def __init__(self, endpoint: Endpoint, limits: Limits, door: socket.socket) -> None:
        self._limits = limits
        self._routes: dict[tuple[int, int], bytes] = {}
        """Where the latest sender of a queued request is, by session and request id; oldest first."""
        self.malformed = 0
        self.dropped_replies = 0
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self._recv = self.socket.recv
        # What zmq.Socket.send calls when it has looked at options for other kinds of sockets, which takes 1 us.
        self._send = super(zmq.Socket, self.socket).send
        for option, value in (
            (zmq.LINGER, _LINGER_MS),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, SEND_QUEUE),
            (zmq.RCVHWM, RECEIVE_QUEUE),
            (zmq.MAXMSGSIZE, 2 * limits.message_bytes),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.USE_FD, door.detach()),
        ):
            self.socket.setsockopt(option, value)
        self.socket.bind(endpoint.address)

    def receive(self) -> Incoming | None:
        """The next request; None if nothing is there, or what was there could not be read and was answered."""
        try:
            route = self._recv(_NOBLOCK)
        except zmq.Again:
            return None
        # A ROUTER puts its frame before the peer's, of which there is at least one. Frames know whether more follow; to
        # ask the socket takes 1 us.
        frame = self._recv(_NOBLOCK, False)
        if frame.more:
            self._refuse(route, BadRequest(f"a request is one frame, not {1 + self._skip_frames()}"))
            return None
        content = memoryview(frame)  # type: ignore[arg-type]  # what frame.buffer gives, without its weak reference
        try:
            return route, wire.decode_request(content, self._limits), len(content)
        except RadixKVError as error:
            self._refuse(route, error)
            return None

    def _skip_frames(self) -> int:
        """Take the rest of a message off the socket."""
        count = 1
        while self.socket.recv(_NOBLOCK, copy=False).more:
            count += 1
        return count

    def _refuse(self, route: bytes, error: RadixKVError) -> None:
        self.malformed += 1
        details = dict(error.details)
        request = details.pop("request", wire.UNREADABLE)
        self.send(route, int(request), Failure(error.code, error.message, details))

    def send(self, route: bytes, request: int, reply: Reply) -> None:
        """Send a reply, or drop and count it when the peer is gone or its queue is full."""
        frame = wire.encode_reply(request, reply)
        try:
            self._send(route, _WITH_MORE)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.dropped_replies += 1
            return
        self._send(frame, _NOBLOCK)

    # -- answers that come later --------------------------------------------------------------------------------

    def remember(self, route: bytes, request: Request) -> None:
        """This request waits in a queue: its answer goes to the latest place that asked."""
        key = (request.session, request.id)
        self._routes.pop(key, None)
        self._routes[key] = route
        if len(self._routes) > self._limits.queued:
            del self._routes[next(iter(self._routes))]

    def grant(self, granted: Granted) -> None:
        """Send the answer of a request that waited. Without a known way back it stays in the reply window."""
        route = self._routes.pop((granted.session, granted.request), None)
        if route is None:
            self.dropped_replies += 1
        else:
            self.send(route, granted.request, granted.reply)

    def forget(self, session: int) -> None:
        """A session is over: nobody asks for its queued requests any more."""
        for key in [key for key in self._routes if key[0] == session]:
            del self._routes[key]

    def close(self) -> None:
        """Give the last replies a moment to leave."""
        self.socket.close()
        self._context.term()
