"""NVIDIA Dynamo 1.6.1: RadixTree of its router, in Rust. It indexes what workers report: no pages, no counts, no LRU.

``index``: an admission is the hashes of the prompt's blocks, find_matches, and the events that tell what the worker
stored and (W4, W4b) dropped. What the worker does for that (the chain of its block hashes, the events' JSON, the choice
of what to drop) is made beforehand and costs nothing here.

``fed``: the same with that part inside the admission, since an index that nobody feeds does not admit anything: a chain
of xxh3 hashes, json.dumps, and the oldest sequence goes. Still no pages, holders or order of use.

Tokens are lists of int; for the worker's hashes also packed.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from importlib.metadata import version
from itertools import count
from typing import NamedTuple

import xxhash
from dynamo.llm import RadixTree, compute_block_hash_for_seq

from bench import workload
from bench.peers.worker import Work, serve

PAGE = workload.PAGE_SIZE
PAGE_TOKEN_BYTES = 4 * PAGE
WORKER = 1
EVENT_IDS = count(1)


class Prompt(NamedTuple):
    """In the types that the index and the worker's hashes like best."""

    tokens: list[int]
    packed: bytes


class Reported(NamedTuple):
    """A prompt with what its worker has to say about it."""

    tokens: list[int]
    stored: bytes
    removed: bytes | None


def convert(tokens: workload.Tokens) -> Prompt:
    return Prompt(tokens.tolist(), tokens.tobytes())


def block_hashes(packed: bytes) -> list[int]:
    """What a worker would call its blocks: a chain of 64-bit hashes."""
    parent, hashes = b"", []
    for start in range(0, len(packed), PAGE_TOKEN_BYTES):
        digest = xxhash.xxh3_64_intdigest(parent + packed[start : start + PAGE_TOKEN_BYTES])
        hashes.append(digest)
        parent = digest.to_bytes(8, "little")
    return hashes


def stored(blocks: list[int], of_tokens: list[int], known: int) -> bytes:
    """The event of a worker that has stored the blocks after the first ``known``."""
    content = {
        "parent_hash": blocks[known - 1] if known else None,
        "blocks": [
            {"block_hash": block, "tokens_hash": tokens_hash}
            for block, tokens_hash in zip(blocks[known:], of_tokens[known:], strict=True)
        ],
    }
    return _event({"stored": content})


def removed(blocks: list[int]) -> bytes:
    return _event({"removed": {"block_hashes": blocks}})


def _event(data: dict[str, object]) -> bytes:
    return json.dumps({"event_id": next(EVENT_IDS), "data": data, "dp_rank": 0}).encode()


class Index:
    """The tree and its worker's memory. ``room``: sequences beyond their prompts that fit the worker's pool."""

    def __init__(self, prompt_pages: int, room: int | None) -> None:
        self._tree = RadixTree()
        self._prompt_pages = prompt_pages
        self._room = room
        self._held: deque[list[int]] = deque()

    def cached_pages(self, tokens: list[int]) -> int:
        return max(self._tree.find_matches(compute_block_hash_for_seq(tokens, PAGE)).scores.values(), default=0)

    def admit_reported(self, reported: Reported) -> None:
        tree = self._tree
        _ = tree.find_matches(compute_block_hash_for_seq(reported.tokens, PAGE)).scores
        if reported.removed is not None:
            tree.apply_event(WORKER, reported.removed)
        tree.apply_event(WORKER, reported.stored)

    def admit(self, prompt: Prompt) -> None:
        """As a worker and its index do it together. Each new sequence takes the place of the oldest one."""
        tree = self._tree
        of_tokens = compute_block_hash_for_seq(prompt.tokens, PAGE)
        known = max(tree.find_matches(of_tokens).scores.values(), default=0)
        blocks = block_hashes(prompt.packed)
        if len(self._held) == self._room:
            tree.apply_event(WORKER, removed(self._held.popleft()))
        tree.apply_event(WORKER, stored(blocks, of_tokens, known))
        self._held.append(blocks[self._prompt_pages :])

    def report(self, prompt: Prompt, known: int) -> Reported:
        """What ``admit`` would tell the tree, made beforehand; ``known``: pages that will be cached by then."""
        blocks = block_hashes(prompt.packed)
        dropped = removed(self._held.popleft()) if len(self._held) == self._room else None
        self._held.append(blocks[self._prompt_pages :])
        return Reported(prompt.tokens, stored(blocks, compute_block_hash_for_seq(prompt.tokens, PAGE), known), dropped)


def build_tree(fed: bool) -> Work:
    tree = workload.tree()
    index = Index(workload.SYSTEM_TOKENS // PAGE, None)
    for tokens in tree.conversations + tree.long:
        index.admit(convert(tokens))
    if index.cached_pages(tree.long[0].tolist()) != workload.LONG_TOKENS // PAGE:
        raise RuntimeError("a sequence that was reported should be found")
    prompts = map(convert, tree.half_cached())
    if fed:
        return Work(index.admit, prompts)
    known = workload.W3_CACHED_TOKENS // PAGE
    return Work(index.admit_reported, (index.report(prompt, known) for prompt in prompts))


def churn(work: workload.Churn, fed: bool) -> Work:
    prompt_pages = work.shared_tokens // PAGE
    room = (work.pool_pages - work.prompts * prompt_pages) // work.new_pages
    index = Index(prompt_pages, room)
    prompts = map(convert, workload.stream(work))
    for _ in range(work.fill):
        index.admit(next(prompts))
    if index.cached_pages(next(prompts).tokens) != prompt_pages:
        raise RuntimeError("of a new prompt just the shared part should be cached")
    if fed:
        return Work(index.admit, prompts)
    return Work(index.admit_reported, _reports(index, prompts, prompt_pages))


def _reports(index: Index, prompts: Iterator[Prompt], known: int) -> Iterator[Reported]:
    """All shared prompts are cached by now."""
    for prompt in prompts:
        yield index.report(prompt, known)


def build() -> dict[str, Work]:
    fed = sys.argv[1] == "fed"
    return {"W3": build_tree(fed), "W4": churn(workload.W4, fed), "W4b": churn(workload.W4B, fed)}


if __name__ == "__main__":
    serve(version("ai-dynamo-runtime"), build)
