"""What a daemon is put together from. ``starting.py`` makes it."""

from __future__ import annotations

import select
import socket
from typing import TYPE_CHECKING, NamedTuple

from radixkv.config import Config
from radixkv.device.pool_memory import PoolMemory
from radixkv.device.quiescence import Quiescence
from radixkv.engine.engine import Engine
from radixkv.ipc.attach import Listener
from radixkv.ipc.endpoint import Claim, Endpoint
from radixkv.ipc.fdstore import Store, Stored
from radixkv.ipc.router import Router

if TYPE_CHECKING:
    from radixkv.device.copiers import Copiers
    from radixkv.ipc.events import Events


class Parts(NamedTuple):
    """``claim``: None if the keeper has it. ``stored``: what the store still holds of members."""

    config: Config
    endpoint: Endpoint
    claim: Claim | None
    store: Store | None
    stored: Stored
    pools: dict[str, PoolMemory]
    engine: Engine
    router: Router
    listener: Listener
    epoll: select.epoll
    signals: socket.socket
    copier: Copiers | None = None
    """None if no pool has a host tier."""
    events: Events | None = None
    """None if nobody is told."""
    quiescence: Quiescence | None = None
    """None if no pool is on a CUDA device."""

    def leave(self) -> None:
        """The next daemon goes on at the same endpoint: its files stay, as the store's sockets do."""
        if self.claim is not None:
            self.claim.leave()
