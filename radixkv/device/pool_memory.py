"""The memory of one pool as the daemon holds it: arenas it never maps, and the descriptor table it writes."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from radixkv.commands import PoolMap
from radixkv.config import DTYPE_BYTES, KVSpec, Layout, PoolConfig
from radixkv.device import arena
from radixkv.device.descriptors import Geometry, TableReader
from radixkv.device.writer import TableWriter

if TYPE_CHECKING:
    from radixkv.device.copier_process import PoolTiers


def geometry_of(pool: PoolConfig, cache_id: str, sessions: int) -> Geometry:
    return Geometry(
        pool=pool.name,
        cache_id=cache_id,
        pages=pool.pages,
        page_size=pool.spec.page_size,
        namespaces=pool.namespaces,
        sessions=sessions,
        host_pages=pool.host_pages and pool.host_pages + pool.host_staging_pages,
    )


class Placement(NamedTuple):
    """Where a pool's device tier is. ``uuids``: a CUDA device for each rank, none for the machine's memory.

    ``arena_bytes``: what is mapped of each rank; a device rounds up.
    """

    uuids: tuple[str, ...]
    arena_bytes: int


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """File descriptors and what a worker must know to use them."""

    arena_fds: tuple[int, ...]
    """One a rank."""
    host_fds: tuple[int, ...]
    """The arenas of the host tier, one a rank; none without it. Workers never get them."""
    placement: Placement
    table: TableWriter
    table_fd: int
    """The table once more, for readers: nobody can write through this one."""
    description: PoolMap

    @classmethod
    def create(cls, pool: PoolConfig, cache_id: str, sessions: int) -> PoolMemory:
        """Reserve all of it. Errors: MemoryTooSmall; CudaUnavailable."""
        with ExitStack() as undo:
            arena_fds, placement = _create_arenas(pool, undo)
            host_fds = tuple(_kept(arena.create("host", pool.host_arena_bytes), undo) for _ in range(pool.host_ranks))
            table = TableWriter(geometry_of(pool, cache_id, sessions))
            undo.pop_all()
        return cls._of(pool, arena_fds, host_fds, table, placement)

    @classmethod
    def reopen(
        cls, pool: PoolConfig, fds: tuple[tuple[int, ...], tuple[int, ...], int], placement: Placement
    ) -> PoolMemory:
        """What an earlier daemon left behind, in the sizes of ``pool``. Takes the descriptors over.

        ``fds``: the ranks' arenas, those of the host tier, the table. Needs no CUDA driver.

        Errors: VersionMismatch.
        """
        arena_fds, host_fds, table_fd = fds
        with closing(TableReader(os.dup(table_fd))) as reader:
            geometry = reader.geometry
        return cls._of(pool, arena_fds, host_fds, TableWriter(geometry, table_fd), placement)

    @property
    def tiers(self) -> PoolTiers:
        """What the copier needs of a pool with a host tier."""
        from radixkv.device.copier_process import PoolTiers

        spec, layout = KVSpec(**self.description.spec), self.description.layout
        layer_bytes = layout["layer_stride"] * DTYPE_BYTES[spec.dtype]
        return PoolTiers(
            spec.page_bytes, self.arena_fds, self.host_fds, self.placement.uuids, self.description.pages, spec.layers,
            layer_bytes,
        )  # fmt: skip

    def map_of(self, rank: int) -> PoolMap:
        """What a worker must know to map the arena of ``rank``."""
        uuids = self.placement.uuids
        return replace(self.description, device=uuids[rank]) if uuids else self.description

    def read(self) -> TableReader:
        """The table, to read all of it; to be closed."""
        return TableReader(os.dup(self.table_fd))

    @property
    def tainted(self) -> bool:
        with closing(self.read()) as table:
            return table.tainted

    @classmethod
    def _of(
        cls,
        pool: PoolConfig,
        arena_fds: tuple[int, ...],
        host_fds: tuple[int, ...],
        table: TableWriter,
        placement: Placement,
    ) -> PoolMemory:
        description = PoolMap(
            name=pool.name,
            pages=pool.pages,
            arena_bytes=placement.arena_bytes,
            table_bytes=table.geometry.table_bytes,
            spec=asdict(pool.spec),
            layout=Layout.of(pool.spec).as_dict(),
            ranks=pool.ranks,
            host_pages=pool.host_pages,
        )
        table_fd = arena.reopen_readonly(table.fd)
        return cls(arena_fds, host_fds, placement, table, table_fd, description)

    def close(self) -> None:
        self.table.close()
        os.close(self.table_fd)
        for fd in (*self.arena_fds, *self.host_fds):
            os.close(fd)


def _create_arenas(pool: PoolConfig, undo: ExitStack) -> tuple[tuple[int, ...], Placement]:
    """One for each rank. Errors: MemoryTooSmall; CudaUnavailable."""
    if not pool.cuda_devices:
        fds = tuple(_kept(arena.create("arena", pool.arena_bytes), undo) for _ in range(pool.ranks))
        return fds, Placement((), pool.arena_bytes)
    from radixkv.device import cuda_arena, cuda_driver

    devices = cuda_driver.find(pool.cuda_devices)
    size = max(cuda_arena.whole_bytes(device, pool.arena_bytes) for device in devices)
    fds = tuple(_kept(cuda_arena.create(device, size), undo) for device in devices)
    return fds, Placement(tuple(device.uuid for device in devices), size)


def _kept(fd: int, undo: ExitStack) -> int:
    undo.callback(os.close, fd)
    return fd
