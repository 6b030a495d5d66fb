"""The id of a request whose body cannot be read is found however its encoder writes integers."""

import struct

import pytest

from radixkv.config import Limits
from radixkv.errors import BadRequest
from radixkv.ipc import wire

INTEGERS = [
    b"\x07",
    b"\xcc\x07",
    b"\xcd" + struct.pack(">H", 7),
    b"\xce" + struct.pack(">I", 7),
    b"\xcf" + struct.pack(">Q", 7),
    b"\xd0\x07",
    b"\xd1" + struct.pack(">h", 7),
    b"\xd2" + struct.pack(">i", 7),
    b"\xd3" + struct.pack(">q", 7),
]


@pytest.mark.parametrize("integer", INTEGERS, ids=bytes.hex)
def test_the_id_is_peeked(integer):
    frame = b"\x95" + integer * 3 + b"\xcb" + struct.pack(">d", 1.0) + b"\x91\xa3bad"
    assert wire.peek_id(frame) == 7
    with pytest.raises(BadRequest) as refused:
        wire.decode_request(frame, Limits())
    assert refused.value.request == 7


@pytest.mark.parametrize("integer", [b"\xff", b"\xd0\xff", b"\xd3" + b"\xff" * 8, b"\xcf" + b"\xff" * 8, b"\xa17"])
def test_what_is_no_id_is_answered_under_none(integer):
    frame = b"\x95\x01\x01" + integer + b"\xcb" + struct.pack(">d", 1.0) + b"\x91\xa3bad"
    assert wire.peek_id(frame) == wire.UNREADABLE
