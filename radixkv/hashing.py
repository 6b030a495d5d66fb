"""Chain hashes: the names that blocks have in events. Made where somebody is told of blocks, and nowhere else.

The chain of a page is xxh3_128 over (parent's chain hash, the page's tokens). The namespace enters as the chain's
root: the hash of its canonical bytes and its number of invalidations stands where a first page's parent hash would
be. So a content has the same name in every daemon, whatever page it is in. The idea of naming a block by a hash chain
over its prefix is vLLM's and Dynamo's. The tree compares tokens: it has no hashes, and nothing in it can rest on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from xxhash import xxh3_128_digest


def namespace_root(canonical: bytes, invalidations: int) -> bytes:
    """16 bytes that stand in for the parent hash of a namespace's first pages."""
    return xxh3_128_digest(invalidations.to_bytes(8, "little") + canonical)


def page_hash(parent: bytes, tokens: bytes) -> bytes:
    """Chain hash of one page with these tokens: 16 bytes."""
    return xxh3_128_digest(parent + tokens)


def chain(parent: bytes, tokens: bytes, page_token_bytes: int) -> bytes:
    """Chain hashes of consecutive full pages: ``len(tokens) // page_token_bytes`` hashes of 16 bytes, joined."""
    hashes = []
    for page in pages_of(tokens, page_token_bytes):
        parent = page_hash(parent, page)
        hashes.append(parent)
    return b"".join(hashes)


def pages_of(tokens: bytes, page_token_bytes: int) -> Iterator[bytes]:
    """Packed tokens, cut into those of each page."""
    return (page for (page,) in Struct(f"{page_token_bytes}s").iter_unpack(tokens))
