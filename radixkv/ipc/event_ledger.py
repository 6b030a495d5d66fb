"""What routers are told of a pool: its descriptor writes, read as blocks that come to a tier and leave it.

A fold: ``Ledger.fold`` takes the writes of the engine in their order and says what each means to somebody who only
knows which blocks can be found. Nothing else is asked, so it can be done long after the reply has left. The ledger
remembers of each place what the descriptor table says of it, so that it can also tell everything from the beginning.

::

    Publish (no shadow)                    BlockStored, on the device
    Copied                                 BlockStored, in the tier of the targets
    Assign, Retire of places in use        BlockRemoved, from their tier
    NamespaceRecord with another epoch     BlockRemoved for all that is never found again

The tree has a content at most once in a tier, so a block that is removed from a tier is not there any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.commands import Assign, Copied, NamespaceRecord, Publish, Retire, Write
from radixkv.config import PoolConfig
from radixkv.image import NO_PAGE, TableImage
from radixkv.types import HASH_BYTES, TOKEN_BYTES

DEVICE, HOST = "GPU", "CPU"
"""Tiers, as vLLM's events call them."""
EVENT_TOKENS = 16_384
"""No event has more: larger ones are told as several."""
EVENT_HASHES = 4096
_NONE = bytes(HASH_BYTES)
"""Parent of what begins a prompt."""


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


_Names = dict[int, tuple[int, bytes]]
"""Epoch and canonical bytes by namespace id."""
_HASH = f"V{HASH_BYTES}"


class Ledger:
    """One pool. Arrays have an entry a place of the descriptor table: the device's, behind them the host tier's."""

    def __init__(self, config: PoolConfig) -> None:
        places = config.pages + (config.host_pages + config.host_staging_pages if config.host_pages else 0)
        self.pool = config.name
        self._device_pages = config.pages
        self._token_bytes = config.spec.page_size * TOKEN_BYTES
        self._stored: NDArray[Any] = np.zeros(places, np.bool_)
        self._scopes: NDArray[Any] = np.zeros(places, np.uint64)
        """Epoch and namespace id."""
        self._contents: NDArray[Any] = np.zeros(
            places, [("parent", _HASH), ("chain", _HASH), ("tokens", f"V{self._token_bytes}")]
        )
        self._serials: NDArray[Any] = np.zeros(places, np.uint64)
        """Of contents, in the order in which they were complete: whoever comes before has the smaller one."""
        self._serial = 0
        self._names: _Names = {}
        self._most = max(1, EVENT_TOKENS * TOKEN_BYTES // self._token_bytes)
        """Blocks of one event."""
        self._tellings: list[_Telling] = []

    def restore(self, image: TableImage, cached: NDArray[Any]) -> None:
        """Begin with what a table says after a restart. ``cached``: bool, of each place. Contents of earlier epochs are
        never found again."""
        self._names = {name.id: (name.epoch, name.canonical) for name in image.names}
        scopes = image.epochs.astype(np.uint64) << np.uint64(32) | image.namespaces
        current = [np.uint64(name.epoch << 32 | name.id) for name in image.names]
        self._scopes[:] = scopes
        self._stored[:] = cached & np.isin(scopes, current)
        contents = self._contents
        contents["parent"] = image.seeds.view(_HASH).reshape(-1)
        contents["parent"][image.parent_serials == 0] = np.void(_NONE)
        contents["chain"] = image.chains.view(_HASH).reshape(-1)
        contents["tokens"] = image.tokens.view(f"V{self._token_bytes}").reshape(-1)
        self._serials[:] = image.serials
        self._serial = int(image.serials.max(initial=0))

    # -- one write ------------------------------------------------------------------------------------------------

    def fold(self, write: Write) -> Iterable[Event]:
        """What this write means, in the order in which it is to be told. To be read before the next write is folded."""
        fold = _FOLDS.get(type(write))
        return () if fold is None else fold(self, write)

    def _assign(self, write: Assign) -> Iterable[Event]:
        places = _places(write.pages)
        events = self._remove(places)
        self._scopes[places] = write.epoch << 32 | write.namespace
        return events

    def _retire(self, write: Retire) -> Iterable[Event]:
        return self._remove(_places(write.pages))

    def _publish(self, write: Publish) -> Iterable[Event]:
        if write.shadow:
            return ()
        places = _places(write.pages)
        first = write.parent_page == NO_PAGE
        contents = self._contents
        parents = (_NONE if first else write.parent) + write.hashes[:-HASH_BYTES]
        contents["parent"][places] = np.frombuffer(parents, _HASH)
        contents["chain"][places] = np.frombuffer(write.hashes, _HASH)
        contents["tokens"][places] = np.frombuffer(write.tokens, contents.dtype["tokens"])
        self._serials[places] = np.arange(self._serial + 1, self._serial + 1 + len(places), dtype=np.uint64)
        self._serial += len(places)
        self._stored[places] = True
        scope = int(self._scopes[places[0]])
        if len(places) > self._most:
            return self._told(DEVICE, contents[places], self._scopes[places], self._names)
        return [Stored(DEVICE, b"" if first else write.parent, write.hashes, write.tokens, _name(self._names, scope))]

    def _copied(self, write: Copied) -> Iterable[Event]:
        """What is not found any more at its source is not found at its target either."""
        sources, targets = _places(write.sources), _places(write.targets)
        there = self._stored[sources]
        sources, targets = sources[there], targets[there]
        self._contents[targets] = self._contents[sources]
        self._serials[targets] = self._serials[sources]
        self._scopes[targets] = self._scopes[sources]
        self._stored[targets] = True
        upper = targets < self._device_pages
        events: list[Event] = []
        for tier, places in ((DEVICE, targets[upper]), (HOST, targets[~upper])):
            events += self._told(tier, self._contents[places], self._scopes[places], self._names)
        return events

    def _renew(self, write: NamespaceRecord) -> Iterable[Event]:
        epoch, _ = self._names.get(write.namespace, (write.epoch, b""))
        self._names[write.namespace] = write.epoch, write.canonical
        if epoch == write.epoch:
            return ()
        old = self._stored & (self._scopes == np.uint64(epoch << 32 | write.namespace))
        return self._remove(np.flatnonzero(old))

    def _remove(self, places: NDArray[Any]) -> Iterable[Event]:
        places = places[self._stored[places]]
        if not len(places):
            return ()
        for telling in self._tellings:
            telling.keep(places, self._contents, self._scopes)
        self._stored[places] = False
        return self._gone(places)

    def _gone(self, places: NDArray[Any]) -> Iterator[Removed]:
        """Their contents are still there."""
        upper = places < self._device_pages
        for tier, gone in ((DEVICE, places[upper]), (HOST, places[~upper])):
            for begin in range(0, len(gone), EVENT_HASHES):
                yield Removed(tier, self._contents["chain"][gone[begin : begin + EVENT_HASHES]].tobytes())

    # -- everything -----------------------------------------------------------------------------------------------

    def everything(self) -> Iterator[Event]:
        """All that is stored, parents first, as it is at the first event: what is folded meanwhile does not change it.

        A slice at a time: contents are looked up when it is their turn, and kept aside when they leave before.
        """
        names = dict(self._names)
        telling = _Telling(self._stored.copy())
        device, host = (np.flatnonzero(part) for part in np.split(telling.untold, [self._device_pages]))
        tiers = ((DEVICE, device), (HOST, host + self._device_pages))
        ordered = [(tier, places[np.argsort(self._serials[places])]) for tier, places in tiers]
        self._tellings.append(telling)
        try:
            yield Cleared()
            for tier, places in ordered:
                for at in range(0, len(places), self._most):
                    contents, scopes = telling.take(places[at : at + self._most], self._contents, self._scopes)
                    yield from self._told(tier, contents, scopes, names)
        finally:
            self._tellings.remove(telling)

    def _told(self, tier: str, contents: NDArray[Any], scopes: NDArray[Any], names: _Names) -> Iterator[Stored]:
        """One event for each run of blocks that follow one another."""
        follows = contents["parent"][1:] == contents["chain"][:-1]
        begins = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(contents)]
        for begin, end in pairwise(begins):
            for at in range(begin, end, self._most):
                part = contents[at : min(end, at + self._most)]
                parent = part["parent"][0].tobytes()
                yield Stored(
                    tier,
                    b"" if parent == _NONE else parent,
                    part["chain"].tobytes(),
                    part["tokens"].tobytes(),
                    _name(names, int(scopes[at])),
                )


class _Telling:
    """Everything, being told. ``untold``: bool, places whose turn is yet to come."""

    def __init__(self, untold: NDArray[Any]) -> None:
        self.untold = untold
        self._kept: list[tuple[NDArray[Any], NDArray[Any]]] = []
        """Contents and scopes of those that have left meanwhile; ``_left``: of which entry, and of which row there."""
        self._left: NDArray[Any] = np.zeros((len(untold), 2), np.int32)

    def keep(self, places: NDArray[Any], contents: NDArray[Any], scopes: NDArray[Any]) -> None:
        """These are about to leave."""
        leaving = places[self.untold[places]]
        if len(leaving):
            self._left[leaving, 0] = len(self._kept)
            self._left[leaving, 1] = np.arange(len(leaving))
            self._kept.append((contents[leaving], scopes[leaving]))
            self.untold[leaving] = False

    def take(
        self, places: NDArray[Any], contents: NDArray[Any], scopes: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """It is their turn."""
        found, found_scopes = contents[places], scopes[places]
        gone = np.flatnonzero(~self.untold[places])
        for at, (entry, row) in zip(gone.tolist(), self._left[places[gone]].tolist(), strict=True):
            kept, kept_scopes = self._kept[entry]
            found[at], found_scopes[at] = kept[row], kept_scopes[row]
        self.untold[places] = False
        return found, found_scopes


_FOLDS: dict[type, Callable[[Ledger, Any], Iterable[Event]]] = {
    Assign: Ledger._assign,
    Publish: Ledger._publish,
    Copied: Ledger._copied,
    Retire: Ledger._retire,
    NamespaceRecord: Ledger._renew,
}
"""What matters to routers; all other writes do not."""
FOLDED = frozenset(_FOLDS)


def _name(names: _Names, scope: int) -> bytes:
    return names.get(scope & 0xFFFFFFFF, (0, b""))[1]


def _places(packed: bytes) -> NDArray[np.intp]:
    return np.frombuffer(packed, "<i4").astype(np.intp)
