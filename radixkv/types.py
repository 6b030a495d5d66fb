"""Names for the integers and byte strings that every part of radixkv passes around.

All of them are plain ints or bytes at run time; the names exist so that a signature says which unit it takes.
"""

from __future__ import annotations

from struct import Struct
from typing import NewType

PageId = NewType("PageId", int)
"""Index of a page in its pool's arena, 0..total_pages-1; the same on every rank."""

SessionId = NewType("SessionId", int)
SequenceId = NewType("SequenceId", int)
"""Chosen by the client, unique within its session and never used twice there."""

RequestId = NewType("RequestId", int)

ChainHash = NewType("ChainHash", bytes)
"""16 bytes: xxh3_128 over the parent's chain hash and a page's tokens, seeded by the namespace."""

PackedTokens = NewType("PackedTokens", bytes)
"""Token ids as little-endian uint32, 4 bytes each."""

PackedPages = NewType("PackedPages", bytes)
"""Page ids as little-endian int32, 4 bytes each."""

TOKEN_BYTES = 4
PAGE_ID_BYTES = 4
PAGE_ID = Struct("<i")
"""One packed page id."""
HASH_BYTES = 16
