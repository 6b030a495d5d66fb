"""Chain hashes: the identity of a page in events, lower tiers and remote stores. A match never rests on them.

The chain of a page is xxh3_128 over (parent's chain hash, the page's tokens). The namespace enters as the chain's
root: the hash of its canonical bytes and its number of invalidations stands where a first page's parent hash would
be. The idea of naming a block by a hash chain over its prefix is vLLM's and Dynamo's; comparing tokens instead of
trusting it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from struct import Struct

from xxhash import xxh3_128_digest

from radixkv.types import HASH_BYTES


def namespace_root(canonical: bytes, invalidations: int) -> bytes:
    """16 bytes that stand in for the parent hash of a namespace's first pages."""
    return xxh3_128_digest(invalidations.to_bytes(8, "little") + canonical)


def chain(parent: bytes, tokens: bytes, page_token_bytes: int) -> bytes:
    """Chain hashes of consecutive full pages: ``len(tokens) // page_token_bytes`` hashes of 16 bytes, joined."""
    count = len(tokens) // page_token_bytes
    digest = xxh3_128_digest
    hashes = []
    for page in _cutter(page_token_bytes, count)(tokens) if count <= _FEW else _one_by_one(tokens, page_token_bytes):
        parent = digest(parent + page)
        hashes.append(parent)
    return b"".join(hashes)


_FEW = 256
"""Up to so many pages are cut apart at once; beyond, the cutters that are kept would be many and large."""


@cache
def _cutter(page_token_bytes: int, count: int) -> Callable[[bytes], tuple[bytes, ...]]:
    return Struct(f"{page_token_bytes}s" * count).unpack


def _one_by_one(tokens: bytes, page_token_bytes: int) -> Iterator[bytes]:
    return (page for (page,) in Struct(f"{page_token_bytes}s").iter_unpack(tokens))


def last(hashes: bytes | bytearray) -> bytes:
    """The chain hash that the next page takes as its parent."""
    return bytes(hashes[-HASH_BYTES:])
