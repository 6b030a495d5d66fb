"""Chain hashes: the identity of a page in events, lower tiers and remote stores. A match never rests on them.

The chain of a page is xxh3_128 over (parent's chain hash, the page's tokens). The namespace enters as the chain's
root: the hash of its canonical bytes and its number of invalidations stands where a first page's parent hash would
be. The idea of naming a block by a hash chain over its prefix is vLLM's and Dynamo's; comparing tokens instead of
trusting it is not.
"""

from __future__ import annotations

from functools import cache
from struct import Struct

from xxhash import xxh3_128_digest

from radixkv.types import HASH_BYTES


def namespace_root(canonical: bytes, invalidations: int) -> bytes:
    """16 bytes that stand in for the parent hash of a namespace's first pages."""
    return xxh3_128_digest(invalidations.to_bytes(8, "little") + canonical)


def chain(parent: bytes, tokens: bytes, page_token_bytes: int) -> bytes:
    """Chain hashes of consecutive full pages: ``len(tokens) // page_token_bytes`` hashes of 16 bytes, joined."""
    digest = xxh3_128_digest
    count = len(tokens) // page_token_bytes
    if count <= _FEW:
        return b"".join([parent := digest(parent + page) for page in _cutter(page_token_bytes, count).unpack(tokens)])
    pages = _cutter(page_token_bytes, 1).iter_unpack(tokens)
    return b"".join([parent := digest(parent + page) for (page,) in pages])


_FEW = 64
"""Up to so many pages are cut apart at once; beyond, the cutters that are kept would be many and large."""


@cache
def _cutter(page_token_bytes: int, count: int) -> Struct:
    return Struct(f"{page_token_bytes}s" * count)


def last(hashes: bytes | bytearray) -> bytes:
    """The chain hash that the next page takes as its parent."""
    return bytes(hashes[-HASH_BYTES:])
