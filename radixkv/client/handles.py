"""What pools and sequences are to every shell: all that needs no answer of the daemon's, so that nothing waits.

The shells derive from these and add the verbs: ``sync.py`` blocks, ``radixkv.aio`` awaits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from radixkv.client.link import Link
from radixkv.client.mapping import PoolMemory
from radixkv.client.pool import PoolState
from radixkv.client.sequence import SequenceState
from radixkv.commands import CopyRow
from radixkv.config import Layout

if TYPE_CHECKING:
    from radixkv.kernels import Pages


class PoolHandle(PoolState):
    """Holds its client, so that the session lasts as long as a pool of it is in use."""

    def __init__(self, client: Any, link: Link, name: str) -> None:
        super().__init__(link.core, name)
        self.client = client
        self.link = link

    @property
    def total_pages(self) -> int:
        return self.memory.pages

    @property
    def host_pages(self) -> int:
        """How many pages the host tier holds; 0: there is none. They are not mapped: what is hit is loaded first."""
        return self.memory.host_pages

    @property
    def ranks(self) -> int:
        """How many processes hold the pool together; ``keys`` and ``values`` are this one's, rank 0's."""
        return self._mapped().ranks

    @property
    def layout(self) -> Layout:
        """Where each element of a page lies in the arena."""
        return self._mapped().layout

    def keys(self, layer: int) -> Pages:
        """Torch view [pages, page_size, kv_heads, head_dim] of the mapped arena, of a quantized pool a
        ``radixkv.kernels.QuantizedPages``. After a restart of another daemon's arena: with a sequence's page table go
        by its ``memory``. Errors: BadRequest, Forked."""
        return self._mapped().keys(layer)

    def values(self, layer: int) -> Pages:
        """Torch view [pages, page_size, kv_heads, head_dim] of the mapped arena. Errors: BadRequest, Forked."""
        return self._mapped().values(layer)

    def copy_rows(self, rows: Iterable[CopyRow]) -> None:
        """Carry out a sequence's copy_rows in this process's arena. Errors: Forked."""
        self._mapped().copy(rows)

    def _mapped(self) -> PoolMemory:
        self.link.check()
        memory = self.memory
        assert isinstance(memory, PoolMemory)
        return memory

    def __repr__(self) -> str:
        return f"<Pool {self.name!r}: {self.total_pages} pages of {self.page_size} tokens>"


class SequenceHandle(SequenceState):
    __slots__ = ()

    pool: PoolHandle

    def valid(self) -> bool:
        """May what was computed from these pages be used? Asked *after* the device work. Errors: Forked."""
        if self.pool.link.forked:
            self.pool.link.check()
        return self.intact()
