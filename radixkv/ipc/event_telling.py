"""Everything that is stored, told from the beginning while the table goes on changing: a consistent copy, lazily.

``Contents`` is what the ledger remembers of each place; ``Telling`` goes through the places that were in use at its
beginning in the order in which their contents were complete, so that whoever comes before is told before. It looks
contents up when it is their turn; what leaves earlier is kept aside (copy on write, as snapshots of databases do it).

Sorting is done in slices as well: parts of the table are sorted one by one, then merged as they are told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.hashing import page_hash, pages_of
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
        self._token_bytes = token_bytes
        self.serials: NDArray[Any] = np.zeros(places, np.uint64)

    @property
    def chains(self) -> NDArray[Any]:
        chains: NDArray[Any] = self._rows["chain"]
        return chains

    def restore(self, image: TableImage, places: Places, scopes: NDArray[Any], seeds: Mapping[int, bytes]) -> None:
        """What a table has in these places, of each also what comes before it. They are named anew:
        ``seeds``, by scope, stand in for the hash before the first."""
        rows = self._rows
        rows["tokens"] = image.tokens.view(rows.dtype["tokens"]).reshape(-1)
        self.serials[:] = image.serials
        serials, firsts, entries = np.unique(image.serials[places], return_index=True, return_inverse=True)
        records = places[firsts]
        before = image.parent_serials[records]
        at = np.where(before == 0, -1, np.searchsorted(serials, before)).tolist()
        tokens = pages_of(rows["tokens"][records].tobytes(), self._token_bytes)
        parents: list[bytes] = []
        chains: list[bytes] = []
        for above, scope, page in zip(at, scopes[records].tolist(), tokens, strict=True):
            parent = seeds[scope] if above < 0 else chains[above]
            parents.append(NO_PARENT if above < 0 else parent)
            chains.append(page_hash(parent, page))
        rows["parent"][places] = np.frombuffer(b"".join(parents), _HASH)[entries]
        rows["chain"][places] = np.frombuffer(b"".join(chains), _HASH)[entries]

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
    def __init__(self, untold: NDArray[Any], contents: Contents, scopes: NDArray[Any], over: NDArray[Any]) -> None:
        """``untold``: bool, places whose turn is yet to come, but for those of the scopes that are ``over``."""
        self._untold = untold
        self._contents = contents
        self._scopes = scopes
        self._over = over
        self._kept: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        """Contents, scopes and serials of those that have left meanwhile."""
        self._left: NDArray[Any] = np.zeros((len(untold), 2), np.int32)
        """Of each place: its entry there, counted from 1 (0: it has not left), and the row in that."""

    def keep(self, places: Places) -> None:
        """These are about to leave."""
        leaving = places[self._untold[places] & (self._left[places, 0] == 0)]
        if len(leaving):
            contents = self._contents
            self._kept.append((contents.of(leaving), self._scopes[leaving], contents.serials[leaving]))
            self._left[leaving, 0] = len(self._kept)
            self._left[leaving, 1] = np.arange(len(leaving))

    def take(self, places: Places) -> tuple[NDArray[Any], NDArray[Any]]:
        """It is their turn: contents and scopes."""
        found, scopes = self._contents.of(places), self._scopes[places]
        for at, (entry, row) in self._gone(places):
            found[at], scopes[at] = self._kept[entry][0][row], self._kept[entry][1][row]
        self._untold[places] = False
        return found, scopes

    def in_order(self, first: int, end: int, looked: int, told: int) -> Iterator[tuple[int, Places]]:
        """The places from ``first`` to ``end``, by their serials, and how many were looked at for that.

        First none at all, while ``looked`` of them at a time are sorted; then ``told`` at a time.
        """
        runs = []
        for begin in range(first, end, looked):
            part = slice(begin, min(begin + looked, end))
            places = np.flatnonzero(self._untold[part]) + begin
            serials, scopes = self._contents.serials[places], self._scopes[places]
            for at, (entry, row) in self._gone(places):
                serials[at], scopes[at] = self._kept[entry][2][row], self._kept[entry][1][row]
            if len(self._over):
                wanted = ~np.isin(scopes, self._over)
                self._untold[places] = wanted
                places, serials = places[wanted], serials[wanted]
            order = np.argsort(serials)
            if len(places):
                runs.append(_Run(serials[order], places[order]))
            yield part.stop - begin, places[:0]
        yield from _merged(runs, looked, told)

    def _gone(self, places: Places) -> Iterator[tuple[int, tuple[int, int]]]:
        """Those of them that have left: which of ``places``, and where what they had is kept."""
        gone = np.flatnonzero(self._left[places, 0])
        for at, (entry, row) in zip(gone.tolist(), self._left[places[gone]].tolist(), strict=True):
            yield at, (entry - 1, row)


class _Run:
    """Places sorted by their serials, what has been taken no more among them."""

    def __init__(self, serials: NDArray[Any], places: Places) -> None:
        self.serials = serials
        self._places = places

    def take(self, count: int) -> tuple[NDArray[Any], Places]:
        taken = self.serials[:count], self._places[:count]
        self.serials, self._places = self.serials[count:], self._places[count:]
        return taken


def _merged(runs: list[_Run], looked: int, most: int) -> Iterator[tuple[int, Places]]:
    """Runs as one, up to ``most`` places at a time, and how many were looked at for that: ``looked`` or a few more."""
    while runs := sorted((run for run in runs if len(run.serials)), key=lambda run: int(run.serials[0])):
        first = runs[0].serials[:most]
        if len(runs) == 1 or first[-1] <= runs[1].serials[0]:
            count, (_, places) = len(first), runs[0].take(most)
            yield count, places
            continue
        heads = [run.serials[: max(1, looked // len(runs))] for run in runs]
        limit = _limit(heads, [len(run.serials) for run in runs], most)
        taken = [
            run.take(int(np.searchsorted(head, limit, side="right"))) for run, head in zip(runs, heads, strict=True)
        ]
        serials, places = (np.concatenate(part) for part in zip(*taken, strict=True))
        yield sum(map(len, heads)), places[np.argsort(serials)]


def _limit(heads: list[NDArray[Any]], lengths: list[int], most: int) -> Any:
    """Up to which serial all is in the heads (of runs of these lengths), and no more than ``most``."""
    ends = [head[-1] for head, length in zip(heads, lengths, strict=True) if len(head) < length]
    known = np.concatenate(heads)
    if ends:
        known = known[known <= min(ends)]
    return np.partition(known, most - 1)[most - 1] if len(known) > most else known.max()


def runs_of(contents: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Parts in which each follows the one before it, and where they begin."""
    if len(contents):
        breaks = np.flatnonzero(contents["parent"][1:] != contents["chain"][:-1]) + 1
        for begin, end in pairwise([0, *breaks.tolist(), len(contents)]):
            yield begin, contents[begin:end]
