"""A pool's memory, mapped into this process: pages to read and write, generations to check them by."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from mmap import mmap
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from radixkv.client import forks
from radixkv.client.session import Pages, Session
from radixkv.commands import CopyRow
from radixkv.config import DTYPE_BYTES, KVSpec, Layout
from radixkv.device import arena
from radixkv.device.descriptors import TableReader
from radixkv.errors import BadRequest
from radixkv.ipc.attach import Mapping

if TYPE_CHECKING:
    from radixkv.kernels import Pages as KernelPages

_SAME_SIZE: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Rows are moved as whole numbers of the element's size: numpy has no bfloat16, and a copy need not know."""


class PoolMemory:
    """Arena and descriptor table of one pool. Stays mapped as long as a view, a tensor or a sequence needs it.

    A forked child does not inherit the mapping: a view used there ends the child.
    """

    def __init__(self, mapping: Mapping) -> None:
        """Maps both descriptors and closes them. Errors: VersionMismatch for a table of another format."""
        pool = mapping.pool
        try:
            self._table = TableReader(mapping.table_fd)
            self._arena = self._map_arena(mapping)
        finally:
            os.close(mapping.arena_fd)
        forks.register_mapping(cast("mmap", self._table.records.base))
        self.name = pool.name
        self.pages = pool.pages
        self.ranks = pool.ranks
        self.host_pages = pool.host_pages
        self.spec = KVSpec(**pool.spec)
        self.layout = Layout.from_dict(pool.layout)
        self._views: list[Any] | None = None

    def keys(self, layer: int) -> KernelPages:
        """Torch view [pages, page_size, kv_heads, head_dim]; of a quantized pool ``kernels.QuantizedPages``."""
        return cast("KernelPages", self._layer(layer)[0])

    def values(self, layer: int) -> KernelPages:
        return cast("KernelPages", self._layer(layer)[1])

    def generations(self, pages: Pages) -> NDArray[Any]:
        return self._table.generations(pages)

    def knows(self, session: Session) -> bool:
        entry = self._table.session(session.welcome.slot)
        return entry.session == session.id and entry.epoch != 0

    def copy_rows(self, rows: Iterable[CopyRow]) -> bool:
        """False where there are several ranks: each has to copy in its own arena, and only the caller reaches all."""
        if self.ranks > 1:
            return False
        self.copy(rows)
        return True

    def take_page(self, page: int) -> NDArray[Any] | None:
        return None if self.ranks > 1 else self._rows[page].copy()

    def put_page(self, page: int, content: NDArray[Any]) -> None:
        self._rows[page] = content

    def copy(self, rows: Iterable[CopyRow]) -> None:
        """Copy the first ``n`` token rows of each source page into its target, all layers, keys and values."""
        for source, target, n in rows:
            self._rows[target, :, :, :n] = self._rows[source, :, :, :n]

    def _map_arena(self, mapping: Mapping) -> Any:
        memory = arena.map_shared(mapping.arena_fd, mapping.pool.arena_bytes)
        forks.register_mapping(memory)
        return memory

    @cached_property
    def _rows(self) -> NDArray[Any]:
        """The arena as ``Layout.shape`` says, of whole numbers."""
        size, shape = DTYPE_BYTES[self.layout.dtype], self.layout.shape(self.pages)
        strides = tuple(stride * size for stride in self.layout.strides)
        return np.ndarray(shape, _SAME_SIZE[size], self._arena, 0, strides)

    def _buffer(self) -> Any:
        """The arena as torch takes it."""
        return self._arena

    def _layer(self, layer: int) -> Any:
        if self._views is None:
            from radixkv.kernels.layout import views

            self._views = views(self._buffer(), self.layout, self.pages)
        if not 0 <= layer < len(self._views):
            raise BadRequest(f"the pool has layers 0 to {len(self._views) - 1}", layer=layer)
        return self._views[layer]


def map_pool(mapping: Mapping, before: object = None) -> PoolMemory:
    """A pool's memory, wherever it is. ``before``: what this process had of the same pool, from an earlier daemon.

    Errors: VersionMismatch; CudaUnavailable, CudaError for a pool on a CUDA device.
    """
    if not mapping.pool.device:
        return PoolMemory(mapping)
    from radixkv.client.cuda_mapping import CudaPoolMemory

    return CudaPoolMemory(mapping, before)
