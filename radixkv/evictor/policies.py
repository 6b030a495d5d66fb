"""All policies by the names that a pool's configuration has for them."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.evictor.fifo import FIFO
from radixkv.evictor.lfu import LFU
from radixkv.evictor.lru import LRU
from radixkv.evictor.policy import Policy, R
from radixkv.evictor.s3fifo import S3FIFO


def make(name: str, pool_pages: int, seed_of: Callable[[R], int]) -> Policy[R]:
    """A new policy for a pool of so many pages. ``name`` is one of ``config.POLICIES``; ``seed_of`` gives each root a
    number of its own, of 64 bits."""
    match name:
        case "lru":
            return LRU()
        case "lfu":
            return LFU()
        case "fifo":
            return FIFO()
        case "s3fifo":
            return S3FIFO(pool_pages, seed_of)
    raise ValueError(f"no policy is called {name!r}")
