"""A language model of a few lines, whose every output depends on every byte of all keys and values before it.

As in a real model, a token's row is a function of that token and of *all rows before it, as they are read*, and the
next token is a function of all rows. A wrong word anywhere gives another sum, so other rows from there on and another
output. Rows are 32-bit words, sums 64-bit; each word has an odd factor of its own, so no single change is lost.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from tests.conftest import DEVICE

if DEVICE != "cpu":
    import tests.cuda.on_fake  # noqa: F401 - the rows are read and written by their address

SPEC = {"layers": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32", "page_size": 4}
ROW_WORDS = 2 * 2 * 8
TOKENS_MAX = 512
VOCABULARY = 50_000
_MASK = 2**64 - 1
_rng = np.random.default_rng(20_250_101)
_FACTORS = _rng.integers(0, 2**63, (TOKENS_MAX, ROW_WORDS), np.uint64) * np.uint64(2) + np.uint64(1)
_SPREAD = _rng.integers(0, 2**63, ROW_WORDS, np.uint64) * np.uint64(2) + np.uint64(1)


class Rows(Protocol):
    """Where keys and values lie: one row of ROW_WORDS words a token."""

    def read(self, n: int) -> Any:
        """The first ``n`` rows, uint32 [n, ROW_WORDS]."""

    def write(self, position: int, row: Any) -> None: ...


class PlainRows:
    """In memory of this process alone."""

    def __init__(self) -> None:
        self._rows = np.zeros((TOKENS_MAX, ROW_WORDS), np.uint32)

    def read(self, n: int) -> Any:
        return self._rows[:n]

    def write(self, position: int, row: Any) -> None:
        self._rows[position] = row


class PagedRows:
    """In a sequence's pages, found by its page table each time."""

    def __init__(self, seq: Any) -> None:
        self._seq = seq
        self._page_size = seq.memory.spec.page_size

    def read(self, n: int) -> Any:
        pages = self._seq.page_table[: -(-n // self._page_size)]
        words = self._seq.memory._rows[pages]  # [pages, layers, 2, page_size, kv_heads, head_dim]
        return np.moveaxis(words, 3, 1).reshape(-1, ROW_WORDS)[:n]

    def write(self, position: int, row: Any) -> None:
        assert position >= self._seq.writable_from_tokens
        page, within = divmod(position, self._page_size)
        place = self._seq.memory._rows[self._seq.page_table[page], :, :, within]
        place[...] = row.reshape(place.shape)


def compute(rows: Rows, tokens: list[int], begin: int) -> None:
    """Write the rows of ``tokens[begin:]``."""
    for position in range(begin, len(tokens)):
        seed = _mix(_sum(rows.read(position)) + tokens[position] * 0x9E3779B97F4A7C15 + position)
        rows.write(position, ((np.uint64(seed) * _SPREAD) >> np.uint64(32)).astype(np.uint32))


def next_token(rows: Rows, n: int) -> int:
    return _mix(_sum(rows.read(n))) % VOCABULARY


def reference(tokens: list[int], count: int) -> list[int]:
    """``tokens`` and what follows them, ``count`` tokens, computed without any cache."""
    rows, known, written = PlainRows(), list(tokens), 0
    for _ in range(count):
        compute(rows, known, written)
        written = len(known)
        known.append(next_token(rows, written))
    return known


def _sum(rows: Any) -> int:
    return int((rows.astype(np.uint64) * _FACTORS[: len(rows)]).sum(dtype=np.uint64))


def _mix(number: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    number &= _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
