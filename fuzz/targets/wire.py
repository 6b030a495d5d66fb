"""Bytes that a peer might send: the codec reads them within its limits or refuses them by a typed error."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from fuzz.model.mismatch import expect, require
from fuzz.registry import Swarm
from radixkv import commands, errors
from radixkv.config import Limits
from radixkv.ipc import wire

LIMITS = Limits(message_bytes=100_000, tokens=500, batch_items=50)
HOSTILE = [
    b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
    b"\x91" * 100, b"\x91" * 50_000, b"\x81\xa1a" * 20_000, b"\x95\x01\x01\x01\xcb\x7f\xf8\0\0\0\0\0\0\x91\xa5stats",
    b"\x9f" + b"\xdd\xff\xff\xff\xff" * 15, b"\x81\x91\x01\x02", b"\x81\xc0\x01", b"\xa2\xff\xfe", b"\xd6\xff\0\0\0\0",
]  # fmt: skip
OPERATIONS = ["whole", "flip", "cut", "insert", "splice", "noise", "hostile", "reply", "attach"]


class WireTarget:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._swarm = Swarm(rng, OPERATIONS, always=("flip",))
        self.events: Counter[str] = Counter()

    def step(self) -> None:
        operation = self._swarm.pick()
        if operation in ("reply", "attach"):
            self._answers(operation == "attach")
            return
        request = self._request()
        frame = wire.encode_request(request)
        if operation == "whole":
            expect("I17", "round trip", wire.decode_request(frame, LIMITS), request)
            expect("I17", "peeked id", wire.peek_id(frame), request.id)
            self.events["whole"] += 1
        else:
            self._read(self._spoil(operation, frame))

    def _read(self, frame: bytes) -> None:
        """Any bytes: a request within the limits, or one of two errors that carry the id to answer."""
        peeked = wire.peek_id(frame)
        require("I17", 0 <= peeked < 2**63, f"peeked id {peeked}")
        try:
            request = wire.decode_request(frame, LIMITS)
        except (errors.BadRequest, errors.LimitExceeded) as refused:
            require("I17", isinstance(refused.details.get("request"), int), "a refusal without the request's id")
            self.events["refused"] += 1
            return
        self.events["accepted"] += 1
        require("I17", request.id == peeked, f"id {request.id} read, {peeked} peeked")
        again = wire.decode_request(wire.encode_request(request), LIMITS)
        expect("I17", "read again", again, request)
        within_limits(request.body)

    def _answers(self, attach: bool) -> None:
        """The client's side, and the attach socket: typed errors there too."""
        rng = self._rng
        if attach:
            records: list[commands.AttachRequest | commands.AttachReply] = [
                commands.Hello(1, "w"),
                commands.MapPool("a"),
                _welcome(rng),
                commands.Failure("x", "y"),
            ]
            frame = wire.encode_attach(rng.choice(records))
            readers: list[tuple[Callable[[bytes], Any], type[Exception]]] = [
                (wire.decode_attach_request, errors.BadRequest),
                (wire.decode_attach_reply, errors.VersionMismatch),
            ]
        else:
            replies: list[commands.Reply] = [
                commands.Reserved(b"\0" * 4, 0, 0, [(1, 2, 3)]),
                commands.Done(),
                commands.Invalidated(3),
            ]
            frame = wire.encode_reply(rng.randint(0, 99), rng.choice(replies))
            readers = [(wire.decode_reply, errors.VersionMismatch)]
        spoilt = self._spoil(rng.choice(("flip", "cut", "insert", "noise", "hostile")), frame)
        for read, allowed in readers:
            try:
                read(spoilt)
            except allowed:
                self.events["refused"] += 1

    # -- drawing ------------------------------------------------------------------------------------------------

    def _spoil(self, operation: str, frame: bytes) -> bytes:
        rng = self._rng
        at = rng.randrange(len(frame))
        match operation:
            case "flip":
                spoilt = bytearray(frame)
                for _ in range(rng.choice((1, 1, 2, 5))):
                    spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
                return bytes(spoilt)
            case "cut":
                return frame[:at]
            case "insert":
                return frame[:at] + rng.choice([*HOSTILE[:6], rng.randbytes(rng.randint(1, 9))]) + frame[at:]
            case "splice":
                other = wire.encode_request(self._request())
                return frame[:at] + other[rng.randrange(len(other)) :]
            case "noise":
                return rng.randbytes(rng.choice((1, 7, 40, 4096)))
            case _:
                return rng.choice(HOSTILE)

    def _natural(self) -> int:
        return self._rng.choice((0, 1, 7, 127, 128, 2**31, 2**63 - 2, self._rng.randint(0, 99)))

    def _request(self) -> commands.Request:
        rng = self._rng
        deadline = rng.choice((0.0, -1.0, 1e18, rng.uniform(0, 1e6)))
        return commands.Request(self._natural(), self._natural(), self._natural() or 1, deadline, self._body())

    def _tokens(self) -> bytes:
        return self._rng.randbytes(4 * self._rng.choice((0, 1, 3, 100)))

    def _body(self) -> commands.Body:
        rng, n = self._rng, self._natural
        canonical, few = rng.randbytes(rng.choice((0, 1, 1024))), rng.randint(0, 3)
        last_page = rng.choice(("copy", "keep", "drop"))
        bodies: list[commands.Body] = [
            commands.Reserve("pool", n(), canonical, self._tokens(), few, last_page, 1.0),
            self._step_body(),
            commands.Handoff(n(), rng.randbytes(16), rng.uniform(0, 86400)),
            commands.Adopt("p" * 64, rng.randbytes(16), n()),
            commands.Compact(n()),
            commands.Invalidate("pool", canonical),
            commands.Lookup("pool", canonical, [self._tokens() for _ in range(few)]),
            commands.Cancel(n()),
            commands.Heartbeat(),
            commands.Bye(),
            commands.Stats(),
        ]
        return rng.choice(bodies)

    def _step_body(self) -> commands.Step:
        rng, n = self._rng, self._natural
        return commands.Step(
            free=[commands.Free(n(), rng.choice((0, n()))) for _ in range(rng.randint(0, 3))],
            truncate=[commands.Truncate(n(), n()) for _ in range(rng.randint(0, 3))],
            commit=[commands.Commit(n(), n()) for _ in range(rng.randint(0, 3))],
            extend=[commands.Extend(n(), self._tokens(), rng.randint(0, 9)) for _ in range(rng.randint(0, 3))],
            share=[commands.Share(n(), rng.choice((None, n())), rng.randint(0, 9), n() // 2) for _ in range(2)],
            copied=[n() for _ in range(rng.randint(0, 3))],
        )


def within_limits(body: commands.Body) -> None:
    """Raise Mismatch if a request got through that is larger than configured."""
    match body:
        case commands.Step():
            items = [*body.free, *body.truncate, *body.commit, *body.extend, *body.share, *body.copied]
            require("I19", len(items) <= LIMITS.batch_items, f"{len(items)} items")
            require("I19", sum(share.count for share in body.share) <= LIMITS.batch_items, "too many children")
            prompts = [item.tokens for item in body.extend]
        case commands.Reserve():
            prompts = [body.tokens]
        case commands.Lookup():
            require("I19", len(body.prompts) <= LIMITS.batch_items, f"{len(body.prompts)} prompts")
            prompts = body.prompts
        case _:
            prompts = []
    for prompt in prompts:
        require("I19", len(prompt) <= 4 * LIMITS.tokens and len(prompt) % 4 == 0, f"{len(prompt)} bytes of tokens")


def _welcome(rng: random.Random) -> commands.Welcome:
    return commands.Welcome(1, rng.randint(1, 99), 1, 0, rng.randbytes(16), "boot", "cache", ["a"], 5.0, 60.0)
