"""A worker whose pages go to the host tier and come back: it writes what it can foretell and compares every byte.

As a process of its own: ``python -m tests.integration.tiered ENDPOINT SEED ROUNDS`` prints how many tokens it found
cached. Prompts are prefixes of a few documents that all workers know, so that they share pages and push each other's
out.
"""

from __future__ import annotations

import random
import sys
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np

import radixkv
from tests.integration.toy import ROW_WORDS, PagedRows

NAMESPACE = radixkv.Namespace("tiered")
_COLUMNS = np.arange(1, ROW_WORDS + 1, dtype=np.uint32) * np.uint32(0x9E3779B1)


def document(number: int, tokens: int) -> list[int]:
    return [1000 * number + n for n in range(tokens)]


def rows_of(tokens: list[int]) -> Any:
    """What the pages of these tokens hold, uint32 [tokens, ROW_WORDS]: each row depends on all tokens up to it."""
    sums = np.cumsum(np.array(tokens, np.uint64) * np.uint64(2_654_435_761) + np.uint64(1), dtype=np.uint64)
    return sums.astype(np.uint32)[:, None] * _COLUMNS


def write(seq: Any) -> None:
    """Compute what is not cached, and say so."""
    rows, wanted = PagedRows(seq), rows_of(seq.tokens.tolist())
    for position in range(seq.cached_tokens, seq.length):
        rows.write(position, wanted[position])
    seq.commit(seq.length)


def check(seq: Any) -> None:
    """Every byte of what is said to be complete."""
    n = seq.committed_tokens
    found = PagedRows(seq).read(n)
    assert np.array_equal(found, rows_of(seq.tokens.tolist())[:n]), f"{n} tokens of {seq.tokens[0]}..."


def answer(pool: Any, prompt: list[int], **how: Any) -> int:
    """One request. Returns how many tokens were cached."""
    with pool.reserve(prompt, namespace=NAMESPACE, **how) as seq:
        check(seq)
        write(seq)
        check(seq)
        return int(seq.cached_tokens)


def work(pool: Any, seed: int, rounds: int) -> int:
    """Random prompts; those of different lengths share what they begin with. Returns the tokens found cached."""
    rng = random.Random(seed)
    cached = 0
    for _ in range(rounds):
        prompt = document(rng.randrange(8), 4 * rng.randint(1, 6) + rng.randint(0, 3))
        cached += answer(pool, prompt, timeout=20.0)
    return cached


def further_rank(endpoint: str, group: bytes, pipe: Connection) -> None:
    """Rank 1 of a group, as a process: ``(page table, tokens, begin)`` has it write its own part of the tokens from
    ``begin`` on, and send whether all of it, as it is read then, is what it should be."""
    member = radixkv.attach(endpoint, group, 1)
    memory = member.pool("default")._memory
    pipe.send(True)
    while True:
        table, tokens, begin = pipe.recv()
        rows = PagedRows(SimpleNamespace(memory=memory, page_table=np.array(table), writable_from_tokens=begin))
        wanted = rows_of(tokens) + np.uint32(1)
        for position in range(begin, len(tokens)):
            rows.write(position, wanted[position])
        pipe.send(np.array_equal(rows.read(len(tokens)), wanted))


if __name__ == "__main__":
    with radixkv.connect(sys.argv[1], timeout=30.0) as client:
        print(work(client.pool("default"), int(sys.argv[2]), int(sys.argv[3])))
