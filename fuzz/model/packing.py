"""Packed tokens and pages to lists and back, written apart from the code under test."""

from __future__ import annotations

from collections.abc import Sequence


def unpack_pages(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[at : at + 4], "little", signed=True) for at in range(0, len(packed), 4)]


def pack_pages(pages: Sequence[int]) -> bytes:
    return b"".join(page.to_bytes(4, "little", signed=True) for page in pages)


def unpack_tokens(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)
