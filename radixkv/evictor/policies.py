"""All policies by the names that a pool's configuration has for them."""

from __future__ import annotations

from radixkv.evictor.fifo import FIFO
from radixkv.evictor.lfu import LFU
from radixkv.evictor.lru import LRU
from radixkv.evictor.policy import Policy, R
from radixkv.evictor.s3fifo import S3FIFO


def make(name: str, pool_pages: int) -> Policy[R]:
    """A new policy for a pool of so many pages. ``name`` is one of ``config.POLICIES``."""
    match name:
        case "lru":
            return LRU()
        case "lfu":
            return LFU()
        case "fifo":
            return FIFO()
        case "s3fifo":
            return S3FIFO(pool_pages)
    raise ValueError(f"no policy is called {name!r}")
