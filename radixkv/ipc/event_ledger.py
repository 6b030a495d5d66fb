"""What routers are told of a pool: its descriptor writes, read as blocks that come to a tier and leave it.

A fold: ``Ledger.fold`` takes the writes of the engine in their order and says what each means to somebody who only
knows which blocks can be found. Nothing else is asked, so it can be done long after the reply has left. The ledger
remembers of each place what the descriptor table says of it, so that it can also tell everything from the beginning.
Blocks get their names here (``hashing.py``): the engine has none for them.

::

    Publish (no shadow)                    BlockStored, on the device
    Copied                                 BlockStored, in the tier of the targets
    Assign, Retire of places in use        BlockRemoved, from their tier
    NamespaceRecord with another epoch     BlockRemoved for all that is never found again: ``sweep`` looks for it

The tree has a content at most once in a tier, so a block that is removed from a tier is not there any more.

Everything is done in *slices* whose work has a bound (``Sizes``), whatever the size of a write or of the pool. After
each slice what the ledger knows is what it has told. What a sweep has not reached yet is no part of ``everything``, and
is told to be removed later all the same. A content cannot come back under the same name before its last page has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.commands import Assign, Copied, NamespaceRecord, Publish, Retire, Write
from radixkv.config import PoolConfig
from radixkv.hashing import chain, namespace_root
from radixkv.image import NO_PAGE, NamespaceImage, TableImage
from radixkv.ipc.event_telling import NO_PARENT, Contents, Places, Telling, runs_of
from radixkv.types import HASH_BYTES, TOKEN_BYTES

DEVICE, HOST = "GPU", "CPU"
"""Tiers, as vLLM's events call them."""


class Sizes(NamedTuple):
    """Bounds of a slice. ``tokens``: of one BlockStored (and about of a batch); ``hashes``: of one BlockRemoved;
    ``swept``, ``sorted``: places of the table looked at in one go when something is looked for in all of it."""

    tokens: int = 16_384
    hashes: int = 4096
    swept: int = 65_536
    sorted: int = 16_384


class Stored(NamedTuple):
    """Blocks that follow one another. ``parent``: the chain hash before them, b"" where they begin a prompt; ``hashes``
    and ``tokens``: packed; ``canonical``: of their namespace."""

    tier: str
    parent: bytes
    hashes: bytes
    tokens: bytes
    canonical: bytes


class Removed(NamedTuple):
    tier: str
    hashes: bytes


class Cleared(NamedTuple):
    """Nothing is cached. What is, is told next."""


Event = Stored | Removed | Cleared
Slice = list[Event]
"""What a bounded piece of work has found to tell, in its order. May be nothing."""


class Space(NamedTuple):
    """A namespace. ``seed`` stands where the chain hash before a first block would be."""

    epoch: int
    canonical: bytes
    seed: bytes


_Spaces = dict[int, Space]
"""By namespace id."""


class Ledger:
    """One pool. Arrays have an entry a place of the descriptor table: the device's, behind them the host tier's.

    ``looked``: places looked at since the beginning, and writes: a measure of the work done.
    """

    def __init__(self, config: PoolConfig, sizes: Sizes = Sizes()) -> None:  # noqa: B008 - a constant
        places = config.pages + (config.host_pages + config.host_staging_pages if config.host_pages else 0)
        self.pool = config.name
        self.looked = 0
        self._sizes = sizes
        self._device_pages = config.pages
        self._token_bytes = config.spec.page_size * TOKEN_BYTES
        self._most = max(1, sizes.tokens * TOKEN_BYTES // self._token_bytes)
        """Blocks of one BlockStored."""
        self._stored: NDArray[Any] = np.zeros(places, np.bool_)
        self._scopes: NDArray[Any] = np.zeros(places, np.uint64)
        """Epoch and namespace id."""
        self._contents = Contents(places, self._token_bytes)
        self._serial = 0
        self._spaces: _Spaces = {}
        self._dead: list[int] = []
        """Scopes of which nothing is found any more: what is left of them is swept out, from ``_swept`` on."""
        self._dying: list[int] = []
        """The same; their turn begins when the sweep has been everywhere."""
        self._swept = 0
        self._tellings: list[Telling] = []

    def restore(self, image: TableImage, cached: NDArray[Any]) -> None:
        """Begin with what a table says after a restart. ``cached``: bool, of each place. Contents of earlier epochs are
        never found again."""
        for name in image.names:
            self._spaces[name.id] = _space(name)
        scopes = image.epochs.astype(np.uint64) << np.uint64(32) | image.namespaces
        seeds = {space.epoch << 32 | identity: space.seed for identity, space in self._spaces.items()}
        self._scopes[:] = scopes
        self._stored[:] = cached & np.isin(scopes, np.array(list(seeds), np.uint64))
        self._contents.restore(image, np.flatnonzero(self._stored), scopes, seeds)
        self._serial = int(image.serials.max(initial=0))

    # -- one write ------------------------------------------------------------------------------------------------

    def fold(self, write: Write) -> Iterator[Slice]:
        """What this write means, in the order in which it is to be told. To be read before the next write is folded."""
        self.looked += 1
        fold = _FOLDS.get(type(write))
        return iter(()) if fold is None else fold(self, write)

    def _assign(self, write: Assign) -> Iterator[Slice]:
        for places in self._pieces(write.pages, self._sizes.hashes):
            events = self._remove(places)
            self._scopes[places] = write.epoch << 32 | write.namespace
            yield events

    def _retire(self, write: Retire) -> Iterator[Slice]:
        for places in self._pieces(write.pages, self._sizes.hashes):
            yield self._remove(places)

    def _publish(self, write: Publish) -> Iterator[Slice]:
        if write.shadow:
            return
        parent, at = b"", 0
        if write.parent_page != NO_PAGE:
            parent = self._contents.chains[write.parent_page].tobytes()
        for places in self._pieces(write.pages, self._most):
            space = self._spaces[int(self._scopes[places[0]]) & _ID_MASK]
            tokens = write.tokens[at * self._token_bytes : (at + len(places)) * self._token_bytes]
            hashes = chain(parent or space.seed, tokens, self._token_bytes)
            self._contents.put(places, (parent or NO_PARENT) + hashes[:-HASH_BYTES], hashes, tokens)
            self._contents.serials[places] = np.arange(self._serial + 1, self._serial + 1 + len(places), dtype="u8")
            self._serial += len(places)
            self._stored[places] = True
            yield [Stored(DEVICE, parent, hashes, tokens, space.canonical)]
            parent, at = hashes[-HASH_BYTES:], at + len(places)

    def _copied(self, write: Copied) -> Iterator[Slice]:
        """What is not found any more at its source is not found at its target either."""
        all_targets = _places(write.targets)
        for at, sources in enumerate(self._pieces(write.sources, self._most)):
            there = self._stored[sources]
            if self.sweeping:
                there &= ~np.isin(self._scopes[sources], self._gone_scopes())
            targets = all_targets[at * self._most : (at + 1) * self._most][there]
            self._contents.copy(sources[there], targets)
            self._scopes[targets] = self._scopes[sources[there]]
            self._stored[targets] = True
            upper = targets < self._device_pages
            events: Slice = []
            for tier, places in ((DEVICE, targets[upper]), (HOST, targets[~upper])):
                events += self._told(tier, self._contents.of(places), self._scopes[places], self._spaces)
            yield events

    def _renew(self, write: NamespaceRecord) -> Iterator[Slice]:
        before = self._spaces.get(write.namespace)
        self._spaces[write.namespace] = _space(write)
        if before is not None and before.epoch != write.epoch:
            (self._dying if self._swept else self._dead).append(before.epoch << 32 | write.namespace)
        return iter(())

    def _pieces(self, packed: bytes, most: int) -> Iterator[Places]:
        places = _places(packed)
        for at in range(0, len(places), most):
            piece = places[at : at + most]
            self.looked += len(piece)
            yield piece

    def _remove(self, places: Places) -> Slice:
        """No more of them than ``Sizes.hashes``."""
        places = places[self._stored[places]]
        if not len(places):
            return []
        for telling in self._tellings:
            telling.keep(places)
        self._stored[places] = False
        upper = places < self._device_pages
        tiers = ((DEVICE, places[upper]), (HOST, places[~upper]))
        return [Removed(tier, self._contents.chains[gone].tobytes()) for tier, gone in tiers if len(gone)]

    # -- what is never found again ----------------------------------------------------------------------------------

    @property
    def sweeping(self) -> bool:
        return bool(self._dead)

    def sweep(self) -> Slice:
        """Look at some places more: are they of an epoch that is over? However many namespaces end theirs, the table is
        gone through once for all of them."""
        begin = self._swept
        end = min(begin + self._sizes.swept, len(self._stored))
        over = self._stored[begin:end] & np.isin(self._scopes[begin:end], np.array(self._dead, np.uint64))
        found = np.flatnonzero(over) + begin
        if len(found) > self._sizes.hashes:
            end = int(found[self._sizes.hashes])
            found = found[: self._sizes.hashes]
        self.looked += end - begin
        self._swept = end
        if end == len(self._stored):
            self._dead, self._dying, self._swept = self._dying, [], 0
        return self._remove(found)

    def _gone_scopes(self) -> NDArray[Any]:
        return np.array([*self._dead, *self._dying], np.uint64)

    # -- everything -----------------------------------------------------------------------------------------------

    def everything(self) -> Iterator[Slice]:
        """All that can be found, parents first, as it is at the first slice: what is folded meanwhile does not change
        it. To be begun between two writes.

        Contents are looked up when it is their turn, and kept aside when they leave before.
        """
        spaces = dict(self._spaces)
        telling = Telling(self._stored.copy(), self._contents, self._scopes, self._gone_scopes())
        self._tellings.append(telling)
        try:
            yield [Cleared()]
            for tier, first, end in ((DEVICE, 0, self._device_pages), (HOST, self._device_pages, len(self._stored))):
                for looked, places in telling.in_order(first, end, self._sizes.sorted, self._most):
                    self.looked += looked
                    contents, scopes = telling.take(places)
                    yield self._told(tier, contents, scopes, spaces)
        finally:
            self._tellings.remove(telling)

    def _told(self, tier: str, contents: NDArray[Any], scopes: NDArray[Any], spaces: _Spaces) -> Slice:
        """One event for each run of blocks that follow one another. No more blocks than ``_most``."""
        return [
            Stored(
                tier,
                b"" if (parent := part["parent"][0].tobytes()) == NO_PARENT else parent,
                part["chain"].tobytes(),
                part["tokens"].tobytes(),
                spaces[int(scopes[at]) & _ID_MASK].canonical,
            )
            for at, part in runs_of(contents)
        ]


_FOLDS: dict[type, Callable[[Ledger, Any], Iterator[Slice]]] = {
    Assign: Ledger._assign,
    Publish: Ledger._publish,
    Copied: Ledger._copied,
    Retire: Ledger._retire,
    NamespaceRecord: Ledger._renew,
}
"""What matters to routers; all other writes do not."""


_ID_MASK = 0xFFFFFFFF
"""The lower half of a scope."""


def _space(of: NamespaceRecord | NamespaceImage) -> Space:
    return Space(of.epoch, of.canonical, namespace_root(of.canonical, of.invalidations))


def _places(packed: bytes) -> Places:
    return np.frombuffer(packed, "<i4").astype(np.intp)
