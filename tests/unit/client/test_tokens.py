"""Tokens are what the contract says they are, and nothing else."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from radixkv.client.tokens import pack, unpack
from radixkv.errors import BadRequest

PACKED = bytes.fromhex("0100000000000000ffffffff")
IDS = [1, 0, 2**32 - 1]


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        array("I", IDS),
        array("q", IDS),
        [np.int64(1), np.uint32(0), 2**32 - 1],
        np.array(IDS, np.uint32),
        np.array(IDS, np.int64),
        np.array(IDS, np.uint64),
        np.array(IDS, ">u4"),
        np.array([1, 9, 0, 9, 2**32 - 1, 9], np.uint32)[::2],
        PACKED,
        bytearray(PACKED),
        memoryview(PACKED),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_every_kind_packs_to_the_same_bytes(tokens: object) -> None:
    assert pack(tokens) == PACKED  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[], (), b"", np.array([], np.uint32), np.array([]), range(0)])
def test_no_tokens_are_legal(tokens: object) -> None:
    assert pack(tokens) == b""  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_type_packs(dtype: type) -> None:
    assert pack(np.array([5, 100], dtype)) == pack([5, 100])


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [2**70],
        [1.0],
        ["1"],
        [None],
        [[1]],
        "12",
        12,
        None,
        {1, 2},
        {1: 2},
        iter([1]),
        b"123",
        np.array([[1]]),
        np.array(1),
        np.array([1.5]),
        np.array([True]),
        np.array([-1]),
        np.array([2**32]),
        np.array([2**32], np.uint64),
    ],
    ids=repr,
)
def test_everything_else_is_a_bad_request(tokens: object) -> None:
    with pytest.raises(BadRequest):
        pack(tokens)  # type: ignore[arg-type]


def test_a_uint32_array_is_copied_once_and_bytes_not_at_all() -> None:
    assert pack(PACKED) is PACKED
    tokens = np.arange(32768, dtype=np.uint32)
    packed = pack(tokens)
    tokens[0] = 7
    assert unpack(packed)[0] == 0


def test_unpack_gives_a_read_only_copy() -> None:
    packed = bytearray(PACKED)
    tokens = unpack(packed)
    packed[:] = b""
    assert tokens.tolist() == IDS
    assert not tokens.flags.writeable
