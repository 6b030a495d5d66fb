"""Events as bytes, as vLLM publishes them: ``[timestamp, [events], data parallel rank]`` in MessagePack.

An event is an array that begins with its name (vLLM up to 0.23) or a map with a ``type`` (0.24 on). Field names and
their order are those of vLLM's ``distributed/kv_events.py``. A block is named by its chain hash: its low 64 bits as an
unsigned number, or all 16 bytes.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from radixkv.config import EventsConfig
from radixkv.ipc.event_ledger import Cleared, Event, Removed, Stored
from radixkv.types import HASH_BYTES, TOKEN_BYTES

_FIELDS = {
    Stored: (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    ),
    Removed: ("block_hashes", "medium"),
    Cleared: (),
}  # fmt: skip
_NAMES = {Stored: "BlockStored", Removed: "BlockRemoved", Cleared: "AllBlocksCleared"}
_DOMAIN = b"radixkv namespace 1"
_FIELD = b"\x01"
_LENGTH = struct.Struct("<I")


class EventCodec:
    def __init__(self, config: EventsConfig, page_size: int) -> None:
        self._maps = config.format == "map"
        self._numbers = config.hash == "int64"
        self._rank = config.rank
        self._page_size = page_size
        self._encode = msgspec.msgpack.Encoder().encode

    def event(self, event: Event) -> bytes:
        match event:
            case Stored():
                values = self._stored(event)
            case Removed():
                values = [self._hashes(event.hashes), event.tier]
            case Cleared():
                values = []
        kind = type(event)
        if self._maps:
            return self._encode({"type": _NAMES[kind], **dict(zip(_FIELDS[kind], values, strict=True))})
        return self._encode([_NAMES[kind], *values])

    def batch(self, timestamp: float, events: list[bytes]) -> bytes:
        return b"".join((_array(3), self._encode(timestamp), _array(len(events)), *events, self._encode(self._rank)))

    def long_batch(self, timestamp: float) -> LongBatch:
        """One to which events are still to be added."""
        return LongBatch(self._encode(timestamp), self._encode(self._rank))

    def _stored(self, event: Stored) -> list[Any]:
        hashes = self._hashes(event.hashes)
        tokens = np.frombuffer(event.tokens, "<u4").tolist()
        parent = self._hashes(event.parent)[0] if event.parent else None
        lora, salt = lora_and_salt(event.canonical)
        keys = None
        if lora is not None or salt is not None:
            rest: list[str] = [] if lora is None else [lora]
            first = rest if salt is None or event.parent else [*rest, salt]
            keys = [first or None] + [rest or None] * (len(hashes) - 1)
        return [hashes, parent, tokens, self._page_size, None, event.tier, lora, keys]

    def _hashes(self, packed: bytes) -> list[int] | list[bytes]:
        if self._numbers:
            halves: list[int] = np.frombuffer(packed, ">u8")[1::2].tolist()
            return halves
        return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]


class LongBatch:
    """A batch that grows in its place: 90 MB (a million blocks) are neither joined nor copied in one go."""

    def __init__(self, timestamp: bytes, rank: bytes) -> None:
        self._events = 0
        self._rank = rank
        self._bytes = bytearray(_array(3) + timestamp)
        self._count_at = len(self._bytes) + 1
        self._bytes += _array(2**32 - 1)

    def add(self, events: list[bytes]) -> None:
        self._events += len(events)
        self._bytes += b"".join(events)

    def end(self) -> bytearray:
        self._bytes[self._count_at : self._count_at + 4] = self._events.to_bytes(4, "big")
        self._bytes += self._rank
        return self._bytes


@lru_cache(1024)
def lora_and_salt(canonical: bytes) -> tuple[str | None, str | None]:
    """What routers may know of a namespace's canonical bytes (the form is in docs/protocol.md); None: it has none, or
    these bytes are of another form. Bytes that are no text are told in hexadecimal."""
    found: dict[str, str | None] = {}
    at = len(_DOMAIN) if canonical.startswith(_DOMAIN) else len(canonical)
    try:
        while canonical[at : at + 1] == _FIELD:
            name, at = _sized(canonical, at + 1)
            kind = canonical[at]
            value, at = _sized(canonical, at + 1)
            found[name.decode()] = _text(value) if kind else None
    except (struct.error, IndexError, UnicodeDecodeError):
        return None, None
    return found.get("lora"), found.get("salt")


def _sized(canonical: bytes, at: int) -> tuple[bytes, int]:
    (length,) = _LENGTH.unpack_from(canonical, at)
    end = at + _LENGTH.size + length
    return canonical[at + _LENGTH.size : end], end


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()


def _array(length: int) -> bytes:
    """How an array begins in MessagePack."""
    if length < 2**4:
        return bytes((0x90 | length,))
    return b"\xdc" + length.to_bytes(2, "big") if length < 2**16 else b"\xdd" + length.to_bytes(4, "big")


def tokens_in(event: Event) -> int:
    """A measure of how much work an event is, in tokens."""
    match event:
        case Stored():
            return len(event.tokens) // TOKEN_BYTES
        case Removed():
            return len(event.hashes) // HASH_BYTES
    return 1
