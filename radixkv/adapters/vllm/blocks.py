"""Tokens, blocks and pages in numbers, and what travels from vLLM's scheduler to its workers.

One radixkv page holds one vLLM block, byte for byte (see ``worker.py``), so a page's index is a block's index.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.client.namespace import Namespace

TOKEN_BYTES = 4


def full_blocks(tokens: int, block_size: int) -> int:
    """Blocks that so many tokens fill completely."""
    return tokens // block_size


def usable_blocks(prompt_tokens: int, block_size: int) -> int:
    """Most blocks of a prompt that may come from a cache: at least one token is left to compute."""
    return full_blocks(max(0, prompt_tokens - 1), block_size)


def loadable_tokens(found_tokens: int, local_tokens: int, prompt_tokens: int, block_size: int) -> int:
    """Tokens to load beyond those that vLLM has itself, in whole blocks.

    found_tokens: cached in radixkv. local_tokens: cached in vLLM, whole blocks.
    """
    blocks = min(full_blocks(found_tokens, block_size), usable_blocks(prompt_tokens, block_size))
    return max(0, blocks * block_size - local_tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """Copy the last ``len(block_ids)`` pages of these tokens into vLLM's blocks. ``tokens``: packed, whole blocks."""

    request_id: str
    namespace: Namespace
    tokens: bytes
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Publish these tokens (packed, whole blocks), whose keys and values are in vLLM's blocks."""

    namespace: Namespace
    tokens: bytes
    block_ids: tuple[int, ...]
