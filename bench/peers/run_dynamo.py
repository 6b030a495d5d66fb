"""NVIDIA Dynamo 1.6.1: RadixTree of its router, in Rust. It indexes what workers report: no pages, no counts, no LRU.

An admission is the hashes of the prompt's blocks, find_matches, and the events that tell what the worker stored and
(W4, W4b) dropped. The worker's own part (its block hashes, the event's JSON, the choice of what to drop: the oldest
sequence) is made beforehand and costs it nothing here. Tokens are lists of int.
"""

from __future__ import annotations

import json
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


class Admission(NamedTuple):
    tokens: list[int]
    stored: bytes
    removed: bytes | None


def block_hashes(tokens: workload.Tokens) -> list[int]:
    """What a worker would call its blocks: a chain of 64-bit hashes."""
    packed, parent, hashes = tokens.tobytes(), b"", []
    for start in range(0, len(packed), PAGE_TOKEN_BYTES):
        digest = xxhash.xxh3_64_intdigest(parent + packed[start : start + PAGE_TOKEN_BYTES])
        hashes.append(digest)
        parent = digest.to_bytes(8, "little")
    return hashes


def stored(tokens: list[int], blocks: list[int], known: int) -> bytes:
    """The event of a worker that has stored the blocks after the first ``known``."""
    pairs = zip(blocks[known:], compute_block_hash_for_seq(tokens, PAGE)[known:], strict=True)
    content = {
        "parent_hash": blocks[known - 1] if known else None,
        "blocks": [{"block_hash": block, "tokens_hash": of_tokens} for block, of_tokens in pairs],
    }
    return _event({"stored": content})


def removed(blocks: list[int]) -> bytes:
    return _event({"removed": {"block_hashes": blocks}})


def _event(data: dict[str, object]) -> bytes:
    return json.dumps({"event_id": next(EVENT_IDS), "data": data, "dp_rank": 0}).encode()


class Index:
    def __init__(self) -> None:
        self._tree = RadixTree()

    def cached_pages(self, tokens: list[int]) -> int:
        return max(self._tree.find_matches(compute_block_hash_for_seq(tokens, PAGE)).scores.values(), default=0)

    def apply(self, event: bytes) -> None:
        self._tree.apply_event(WORKER, event)

    def admit(self, admission: Admission) -> None:
        tree = self._tree
        _ = tree.find_matches(compute_block_hash_for_seq(admission.tokens, PAGE)).scores
        if admission.removed is not None:
            tree.apply_event(WORKER, admission.removed)
        tree.apply_event(WORKER, admission.stored)


def build_tree() -> Work:
    tree, index = workload.tree(), Index()
    prompt_pages = workload.SYSTEM_TOKENS // PAGE
    seen: set[bytes] = set()
    for tokens in tree.conversations + tree.long:
        prompt = tokens[: workload.SYSTEM_TOKENS].tobytes()
        index.apply(stored(tokens.tolist(), block_hashes(tokens), prompt_pages if prompt in seen else 0))
        seen.add(prompt)
    if index.cached_pages(tree.long[0].tolist()) != workload.LONG_TOKENS // PAGE:
        raise RuntimeError("a sequence that was reported should be found")
    known = workload.W3_CACHED_TOKENS // PAGE

    def requests() -> Iterator[Admission]:
        for tokens in tree.half_cached():
            as_list = tokens.tolist()
            yield Admission(as_list, stored(as_list, block_hashes(tokens), known), None)

    return Work(index.admit, requests())


def admissions(work: workload.Churn) -> Iterator[Admission]:
    """Each new sequence takes the place of the oldest one, as soon as the pool would be full."""
    prompt_pages = work.shared_tokens // PAGE
    room = (work.pool_pages - work.prompts * prompt_pages) // work.new_pages
    seen: set[bytes] = set()
    cached: deque[list[int]] = deque()
    for tokens in workload.stream(work):
        blocks, as_list = block_hashes(tokens), tokens.tolist()
        prompt = tokens[: work.shared_tokens].tobytes()
        event = stored(as_list, blocks, prompt_pages if prompt in seen else 0)
        seen.add(prompt)
        dropped = removed(cached.popleft()) if len(cached) == room else None
        cached.append(blocks[prompt_pages:])
        yield Admission(as_list, event, dropped)


def churn(work: workload.Churn) -> Work:
    index, requests = Index(), admissions(work)
    for _ in range(work.fill):
        index.admit(next(requests))
    return Work(index.admit, requests)


def build() -> dict[str, Work]:
    return {"W3": build_tree(), "W4": churn(workload.W4), "W4b": churn(workload.W4B)}


if __name__ == "__main__":
    serve(version("ai-dynamo-runtime"), build)
