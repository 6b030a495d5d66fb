"""Messages kept as bytes: every kind there is, decoded by msgspec (typed) and by the msgpack package (plain).

``wire.jsonl`` has one message a line: name, where it travels, its bytes in hex, and the value those bytes mean (byte
strings as {"hex": ...}). Lines are only ever added: a daemon must read what an older client sends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest

from radixkv import commands
from radixkv.config import Limits
from radixkv.ipc import wire

MESSAGES = [json.loads(line) for line in Path(__file__).with_name("wire.jsonl").read_text().splitlines()]
LIMITS = Limits()


def unhexed(value: Any) -> Any:
    if isinstance(value, list):
        return [unhexed(item) for item in value]
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"]) if value.keys() == {"hex"} else {k: unhexed(v) for k, v in value.items()}
    return value


def typed(where: str, frame: bytes) -> Any:
    """What our own codec makes of it, as plain values again."""
    if where == "request":
        request = wire.decode_request(frame, LIMITS)
        found: Any = [request.session, request.epoch, request.id, request.deadline, request.body]
    elif where == "reply":
        found = list(wire.decode_reply(frame))
    elif where == "attach_request":
        found = wire.decode_attach_request(frame)
    else:
        found = wire.decode_attach_reply(frame)
    return msgspec.to_builtins(found, builtin_types=(bytes,))


def listed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [listed(item) for item in value]
    return {k: listed(v) for k, v in value.items()} if isinstance(value, dict) else value


def as_long_as(found: Any, value: Any) -> Any:
    """``found`` without the fields that its records, at any depth, have and those of ``value`` have not.

    A record begins with something that is no list; lists of records keep their lengths.
    """
    if not isinstance(found, list) or not isinstance(value, list):
        return found
    record = not any(isinstance(one, list) for one in (*found[:1], *value[:1]))
    length = len(value) if record else len(found)
    return [as_long_as(one, other) for one, other in zip(found, value, strict=False)] + found[len(value) : length]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["name"])
def test_both_decoders_read_what_was_written(message: dict[str, Any]) -> None:
    frame, value = bytes.fromhex(message["bytes"]), unhexed(message["value"])
    assert msgpack.unpackb(frame) == value
    found = listed(typed(message["where"], frame))
    if message["where"] in ("request", "reply"):
        assert found[:-1] == value[:-1]
        found, value = found[-1], value[-1]
    assert as_long_as(found, value) == value, "what has been added since has its default"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["name"])
def test_the_other_encoder_writes_the_same_bytes(message: dict[str, Any]) -> None:
    assert msgpack.packb(unhexed(message["value"])).hex() == message["bytes"]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["name"])
def test_a_field_from_a_newer_peer_is_ignored(message: dict[str, Any]) -> None:
    now = typed(message["where"], bytes.fromhex(message["bytes"]))
    value = listed(now)
    body = value[-1] if message["where"] in ("request", "reply") else value
    body.append({"added": ["later"]})
    assert typed(message["where"], msgpack.packb(value)) == now


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["name"])
def test_no_prefix_of_a_message_is_taken_for_one(message: dict[str, Any]) -> None:
    frame = bytes.fromhex(message["bytes"])
    for length in range(len(frame)):
        with pytest.raises((wire.BadRequest, wire.VersionMismatch)):
            typed(message["where"], frame[:length])


@pytest.mark.parametrize(
    ("where", "union"),
    [
        ("request", commands.Body),
        ("reply", commands.Reply),
        ("attach_request", commands.AttachRequest),
        ("attach_reply", commands.AttachReply),
    ],
)
def test_every_kind_is_kept(where: str, union: Any) -> None:
    tags = {kind.__struct_config__.tag for kind in get_args(union)}
    values = [unhexed(message["value"]) for message in MESSAGES if message["where"] == where]
    kept = {value[-1][0] if where in ("request", "reply") else value[0] for value in values}
    assert kept == tags
