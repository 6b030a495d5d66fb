"""A hash that collides all the time: nothing that is right may depend on hashes being different."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from radixkv import hashing


def colliding_digest(data: bytes) -> bytes:
    """16 bytes, but only seven different ones."""
    return bytes([sum(data) % 7]) * 16


@contextmanager
def weak_hash() -> Iterator[None]:
    """Within, every chain hash is a colliding one."""
    with patch.object(hashing, "xxh3_128_digest", colliding_digest):
        yield
