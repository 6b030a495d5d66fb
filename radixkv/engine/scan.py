"""What a descriptor table still knows: contents, what each continues, and where in the two tiers each lies.

A content is what one page of tokens was computed to be, after all before it. It got a serial when it was published and
keeps it from place to place, so one serial in both tiers is one content. A record may be trusted if its state word says
CACHED and its check agrees (``device/descriptors.py``). Contents are linked by serials, never by a hash, and only
within one namespace and epoch: a place that has become something else has another serial, and what it was followed by
has lost its way to the root.

Kept is what a prompt could be served from: each content with all before it, on the device as long as all before it are
on the device too, below that in the host tier alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.allocator.page_states import CACHED
from radixkv.image import NO_PAGE, TableImage

NOWHERE = -1
_LOST = -2


class Contents(NamedTuple):
    """All that is kept, one entry each, whoever comes before first.

    device, host: int64, its place in the table in either tier, NOWHERE: not there; above: int64, the entry that it
    continues, NO_PAGE: none; stamps: uint64, the latest that either tier knows of the page itself.
    """

    device: NDArray[np.int64]
    host: NDArray[np.int64]
    above: NDArray[np.int64]
    stamps: NDArray[np.uint64]

    @property
    def records(self) -> NDArray[np.int64]:
        """A place of each, where its tokens are."""
        return np.where(self.device >= 0, self.device, self.host)

    @property
    def tiers(self) -> NDArray[np.int64]:
        """In which each is: 1 the device, 2 the host tier, 3 both."""
        return (self.device >= 0) + 2 * (self.host >= 0)

    def followers(self, among: NDArray[np.bool_]) -> NDArray[np.int64]:
        """How many of the entries ``among`` follow each."""
        above = self.above[among]
        return np.bincount(above[above >= 0], minlength=len(self.above))


class Runs(NamedTuple):
    """The entries, run after run, each from its first to its last; a run after the one that it continues.

    A run is what will be one node of a tree: entries that follow one another, each the only one behind the one before
    it, in the same tiers and with the same stamp. Run i is ``entries[begins[i] : begins[i + 1]]``.
    """

    entries: NDArray[np.int64]
    begins: NDArray[np.int64]
    stamps: NDArray[np.uint64]
    """Of each entry, in the order of the contents: the latest of its own and of those that continue it."""


def scan(image: TableImage) -> Contents:
    """Keeps what can be served. A few sorts and look-ups over all records; no loop over pages."""
    found = np.flatnonzero((image.states == CACHED) & image.sound)
    serials, entries = np.unique(image.serials[found], return_inverse=True)
    device = np.full(len(serials), NOWHERE, np.int64)
    host = device.copy()
    upper = found < image.pages
    device[entries[upper]] = found[upper]
    host[entries[~upper]] = found[~upper]
    stamps = np.zeros(len(serials), np.uint64)
    np.maximum.at(stamps, entries, image.stamps[found])
    above = _above(image, serials, np.where(device >= 0, device, host))
    device[~_all_the_way((device >= 0) & (above != _LOST), above)] = NOWHERE
    kept = _all_the_way(((device >= 0) | (host >= 0)) & (above != _LOST), above)
    above = above[kept]
    above[above >= 0] = (np.cumsum(kept) - 1)[above[above >= 0]]
    return Contents(device[kept], host[kept], above, stamps[kept])


def _above(image: TableImage, serials: NDArray[np.uint64], records: NDArray[np.int64]) -> NDArray[np.int64]:
    """The entry before each: NO_PAGE for what begins a prompt, ``_LOST`` where the link does not hold."""
    before = image.parent_serials[records]
    scopes = image.epochs[records].astype(np.uint64) << np.uint64(32) | image.namespaces[records]
    at = np.searchsorted(serials, before)
    there = at < np.arange(len(serials))  # whoever comes before has the smaller serial
    at[~there] = 0
    there &= (serials[at] == before) & (scopes[at] == scopes)
    return np.where(before == 0, NO_PAGE, np.where(there, at, _LOST))


def runs_of(contents: Contents, stamps: NDArray[np.uint64]) -> Runs:
    """``stamps``: of each entry itself."""
    above, tiers = contents.above, contents.tiers
    latest = _latest(stamps, above)
    continues = (above >= 0) & (contents.followers(above >= 0)[above] == 1)
    continues &= (tiers[above] == tiers) & (latest[above] == latest)
    first = np.where(continues, above, np.arange(len(above)))
    while (first != first[first]).any():
        first = first[first]
    entries = np.argsort(first, kind="stable")
    begins = np.append(np.flatnonzero(~continues[entries]), len(entries))
    return Runs(entries, begins, latest)


def _latest(stamps: NDArray[np.uint64], above: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The latest of each entry's own and of those behind it: told upwards, twice as far in every round."""
    latest, root = np.append(stamps, np.uint64(0)), len(above)
    ahead = np.append(np.where(above >= 0, above, root), root)
    while (ahead != root).any():
        np.maximum.at(latest, ahead, latest.copy())
        ahead = ahead[ahead]
    return latest[:root]


def _all_the_way(true: NDArray[np.bool_], above: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which entries it is true of, and of all before them. Each looks twice as far ahead in every round."""
    true = np.append(true, True)
    root = len(above)
    ahead = np.append(np.where(above >= 0, above, root), root)
    while (ahead != root).any():
        true &= true[ahead]
        ahead = ahead[ahead]
    return true[:root]
