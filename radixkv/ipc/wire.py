"""The codec: what the records of ``commands.py`` look like as bytes. No sockets here.

::

    request  [session, epoch, id, deadline, body]     one ZeroMQ frame
    reply    [id, body]                               one ZeroMQ frame
    attach   body                                     one packet of the attach socket
    body     [tag, field, field, ...]                 unknown trailing fields are ignored

Whatever bytes a peer sends, ``decode_request`` either returns a request that is within the limits or raises
``BadRequest`` or ``LimitExceeded`` (with ``request``, the request's id, or 0 if that cannot be read). It never raises
anything else, and it never takes more memory than a small multiple of the frame.
"""

from __future__ import annotations

import struct
from math import isfinite
from typing import Annotated

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.msgpack import Decoder, Encoder

from radixkv.commands import (
    AttachReply,
    AttachRequest,
    Body,
    Lookup,
    Natural,
    Reply,
    Request,
    Reserve,
    Step,
)
from radixkv.config import LAST_PAGE_MODES, Limits
from radixkv.errors import BadRequest, LimitExceeded, VersionMismatch
from radixkv.types import TOKEN_BYTES

Buffer = bytes | memoryview

UNREADABLE = 0
"""The id under which a request is answered whose own id cannot be read."""

_OUTLINE_BYTES = 192 * 1024
"""Frames above this have their lists counted before anything is built from them. What is built from smaller ones is at
most 33 times as large and takes at most 8 ms; most of those are prompts, of which the counting takes 4 to 9 us."""

_BODY_FIELDS_MAX = 64
_INT_MAX = 2**63 - 1
_UNREADABLE_ERRORS = (DecodeError, RecursionError, UnicodeDecodeError, OverflowError)
"""All that msgspec raises for bytes it cannot take (ValidationError is a DecodeError)."""


class _Outline(Struct, array_like=True, frozen=True):
    """A request of which only the lengths of the body's fields are looked at."""

    session: Raw
    epoch: Raw
    id: Raw
    deadline: Raw
    body: Annotated[list[Raw], Meta(max_length=_BODY_FIELDS_MAX)]


class _Answer(Struct, array_like=True, frozen=True):
    id: Natural
    body: Reply


_encode = Encoder().encode
_decode_request = Decoder(Request).decode
_decode_outline = Decoder(_Outline).decode
_decode_answer = Decoder(_Answer).decode
_decode_attach_request = Decoder(AttachRequest).decode
_decode_attach_reply = Decoder(AttachReply).decode


# -- requests -----------------------------------------------------------------------------------------------------


def encode_request(request: Request) -> bytes:
    return _encode(request)


def decode_request(frame: Buffer, limits: Limits) -> Request:
    """The request in a frame.

    Errors: BadRequest (can never be right), LimitExceeded (larger than a limit); both carry ``request``.
    """
    size = len(frame)
    if size > limits.message_bytes:
        raise _too_many("bytes in a message", size, limits.message_bytes, peek_id(frame))
    try:
        if size > _OUTLINE_BYTES:
            _check_outline(frame, limits)
        request = _decode_request(frame)
    except _UNREADABLE_ERRORS as error:
        raise BadRequest(f"cannot be read: {str(error)[:200]}", request=peek_id(frame)) from None
    if not isfinite(request.deadline):
        raise BadRequest("the deadline is not a finite number", request=request.id)
    _check_body(request.body, limits, request.id)
    return request


def _check_outline(frame: Buffer, limits: Limits) -> None:
    """Refuse lists that are too long by their announced length, before a list of that length exists."""
    outline = _decode_outline(frame)
    items = sum(_announced_items(memoryview(field)) for field in outline.body)
    if items > limits.batch_items:
        raise _too_many("items in a message", items, limits.batch_items, peek_id(frame))


def _announced_items(field: memoryview) -> int:
    """Length of the list that begins here; 0 if it is none."""
    kind = field[0]
    if 0x90 <= kind <= 0x9F:
        return kind & 0x0F
    if kind == 0xDC:
        return int.from_bytes(field[1:3], "big")
    if kind == 0xDD:
        return int.from_bytes(field[1:5], "big")
    return 0


def peek_id(frame: Buffer) -> int:
    """The id of a request whose body may be anything; UNREADABLE if not even that can be read."""
    try:
        kind = frame[0]
        at = 1 if 0x95 <= kind <= 0x9F else {0xDC: 3, 0xDD: 5}[kind]
        for _ in range(2):
            _, at = _peek_integer(frame, at)
        found, _ = _peek_integer(frame, at)
    except (IndexError, KeyError, struct.error):
        return UNREADABLE
    return found if 0 <= found <= _INT_MAX else UNREADABLE


_INTEGERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}


def _peek_integer(frame: Buffer, at: int) -> tuple[int, int]:
    """The MessagePack integer at an offset (signed too: an encoder may choose so) and the offset behind it."""
    kind = frame[at]
    if kind < 0x80:
        return kind, at + 1
    layout = _INTEGERS[kind]
    (value,) = struct.unpack_from(layout, frame, at + 1)
    return value, at + 1 + struct.calcsize(layout)


# -- what types alone cannot say ----------------------------------------------------------------------------------


def _check_body(body: Body, limits: Limits, request: int) -> None:
    kind = type(body)
    if kind is Step:
        _check_step(body, limits, request)  # type: ignore[arg-type]
    elif kind is Reserve:
        _check_reserve(body, limits, request)  # type: ignore[arg-type]
    elif kind is Lookup:
        _check_lookup(body, limits, request)  # type: ignore[arg-type]


def _check_reserve(body: Reserve, limits: Limits, request: int) -> None:
    _check_tokens(body.tokens, limits, request)
    _check_headroom(body.headroom, limits, request)
    if body.last_page not in LAST_PAGE_MODES:
        raise BadRequest(
            f"last_page = {body.last_page[:32]!r} is not one of {', '.join(LAST_PAGE_MODES)}", request=request
        )


def _check_step(body: Step, limits: Limits, request: int) -> None:
    """A step that is too large, or holds packed tokens that are none, is refused as a whole."""
    items = len(body.free) + len(body.truncate) + len(body.commit) + len(body.extend) + len(body.share)
    items += len(body.copied)
    if items > limits.batch_items:
        raise _too_many("items in a message", items, limits.batch_items, request)
    tokens_max = limits.tokens
    bytes_max = tokens_max * TOKEN_BYTES
    for item in body.extend:
        size = len(item.tokens)
        if size % TOKEN_BYTES or size > bytes_max or item.headroom > tokens_max:
            _check_tokens(item.tokens, limits, request)
            _check_headroom(item.headroom, limits, request)
    children = 0
    for share in body.share:
        children += share.count
        if share.first_child + share.count > _INT_MAX:
            raise BadRequest("a child's sequence id is over 2^63 - 1", request=request)
    if children > limits.batch_items:
        raise _too_many("children in a message", children, limits.batch_items, request)


def _check_lookup(body: Lookup, limits: Limits, request: int) -> None:
    if len(body.prompts) > limits.batch_items:
        raise _too_many("prompts in a message", len(body.prompts), limits.batch_items, request)
    for prompt in body.prompts:
        _check_tokens(prompt, limits, request)


def _check_tokens(tokens: bytes, limits: Limits, request: int) -> None:
    if len(tokens) % TOKEN_BYTES:
        raise BadRequest(f"tokens are {TOKEN_BYTES} bytes each, not {len(tokens)} in all", request=request)
    if len(tokens) > limits.tokens * TOKEN_BYTES:
        raise _too_many("tokens in a sequence", len(tokens) // TOKEN_BYTES, limits.tokens, request)


def _check_headroom(headroom: int, limits: Limits, request: int) -> None:
    if headroom > limits.tokens:
        raise _too_many("tokens of headroom", headroom, limits.tokens, request)


def _too_many(what: str, value: int, limit: int, request: int) -> LimitExceeded:
    return LimitExceeded(f"too many {what}", value=value, limit=limit, request=request)


# -- replies ------------------------------------------------------------------------------------------------------


def encode_reply(request_id: int, body: Reply) -> bytes:
    return _encode((request_id, body))


def decode_reply(frame: bytes) -> tuple[int, Reply]:
    """(request id, body). Raises VersionMismatch for what this client cannot read."""
    try:
        answer = _decode_answer(frame)
    except _UNREADABLE_ERRORS as error:
        raise VersionMismatch(f"the daemon's reply cannot be read: {str(error)[:200]}") from None
    return answer.id, answer.body


# -- the attach socket --------------------------------------------------------------------------------------------


def encode_attach(record: AttachRequest | AttachReply) -> bytes:
    return _encode(record)


def decode_attach_request(packet: bytes) -> AttachRequest:
    """Raises BadRequest."""
    try:
        return _decode_attach_request(packet)
    except _UNREADABLE_ERRORS as error:
        raise BadRequest(f"cannot be read: {str(error)[:200]}") from None


def decode_attach_reply(packet: bytes) -> AttachReply:
    """Raises VersionMismatch for what this client cannot read."""
    try:
        return _decode_attach_reply(packet)
    except _UNREADABLE_ERRORS as error:
        raise VersionMismatch(f"the daemon's answer cannot be read: {str(error)[:200]}") from None
