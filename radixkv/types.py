"""Sizes of what every part of radixkv passes around packed: little-endian, as bytes."""

from __future__ import annotations

from struct import Struct

TOKEN_BYTES = 4
"""A token id: uint32."""
PAGE_ID_BYTES = 4
"""A page id, the index of a page in its pool's arena, 0..total_pages-1, the same on every rank: int32."""
PAGE_ID = Struct("<i")
"""One packed page id."""
HASH_BYTES = 16
"""A chain hash (``hashing.py``)."""
