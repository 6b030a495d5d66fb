"""A worker that speaks the protocol by hand: no client library between the test and the daemon."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

import zmq

from radixkv.commands import (
    PROTOCOL_VERSION,
    READ_ONLY,
    AttachReply,
    AttachRequest,
    Free,
    Hello,
    MapPool,
    PoolMap,
    Rejoin,
    Reply,
    Request,
    Reserve,
    Stats,
    Step,
    Welcome,
)
from radixkv.device.descriptors import TableReader
from radixkv.ipc import wire
from radixkv.ipc.attach import Attachment, Mapping
from radixkv.ipc.endpoint import resolve

REPLY_S = 20.0


def tokens(count: int, first: int = 0) -> bytes:
    return struct.pack(f"<{count}I", *range(first, first + count))


class RawAttachment:
    """The attach connection by hand: a worker that keeps its lifeline and can come back to the next daemon."""

    def __init__(self, endpoint: str) -> None:
        self._path = str(resolve(endpoint).attach_path)
        self._socket = self._connect()
        self.lifelines: list[int] = []

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(REPLY_S)
        connection.connect(self._path)
        return connection

    def ask(self, record: AttachRequest) -> tuple[AttachReply, list[int]]:
        self._socket.send(wire.encode_attach(record))
        packet, fds, _, _ = socket.recv_fds(self._socket, 65536, 4)
        assert packet, "the daemon closed the connection"
        return wire.decode_attach_reply(packet), fds

    def hello(self, name: str = "raw") -> Welcome:
        welcome, self.lifelines = self.ask(Hello(PROTOCOL_VERSION, name))
        assert isinstance(welcome, Welcome)
        return welcome

    def rejoin(self, welcome: Welcome) -> AttachReply:
        """On a new connection, which is served as soon as a daemon runs."""
        self._socket.close()
        self._socket = self._connect()
        reply, fds = self.ask(Rejoin(PROTOCOL_VERSION, welcome.session, welcome.token))
        assert not fds
        return reply

    def map_pool(self, name: str) -> Mapping:
        reply, fds = self.ask(MapPool(name))
        assert isinstance(reply, PoolMap)
        return Mapping(reply, *fds)

    def close(self) -> None:
        self._socket.close()
        for fd in self.lifelines:
            os.close(fd)
        self.lifelines = []


class RawWorker:
    """A session of this process: an attach connection and a DEALER socket."""

    def __init__(self, endpoint: str, resumes: bool = False) -> None:
        self.endpoint = resolve(endpoint)
        self.attachment: Any = RawAttachment(endpoint) if resumes else Attachment(self.endpoint, REPLY_S)
        self.welcome: Welcome = self.attachment.hello("raw")
        self.dealer = self.socket()
        self.request = 0

    def rejoin(self) -> AttachReply:
        """Go on with the next daemon; what the old one did not answer is never asked again."""
        reply = self.attachment.rejoin(self.welcome)
        if isinstance(reply, Welcome):
            self.welcome = reply
            self.dealer.close()
            self.dealer = self.socket()
        return reply

    def socket(self, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        made = zmq.Context.instance().socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVTIMEO, int(REPLY_S * 1000))
        made.setsockopt(zmq.SNDTIMEO, int(REPLY_S * 1000))
        made.connect(self.endpoint.address)
        return made

    def frame(self, body: Any, *, identity: int | None = None, deadline_s: float = REPLY_S) -> bytes:
        """A request of this session; without ``identity`` it gets the next id."""
        if identity is None:
            self.request += 1
            identity = self.request
        session = (0, 0) if isinstance(body, READ_ONLY) else (self.welcome.session, self.welcome.epoch)
        return wire.encode_request(Request(*session, identity, time.monotonic() + deadline_s, body))

    def send(self, body: Any, **how: Any) -> int:
        self.dealer.send(self.frame(body, **how))
        return self.request

    def receive(self, dealer: zmq.Socket[bytes] | None = None) -> tuple[int, Reply]:
        (frame,) = (dealer or self.dealer).recv_multipart()
        return wire.decode_reply(frame)

    def ask(self, body: Any, **how: Any) -> Any:
        """The reply to this request; nothing else may be on its way."""
        sent = self.send(body, **how)
        identity, reply = self.receive()
        assert identity == how.get("identity", sent)
        return reply

    def reserve(self, seq: int, prompt: bytes, headroom: int = 0, wait_s: float = 0.0) -> Any:
        return self.ask(Reserve("default", seq, b"ns", prompt, headroom, "copy", wait_s))

    def free(self, *seqs: int) -> Any:
        return self.ask(Step(free=[Free(seq) for seq in seqs]))

    def stats(self) -> dict[str, Any]:
        return self.ask(Stats()).snapshot

    def pages(self) -> dict[str, int]:
        """States that at least one page is in."""
        return {state: count for state, count in self.stats()["pools"]["default"]["pages"].items() if count}

    def table(self) -> TableReader:
        mapping = self.attachment.map_pool("default")
        os.close(mapping.arena_fd)
        return TableReader(mapping.table_fd)

    def close(self) -> None:
        self.dealer.close()
        self.attachment.close()
