"""A worker that speaks the protocol by hand: no client library between the test and the daemon."""

from __future__ import annotations

import os
import struct
import time
from typing import Any

import zmq

from radixkv.commands import READ_ONLY, Free, Reply, Request, Reserve, Stats, Step
from radixkv.device.descriptors import TableReader
from radixkv.ipc import wire
from radixkv.ipc.attach import Attachment
from radixkv.ipc.endpoint import resolve

REPLY_S = 20.0


def tokens(count: int, first: int = 0) -> bytes:
    return struct.pack(f"<{count}I", *range(first, first + count))


class RawWorker:
    """A session of this process: an attach connection and a DEALER socket."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = resolve(endpoint)
        self.attachment = Attachment(self.endpoint, REPLY_S)
        self.welcome = self.attachment.hello("raw")
        self.dealer = self.socket()
        self.request = 0

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
