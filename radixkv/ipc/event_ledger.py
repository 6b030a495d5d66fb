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

from collections.abc import Iterator
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
EVENT_TOKENS = 32_768
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
            places,
            [
                ("parent", f"V{HASH_BYTES}"), ("chain", f"V{HASH_BYTES}"), ("tokens", f"V{self._token_bytes}"),
                ("serial", "<u8"),
            ],
        )  # fmt: skip
        self._serial = 0
        self._names: dict[int, tuple[int, bytes]] = {}
        """Epoch and canonical bytes by namespace id."""

    def restore(self, image: TableImage, cached: NDArray[Any]) -> None:
        """Begin with what a table says after a restart. ``cached``: bool, of each place. Contents of earlier epochs are
        never found again."""
        self._names = {name.id: (name.epoch, name.canonical) for name in image.names}
        scopes = image.epochs.astype(np.uint64) << np.uint64(32) | image.namespaces
        current = [np.uint64(name.epoch << 32 | name.id) for name in image.names]
        self._scopes[:] = scopes
        self._stored[:] = cached & np.isin(scopes, current)
        contents = self._contents
        contents["parent"] = image.seeds.view(f"V{HASH_BYTES}").reshape(-1)
        contents["parent"][image.parent_serials == 0] = np.void(_NONE)
        contents["chain"] = image.chains.view(f"V{HASH_BYTES}").reshape(-1)
        contents["tokens"] = image.tokens.view(f"V{self._token_bytes}").reshape(-1)
        contents["serial"] = image.serials
        self._serial = int(image.serials.max(initial=0))

    # -- one write ------------------------------------------------------------------------------------------------

    def fold(self, write: Write) -> list[Event]:
        """What this write means, in the order in which it is to be told."""
        match write:
            case Publish(shadow=False):
                return self._publish(write)
            case Copied():
                return self._copied(write)
            case Assign():
                places = _places(write.pages)
                events = self._remove(places)
                self._scopes[places] = write.epoch << 32 | write.namespace
                return events
            case Retire():
                return self._remove(_places(write.pages))
            case NamespaceRecord():
                return self._renew(write)
        return []

    def _publish(self, write: Publish) -> list[Event]:
        places = _places(write.pages)
        parent = _NONE if write.parent_page == NO_PAGE else write.parent
        columns = self._contents
        columns["parent"][places] = np.frombuffer(parent + write.hashes[:-HASH_BYTES], f"V{HASH_BYTES}")
        columns["chain"][places] = np.frombuffer(write.hashes, f"V{HASH_BYTES}")
        columns["tokens"][places] = np.frombuffer(write.tokens, f"V{self._token_bytes}")
        columns["serial"][places] = np.arange(self._serial + 1, self._serial + 1 + len(places))
        self._serial += len(places)
        self._stored[places] = True
        return list(self._told(DEVICE, columns[places], self._scopes[places]))

    def _copied(self, write: Copied) -> list[Event]:
        """What is not found any more at its source is not found at its target either."""
        sources, targets = _places(write.sources), _places(write.targets)
        there = self._stored[sources]
        sources, targets = sources[there], targets[there]
        self._contents[targets] = self._contents[sources]
        self._scopes[targets] = self._scopes[sources]
        self._stored[targets] = True
        upper = targets < self._device_pages
        events: list[Event] = []
        for tier, places in ((DEVICE, targets[upper]), (HOST, targets[~upper])):
            events += self._told(tier, self._contents[places], self._scopes[places])
        return events

    def _renew(self, write: NamespaceRecord) -> list[Event]:
        epoch, _ = self._names.get(write.namespace, (write.epoch, b""))
        self._names[write.namespace] = write.epoch, write.canonical
        if epoch == write.epoch:
            return []
        old = self._stored & (self._scopes == np.uint64(epoch << 32 | write.namespace))
        return self._remove(np.flatnonzero(old))

    def _remove(self, places: NDArray[Any]) -> list[Event]:
        places = places[self._stored[places]]
        if not len(places):
            return []
        self._stored[places] = False
        upper = places < self._device_pages
        chains = self._contents["chain"]
        return [
            Removed(tier, chains[gone[begin : begin + EVENT_HASHES]].tobytes())
            for tier, gone in ((DEVICE, places[upper]), (HOST, places[~upper]))
            for begin in range(0, len(gone), EVENT_HASHES)
        ]

    # -- everything -----------------------------------------------------------------------------------------------

    def everything(self) -> Iterator[Event]:
        """All that is stored, parents first, as it is now: what is folded meanwhile does not change it."""
        places = np.flatnonzero(self._stored)
        order = np.lexsort((self._contents["serial"][places], places >= self._device_pages))
        places = places[order]
        contents, scopes, names = self._contents[places], self._scopes[places], dict(self._names)
        host_at = int(np.count_nonzero(places < self._device_pages))
        yield Cleared()
        for tier, part in ((DEVICE, slice(host_at)), (HOST, slice(host_at, None))):
            yield from self._told(tier, contents[part], scopes[part], names)

    def _told(
        self, tier: str, contents: NDArray[Any], scopes: NDArray[Any], names: dict[int, tuple[int, bytes]] | None = None
    ) -> Iterator[Stored]:
        """One event for each run of blocks that follow one another."""
        names = self._names if names is None else names
        most = max(1, EVENT_TOKENS * TOKEN_BYTES // self._token_bytes)
        follows = contents["parent"][1:] == contents["chain"][:-1]
        begins = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(contents)]
        for begin, end in pairwise(begins):
            for at in range(begin, end, most):
                part = contents[at : min(end, at + most)]
                parent = part["parent"][0].tobytes()
                canonical = names.get(int(scopes[at]) & 0xFFFFFFFF, (0, b""))[1]
                yield Stored(
                    tier,
                    b"" if parent == _NONE else parent,
                    part["chain"].tobytes(),
                    part["tokens"].tobytes(),
                    canonical,
                )


def _places(packed: bytes) -> NDArray[np.intp]:
    return np.frombuffer(packed, "<i4").astype(np.intp)
