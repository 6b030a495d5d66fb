"""The memory of one pool as the daemon holds it: arenas it never maps, and the descriptor table it writes."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from radixkv.commands import PoolMap
from radixkv.config import Layout, PoolConfig
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


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """File descriptors and what a worker must know to use them."""

    arena_fds: tuple[int, ...]
    """One a rank."""
    host_fds: tuple[int, ...]
    """The arenas of the host tier, one a rank; none without it. Workers never get them."""
    page_bytes: int
    table: TableWriter
    table_fd: int
    """The table once more, for readers: nobody can write through this one."""
    description: PoolMap

    @classmethod
    def create(cls, pool: PoolConfig, cache_id: str, sessions: int) -> PoolMemory:
        """Reserve all of it. Errors: MemoryTooSmall."""
        with ExitStack() as undo:

            def create(name: str, size: int) -> int:
                fd = arena.create(name, size)
                undo.callback(os.close, fd)
                return fd

            arena_fds = tuple(create("arena", pool.arena_bytes) for _ in range(pool.ranks))
            host_fds = tuple(create("host", pool.host_arena_bytes) for _ in range(pool.host_ranks))
            table = TableWriter(geometry_of(pool, cache_id, sessions))
            undo.pop_all()
        return cls._of(pool, arena_fds, host_fds, table)

    @classmethod
    def reopen(
        cls, pool: PoolConfig, arena_fds: tuple[int, ...], host_fds: tuple[int, ...], table_fd: int
    ) -> PoolMemory:
        """What an earlier daemon left behind, in the sizes of ``pool``. Takes the descriptors over.

        Errors: VersionMismatch.
        """
        with closing(TableReader(os.dup(table_fd))) as reader:
            geometry = reader.geometry
        return cls._of(pool, arena_fds, host_fds, TableWriter(geometry, table_fd))

    @property
    def tiers(self) -> PoolTiers:
        """What the copier needs of a pool with a host tier."""
        from radixkv.device.copier_process import PoolTiers

        return PoolTiers(self.page_bytes, self.arena_fds, self.host_fds)

    def read(self) -> TableReader:
        """The table, to read all of it; to be closed."""
        return TableReader(os.dup(self.table_fd))

    @property
    def tainted(self) -> bool:
        with closing(self.read()) as table:
            return table.tainted

    @classmethod
    def _of(
        cls, pool: PoolConfig, arena_fds: tuple[int, ...], host_fds: tuple[int, ...], table: TableWriter
    ) -> PoolMemory:
        description = PoolMap(
            name=pool.name,
            pages=pool.pages,
            arena_bytes=pool.arena_bytes,
            table_bytes=table.geometry.table_bytes,
            spec=asdict(pool.spec),
            layout=Layout.of(pool.spec).as_dict(),
            ranks=pool.ranks,
            host_pages=pool.host_pages,
        )
        table_fd = arena.reopen_readonly(table.fd)
        return cls(arena_fds, host_fds, pool.spec.page_bytes, table, table_fd, description)

    def close(self) -> None:
        self.table.close()
        os.close(self.table_fd)
        for fd in (*self.arena_fds, *self.host_fds):
            os.close(fd)
