"""One question to a daemon by somebody who has no session: asked once, answered or not."""

from __future__ import annotations

import time
from contextlib import closing

import zmq

from radixkv.commands import Failure, Reply, Request, Shutdown, Stats
from radixkv.errors import Unavailable, from_code
from radixkv.ipc import wire
from radixkv.ipc.endpoint import Endpoint

_ID = 1


def ask(endpoint: Endpoint, body: Stats | Shutdown, timeout_s: float) -> Reply:
    """The daemon's answer. It is not carried out after ``timeout_s``, also by a daemon that comes later.

    Errors: Unavailable when none comes in time, or the daemon's own refusal.
    """
    with zmq.Context() as context, closing(context.socket(zmq.DEALER)) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint.address)
        dealer.send(wire.encode_request(Request(0, 0, _ID, time.monotonic() + timeout_s, body)))
        if not dealer.poll(int(timeout_s * 1000)):
            raise Unavailable(f"no answer from {endpoint.address}")
        _, reply = wire.decode_reply(dealer.recv())
    if isinstance(reply, Failure):
        raise from_code(reply.code, reply.message, dict(reply.details))
    return reply
