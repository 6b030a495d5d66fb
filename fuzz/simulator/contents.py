"""What is written in the pages: each row remembers which tokens it is the KV of.

The KV of a token depends on all tokens before it and on the namespace's weights. So a row holds a *path*: the number of
a place in a trie of everything anybody ever computed. Equal numbers mean equal namespace, version and tokens; there are
no hashes and so no collisions. An arena outlives daemons, as a memfd in the keeper's hands does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from radixkv.commands import CopyRow

GARBAGE = 0
"""What is in a row that nobody has written."""

Scope = tuple[str, bytes, int]
"""Pool, namespace and how often it was invalidated: weights that differ give KV that differs."""


class Paths:
    """The trie. ``of`` numbers the prefixes of a prompt, one a token."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._roots: dict[Scope, int] = {}
        self._last = GARBAGE

    def _new(self) -> int:
        self._last += 1
        return self._last

    def root(self, scope: Scope) -> int:
        if scope not in self._roots:
            self._roots[scope] = self._new()
        return self._roots[scope]

    def of(self, scope: Scope, tokens: Iterable[int]) -> list[int]:
        """Element i: the path of tokens[: i + 1]."""
        found, at = [], self.root(scope)
        for token in tokens:
            step = self._next.get((at, token))
            if step is None:
                step = self._next[at, token] = self._new()
            at = step
            found.append(at)
        return found


class Arena:
    """The bytes of one pool: a path a row, and who wrote it last (for the report).

    ``layers``: pages that a copy has filled in part, with how many of their layers; all others are whole.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.rows = np.zeros((pages, page_size), np.int64)
        self.writers: dict[tuple[int, int], str] = {}
        self.layers: dict[int, int] = {}

    def write(self, page: int, row: int, path: int, who: str) -> None:
        self.rows[page, row] = path
        self.layers.pop(page, None)
        self.writers[page, row] = who

    def copy_rows(self, rows: Iterable[CopyRow], who: str) -> None:
        for source, target, count in rows:
            self.layers.pop(target, None)
            if source in self.layers:
                self.layers[target] = self.layers[source]
            self.rows[target, :count] = self.rows[source, :count]
            for row in range(count):
                self.writers[target, row] = f"{who} copying from page {source}"

    def wrong(self, table: Any, expected: list[int], layers: int | None = None) -> str:
        """Compare the first rows of a page table with the paths they should hold; "" if all are right.

        ``layers``: only so many are read; None: all.
        """
        size = self.page_size
        pages = -(-len(expected) // size)
        for page in table[:pages].tolist() if self.layers else ():
            if (there := self.layers.get(page)) is not None and (layers is None or layers > there):
                return f"page {page} has {there} layers, and {'all' if layers is None else layers} are read"
        found = self.rows[table[:pages]].ravel()[: len(expected)]
        differ = np.nonzero(found != np.array(expected, np.int64))[0]
        if not len(differ):
            return ""
        at = int(differ[0])
        page, row = int(table[at // size]), at % size
        who = self.writers.get((page, row), "nobody")
        return f"token {at} (page {page}, row {row}) holds path {found[at]} by {who}, not {expected[at]}"
