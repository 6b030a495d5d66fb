"""Token ids on their way to the wire: packed little-endian uint32, 4 bytes each.

A list of ints costs 50 times what a uint32 array costs; whoever calls often keeps tokens in an array.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import BadRequest
from radixkv.types import TOKEN_BYTES

Tokens: TypeAlias = "Sequence[int] | NDArray[Any] | bytes | bytearray | memoryview | Iterable[int]"
"""What a caller may pass as tokens: ints, a 1-D integer array, or bytes that are packed already."""

TOKEN_MAX = 2**32 - 1
PACKED = np.dtype("<u4")


def pack(tokens: Tokens) -> bytes:
    """Packed tokens; one memcpy for a uint32 array, none for bytes.

    Errors: BadRequest when it is none of the three kinds of tokens, or a token is outside 0..2^32-1.
    """
    if isinstance(tokens, bytes):
        return _whole(tokens)
    if isinstance(tokens, list | tuple):
        return _pack_ints(tokens)
    if isinstance(tokens, bytearray | memoryview):
        return _whole(bytes(tokens))
    if isinstance(tokens, np.ndarray):
        return _pack_array(tokens)
    if hasattr(tokens, "__array__"):
        return _pack_array(np.asarray(tokens))
    return _pack_ints(tokens)


def unpack(packed: bytes | bytearray) -> NDArray[np.uint32]:
    """Read-only uint32 array over its own copy of packed tokens."""
    return np.frombuffer(bytes(packed), PACKED)


def _whole(packed: bytes) -> bytes:
    if len(packed) % TOKEN_BYTES:
        raise BadRequest(f"packed tokens are {TOKEN_BYTES} bytes each", bytes=len(packed))
    return packed


def _pack_array(tokens: NDArray[Any]) -> bytes:
    if tokens.ndim != 1:
        raise BadRequest("an array of tokens has one dimension", dimensions=tokens.ndim)
    if tokens.dtype == PACKED:
        return tokens.tobytes()
    if tokens.size == 0:
        return b""
    if tokens.dtype.kind not in "iu":
        raise BadRequest(f"tokens are whole numbers, not {tokens.dtype}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > TOKEN_MAX:
        raise BadRequest("a token is outside 0..2^32-1", lowest=low, highest=high)
    return tokens.astype(PACKED).tobytes()


def _pack_ints(tokens: Any) -> bytes:
    if not isinstance(tokens, list | tuple) and (isinstance(tokens, str) or not isinstance(tokens, Sequence)):
        raise BadRequest(
            f"tokens are a sequence of ints, an integer array or packed bytes, not {type(tokens).__name__}"
        )
    try:
        packed = array("I", tokens)
    except OverflowError:
        raise BadRequest("a token is outside 0..2^32-1") from None
    except (TypeError, ValueError) as error:
        raise BadRequest(f"tokens are whole numbers: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
