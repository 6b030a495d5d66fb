"""Whatever a peer sends is a request within the limits or a typed refusal, and costs little."""

from __future__ import annotations

import math
import resource
import struct
import time
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.commands import (
    Commit,
    Extend,
    Free,
    Handoff,
    Hello,
    Lookup,
    Request,
    Reserve,
    Share,
    Stats,
    Step,
)
from radixkv.config import Limits
from radixkv.errors import BadRequest, LimitExceeded, VersionMismatch
from radixkv.ipc import wire

LIMITS = Limits(message_bytes=2**20, tokens=1000, batch_items=100)
HEAD = b"\x95\x01\x01\x07\xcb" + struct.pack(">d", 1.0)
"""A readable envelope, id 7; a body follows."""

TOKENS = struct.pack("<3I", 0, 5, 2**32 - 1)


def request(body, *, session=5, epoch=1, identity=7, deadline=1.0) -> bytes:
    return wire.encode_request(Request(session, epoch, identity, deadline, body))


def refusal(frame: bytes, limits: Limits = LIMITS) -> BadRequest | LimitExceeded:
    with pytest.raises((BadRequest, LimitExceeded)) as caught:
        wire.decode_request(frame, limits)
    return caught.value


def test_a_request_comes_back_as_it_was_sent() -> None:
    sent = Request(2**62, 3, 2**63 - 1, 5.5, Reserve("default", 9, b"ns", TOKENS, 4, "drop", 0.5))
    assert wire.decode_request(wire.encode_request(sent), LIMITS) == sent


def test_a_message_may_be_as_large_as_the_limit_and_no_larger() -> None:
    frame = request(Reserve("default", 9, b"ns", bytes(100_000)))
    assert wire.decode_request(frame, Limits(message_bytes=len(frame))).id == 7
    assert type(refusal(frame, Limits(message_bytes=len(frame) - 1))) is LimitExceeded


@pytest.mark.parametrize("seconds", [math.inf, math.nan])
def test_times_are_finite(seconds: float) -> None:
    for body in (Reserve("default", 9, b"ns", TOKENS, 0, "copy", seconds), Handoff(9, bytes(16), seconds)):
        assert type(refusal(request(body))) is BadRequest
    assert type(refusal(request(Stats(), deadline=seconds))) is BadRequest


def test_limits_themselves_are_allowed() -> None:
    full = Step(
        commit=[Commit(1, 0)] * 49,
        extend=[Extend(1, bytes(4000), 1000)],
        share=[Share(1, None, 100, 2**63 - 101)],
        copied=[2**63 - 1] * 49,
    )
    assert wire.decode_request(request(full), LIMITS).body == full
    reserve = Reserve("x" * 64, 0, bytes(1024), bytes(4000), 1000, "copy", 86400.0)
    assert wire.decode_request(request(reserve), LIMITS).body == reserve


UNREADABLE = {
    "nothing": b"",
    "never used byte": b"\xc1",
    "huge array": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\x7f\xff\xff\xff",
    "nested": b"\x91" * 100_000,
    "nested maps": b"\x81\xa1a" * 100_000,
    "too few fields": b"\x94\x01\x01\x07\x01",
    "a map": b"\x85\x01\x01\x01\x01\x01",
    "session is text": b"\x95\xa11\x01\x07\x01\x91\xa5stats",
    "session is negative": b"\x95\xff\x01\x07\x01\x91\xa5stats",
    "epoch is a float": b"\x95\x01\xca\x00\x00\x00\x00\x07\x01\x91\xa5stats",
    "id is 0": b"\x95\x01\x01\x00\x01\x91\xa5stats",
    "id is 2^64 - 1": b"\x95\x01\x01\xcf" + b"\xff" * 8 + b"\x01\x91\xa5stats",
}


@pytest.mark.parametrize("frame", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_without_a_readable_envelope_the_id_is_0(frame: bytes) -> None:
    error = refusal(frame)
    assert type(error) is BadRequest
    assert error.details["request"] == 0


BAD_BODIES = {
    "missing": b"",
    "nil": b"\xc0",
    "never used byte": b"\xc1",
    "empty": b"\x90",
    "unknown command": b"\x91\xa5hello",
    "tag is a number": b"\x91\x01",
    "bad utf-8 in the tag": b"\x91\xa5\xff\xfe\xfd\xfc\xfb",
    "bad utf-8 in a name": b"\x95\xa7reserve\xa2\xff\xfe\x01\xc4\x00\xc4\x00",
    "a map": b"\x81\xa1a\x01",
    "map with a list as key": b"\x81\x91\x01\x02",
    "map with nil as key": b"\x81\xc0\x01",
    "time stamp": b"\xd6\xff\xff\xff\xff\xff",
    "absurd time stamp": b"\xc7\x0c\xff" + b"\xff" * 12,
    "extension type": b"\xc7\x04\x7fabcd",
    "huge array": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\x7f\xff\xff\xff",
    "huge bytes": b"\xc6\xff\xff\xff\xff",
    "huge text": b"\xdb\xff\xff\xff\xff",
    "huge list inside": b"\x93\xa4step\xdd\xff\xff\xff\xff",
    "huge bytes inside": b"\x95\xa7reserve\xa1d\x01\xc6\xff\xff\xff\xff\xc4\x00",
    "fifteen huge arrays": b"\x9f" + b"\xdd\xff\xff\xff\xff" * 15,
    "nested": b"\x91" * 100_000,
    "nested maps": b"\x81\xa1a" * 100_000,
    "nested in a field": b"\x92\xa4step" + b"\x91" * 100_000,
    "nested in an unknown field": b"\x98\xa4step" + b"\x90" * 6 + b"\x91" * 100_000,
    "cut off": b"\x95\xa7reserve\xa1d\x01\xc4\x00",
    "trailing bytes": b"\x91\xa5stats\x00",
    "sequence id is negative": b"\x92\xa7compact\xff",
    "sequence id is 2^63": b"\x92\xa7compact\xcf\x80" + bytes(7),
    "sequence id is text": b"\x92\xa7compact\xa11",
    "sequence id is a boolean": b"\x92\xa7compact\xc3",
    "tokens are a list of ints": b"\x95\xa7reserve\xa1d\x01\xc4\x00\x92\x01\x02",
    "empty pool name": b"\x95\xa7reserve\xa0\x01\xc4\x00\xc4\x00",
    "short ticket": b"\x94\xa7handoff\x01\xc4\x02ab\x01",
    "negative wait": b"\x98\xa7reserve\xa1d\x01\xc4\x00\xc4\x00\x00\xa4copy\xff",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_bad_body_is_answered_with_its_id(body: bytes) -> None:
    error = refusal(HEAD + body)
    assert type(error) is BadRequest
    assert error.details["request"] == 7


@pytest.mark.parametrize("size", [">B", ">H", ">I", ">Q"])
def test_the_id_of_a_bad_body_is_found_in_every_width(size: str) -> None:
    code = {">B": b"\xcc", ">H": b"\xcd", ">I": b"\xce", ">Q": b"\xcf"}[size]
    envelope = b"\xdc\x00\x05" + b"".join(code + struct.pack(size, n) for n in (1, 2, 200))
    assert wire.peek_id(envelope + b"\xc1") == 200
    assert refusal(envelope + b"\xc1").details["request"] == 200


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_deadline_is_a_finite_number(value: float) -> None:
    assert refusal(request(Stats(), deadline=value)).details["request"] == 7


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 86401.0])
def test_a_wait_is_a_finite_bounded_number(value: float) -> None:
    assert type(refusal(request(Reserve("d", 1, b"", b"", wait_s=value)))) is BadRequest
    assert type(refusal(request(Handoff(1, bytes(16), value)))) is BadRequest


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (Reserve("d", 1, b"", b"abc"), BadRequest),
        (Reserve("d", 1, b"", b"", 0, "maybe"), BadRequest),
        (Reserve("d", 1, b"", b"", 0, "x" * 10_000), BadRequest),
        (Reserve("d", 1, bytes(1025), b""), BadRequest),
        (Reserve("d", 1, b"", bytes(4004)), LimitExceeded),
        (Reserve("d", 1, b"", b"", 1001), LimitExceeded),
        (Reserve("d", 1, b"", b"", 2**63 - 1), LimitExceeded),
        (Step(extend=[Extend(1, b"abcde")]), BadRequest),
        (Step(extend=[Extend(1, bytes(4004))]), LimitExceeded),
        (Step(extend=[Extend(1, b"", 2**62)]), LimitExceeded),
        (Step(free=[Free(1)] * 101), LimitExceeded),
        (Step(free=[Free(1)] * 50, copied=[1] * 51), LimitExceeded),
        (Step(share=[Share(1, None, 101, 2)]), LimitExceeded),
        (Step(share=[Share(1, None, 60, 2), Share(1, None, 60, 100)]), LimitExceeded),
        (Step(share=[Share(1, None, 2**63 - 1, 1)]), BadRequest),
        (Lookup("d", b"", [b""] * 101), LimitExceeded),
        (Lookup("d", b"", [b"abc"]), BadRequest),
        (Lookup("d", b"", [b"", bytes(4004)]), LimitExceeded),
    ],
)
def test_absurd_sizes_and_counts(body: Reserve | Step | Lookup, kind: type) -> None:
    error = refusal(request(body))
    assert type(error) is kind
    assert error.details["request"] == 7


def test_a_message_over_the_limit_is_refused_unread() -> None:
    error = refusal(request(Reserve("d", 1, b"", bytes(2**20))))
    assert type(error) is LimitExceeded
    assert error.details["limit"] == 2**20 and error.details["request"] == 7


def test_a_list_that_is_too_long_is_refused_before_it_exists() -> None:
    items = 15 * 2**20
    limits = Limits()
    frames = [
        HEAD + b"\x97\xa4step" + b"\x90" * 5 + b"\xdd" + struct.pack(">I", items) + b"\x01" * items,
        HEAD + b"\x94\xa6lookup\xa1d\xc4\x00\xdd" + struct.pack(">I", items // 6) + b"\xc4\x04abcd" * (items // 6),
        HEAD + b"\xdd" + struct.pack(">I", items) + b"\xa4step" + b"\x90" * (items - 1),
    ]
    for frame in frames:
        tracemalloc.start()
        error = refusal(frame, limits)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert error.details["request"] == 7
        assert peak < 64 * 1024


@pytest.mark.parametrize(
    "header", [b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
)
def test_ten_thousand_announcements_of_gigabytes_take_neither_memory_nor_time(header: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    for _ in range(10_000):
        for frame in (header, HEAD + header, HEAD + b"\x92\xa4step" + header):
            refusal(frame)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10 * 1024
    assert time.monotonic() - begin < 100.0


@given(st.binary(max_size=200))
@example(b"\x95\x01\x01\x01\x01\x91\xa5stats")
def test_any_bytes_are_a_request_or_a_refusal(frame: bytes) -> None:
    try:
        wire.decode_request(frame, LIMITS)
    except (BadRequest, LimitExceeded) as error:
        assert 0 <= error.details["request"] < 2**63


@given(st.data())
def test_any_flipped_byte_is_a_request_or_a_refusal(data: st.DataObject) -> None:
    step = Step(free=[Free(1)], extend=[Extend(2, TOKENS, 3)], share=[Share(1, 2, 1, 9)], copied=[4])
    frame = bytearray(request(step))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    try:
        wire.decode_request(bytes(frame), LIMITS)
    except (BadRequest, LimitExceeded) as error:
        assert error.details["request"] >= 0


@given(st.binary(max_size=100))
def test_attach_packets_and_replies_too(packet: bytes) -> None:
    for decode, refused in (
        (wire.decode_attach_request, BadRequest),
        (wire.decode_attach_reply, VersionMismatch),
        (wire.decode_reply, VersionMismatch),
    ):
        try:
            decode(packet)
        except refused:
            continue


def test_attach_records_are_refused_by_name() -> None:
    assert wire.decode_attach_request(wire.encode_attach(Hello(1, "w"))) == Hello(1, "w")
    with pytest.raises(BadRequest, match="goodbye"):
        wire.decode_attach_request(b"\x91\xa7goodbye")
    with pytest.raises(VersionMismatch):
        wire.decode_attach_reply(b"\x91" * 1000)
    with pytest.raises(VersionMismatch):
        wire.decode_reply(b"\x92\x01\x91\xa5novel")
