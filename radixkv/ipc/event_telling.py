"""Everything that is stored, told from the beginning while the table goes on changing: a consistent copy, lazily.

``Contents`` is what the ledger remembers of each place; ``Telling`` goes through the places that were in use at its
beginning in the order in which their contents were complete, so that whoever comes before is told before. It looks
contents up when it is their turn; what leaves earlier is kept aside (copy on write, as snapshots of databases do it).

Sorting is done in slices as well: parts of the table are sorted one by one, then merged as they are told.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.image import TableImage
from radixkv.types import HASH_BYTES

NO_PARENT = bytes(HASH_BYTES)
"""Parent of what begins a prompt."""
Places = NDArray[np.intp]
_HASH = f"V{HASH_BYTES}"


class Contents:
    """What is in each place: parent's chain hash, chain hash, tokens, and a serial. Serials rise in the order in which
    contents were complete; a content has the same in both tiers, and a larger one than what comes before it."""

    def __init__(self, places: int, token_bytes: int) -> None:
        fields = [("parent", _HASH), ("chain", _HASH), ("tokens", f"V{token_bytes}")]
        self._rows: NDArray[Any] = np.zeros(places, fields)
        self.serials: NDArray[Any] = np.zeros(places, np.uint64)

    @property
    def chains(self) -> NDArray[Any]:
        chains: NDArray[Any] = self._rows["chain"]
        return chains

    def restore(self, image: TableImage) -> None:
        rows = self._rows
        rows["parent"] = image.seeds.view(_HASH).reshape(-1)
        rows["parent"][image.parent_serials == 0] = np.void(NO_PARENT)
        rows["chain"] = image.chains.view(_HASH).reshape(-1)
        rows["tokens"] = image.tokens.view(rows.dtype["tokens"]).reshape(-1)
        self.serials[:] = image.serials

    def put(self, places: Places, parents: bytes, hashes: bytes, tokens: bytes) -> None:
        rows = self._rows
        rows["parent"][places] = np.frombuffer(parents, _HASH)
        rows["chain"][places] = np.frombuffer(hashes, _HASH)
        rows["tokens"][places] = np.frombuffer(tokens, rows.dtype["tokens"])

    def copy(self, sources: Places, targets: Places) -> None:
        self._rows[targets] = self._rows[sources]
        self.serials[targets] = self.serials[sources]

    def of(self, places: Places) -> NDArray[Any]:
        """Copies, structured: parent, chain, tokens."""
        rows: NDArray[Any] = self._rows[places]
        return rows


class Telling:
    def __init__(self, untold: NDArray[Any], contents: Contents) -> None:
        """``untold``: bool, places whose turn is yet to come."""
        self._untold = untold
        self._contents = contents
        self._kept: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        """Contents, scopes and serials of those that have left meanwhile."""
        self._left: NDArray[Any] = np.zeros((len(untold), 2), np.int32)
        """Of each place: its entry there, counted from 1 (0: it has not left), and the row in that."""

    def keep(self, places: Places, contents: Contents, scopes: NDArray[Any]) -> None:
        """These are about to leave."""
        leaving = places[self._untold[places] & (self._left[places, 0] == 0)]
        if len(leaving):
            self._kept.append((contents.of(leaving), scopes[leaving], contents.serials[leaving]))
            self._left[leaving, 0] = len(self._kept)
            self._left[leaving, 1] = np.arange(len(leaving))

    def take(self, places: Places, contents: Contents, scopes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """It is their turn: contents and scopes."""
        found, found_scopes = contents.of(places), scopes[places]
        for at, (entry, row) in self._gone(places):
            found[at], found_scopes[at] = self._kept[entry][0][row], self._kept[entry][1][row]
        self._untold[places] = False
        return found, found_scopes

    def in_order(self, first: int, end: int, looked: int, told: int) -> Iterator[tuple[int, Places]]:
        """The places from ``first`` to ``end``, by their serials, and how many were looked at for that.

        First none at all, while ``looked`` of them at a time are sorted; then ``told`` at a time.
        """
        runs: list[tuple[NDArray[Any], Places]] = []
        for begin in range(first, end, looked):
            part = slice(begin, min(begin + looked, end))
            places = np.flatnonzero(self._untold[part]) + begin
            serials = self._contents.serials[places]
            for at, (entry, row) in self._gone(places):
                serials[at] = self._kept[entry][2][row]
            order = np.argsort(serials)
            if len(places):
                runs.append((serials[order], places[order]))
            yield part.stop - begin, places[:0]
        for places in _merged(runs, told):
            yield len(places), places

    def _gone(self, places: Places) -> Iterator[tuple[int, tuple[int, int]]]:
        """Those of them that have left: which of ``places``, and where what they had is kept."""
        gone = np.flatnonzero(self._left[places, 0])
        for at, (entry, row) in zip(gone.tolist(), self._left[places[gone]].tolist(), strict=True):
            yield at, (entry - 1, row)


def _merged(runs: list[tuple[NDArray[Any], Places]], most: int) -> Iterator[Places]:
    """Sorted runs as one, ``most`` at a time: from the run that begins lowest, as far as it is below all others."""
    heap = [(int(serials[0]), run, 0) for run, (serials, _) in enumerate(runs)]
    heapify(heap)
    while heap:
        pieces, room = [], most
        while heap and room:
            _, run, at = heappop(heap)
            serials, places = runs[run]
            end = min(at + room, len(serials))
            if heap:
                end = at + int(np.searchsorted(serials[at:end], np.uint64(heap[0][0]), side="right"))
            pieces.append(places[at:end])
            room -= end - at
            if end < len(serials):
                heappush(heap, (int(serials[end]), run, end))
        yield np.concatenate(pieces)


def runs_of(contents: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Parts in which each follows the one before it, and where they begin."""
    if len(contents):
        breaks = np.flatnonzero(contents["parent"][1:] != contents["chain"][:-1]) + 1
        for begin, end in pairwise([0, *breaks.tolist(), len(contents)]):
            yield begin, contents[begin:end]
