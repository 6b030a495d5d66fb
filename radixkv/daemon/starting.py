"""How a daemon comes to be: cold, with empty pools, or warm, with what an earlier one left in the store.

::

    endpoint   claimed and opened here, or its open sockets come from the store
    copier     started if a pool has a host tier
    memory     stored and fitting ──> opened, locked, scanned (engine/recover.py)         warm
               --cold, tainted, or a first start that was killed ──> removed from the store, made anew    cold
               stored and of other sizes, or another version ──> refused (exit 2)

What is made here is in the store before anybody can see it. ``stack`` gives everything back, in reverse order.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from radixkv.config import Config, PoolConfig
from radixkv.daemon.parts import Parts
from radixkv.device import arena, manifest
from radixkv.device.descriptors import CACHED
from radixkv.device.pool_memory import Placement, PoolMemory, geometry_of
from radixkv.device.quiescence import Quiescence, processes_on
from radixkv.device.writer import apply_all
from radixkv.engine.engine import Engine
from radixkv.engine.recover import Found, recover
from radixkv.errors import ConfigError, VersionMismatch
from radixkv.ipc.attach import Listener
from radixkv.ipc.endpoint import Claim, Endpoint, open_socket, prepare_directory, resolve
from radixkv.ipc.fdstore import SESSIONS_MAX, Store, Stored, find_store, raise_open_files, take_stored
from radixkv.ipc.member import never_welcomed, stored_members
from radixkv.ipc.router import Router
from radixkv.ipc.signals import signal_socket

if TYPE_CHECKING:
    from radixkv.device.copiers import Copiers
    from radixkv.ipc.events import Events

DOORS, MANIFEST = "doors", "manifest"
LOCK_PATIENCE_S = 5.0
"""How long memory that somebody else still writes to is waited for. A copier ends with its daemon, but the kernel needs
a moment for it, the longer the larger the arenas it maps; a daemon that really serves keeps the lock."""


class RecoveryFailed(Exception):
    """A table that cannot be, or a bug: it is marked, so that the next start is cold. Ends ``serve`` with exit 70."""


def start(stack: ExitStack, config: Config, cold: bool, log: Any) -> Parts:
    """Take the endpoint, then the memory, then open the doors.

    Errors: ConfigError, PermissionDenied, EndpointInUse, MemoryInUse, MemoryTooSmall, Unavailable (no store where one
    is announced), RecoveryFailed.
    """
    stored = take_stored(os.environ)
    signals = stack.enter_context(signal_socket())
    raise_open_files()
    store = find_store(os.environ)
    if store is not None:
        stack.callback(store.close)
    starter = _Starter(stack, config, store, stored, log)
    endpoint = resolve(config.server.endpoint)
    claim, router_door, attach_door = starter.open_doors(endpoint)
    pools, engine = starter.open_memory(cold)
    copier = starter.start_copier(pools)
    events = starter.open_events(pools)
    router = Router(endpoint, config.limits, router_door)
    stack.callback(router.close)
    epoll = stack.enter_context(select.epoll())
    ends = (router, Listener(attach_door), epoll, signals, copier, events, starter.open_quiescence(pools))
    return Parts(config, endpoint, claim, store, stored, pools, engine, *ends)


_Doors = tuple[Claim | None, socket.socket, socket.socket]
"""The claim (None: the keeper has it), and where the router and the attach socket listen."""


class _Starter:
    """One start. ``stored``: what the store has that nobody has taken yet."""

    def __init__(self, stack: ExitStack, config: Config, store: Store | None, stored: Stored, log: Any) -> None:
        self._stack = stack
        self._config = config
        self._store = store
        self._stored = stored
        self._log = log
        self._locks: list[int] = []
        sessions = config.limits.sessions
        if store is not None and sessions > SESSIONS_MAX:
            raise ConfigError(
                f"limits.sessions = {sessions} is not allowed; allowed: at most {SESSIONS_MAX} under a keeper"
            )

    # -- the endpoint -----------------------------------------------------------------------------------------------

    def open_doors(self, endpoint: Endpoint) -> _Doors:
        """The keeper's; those that an earlier daemon left in the store, with its claim; or our own, then stored."""
        given = self._stored.pop(DOORS, [])
        doors = self._given_doors(endpoint, given) if given else None
        _, router, attach = doors = doors or self._new_doors(endpoint)
        self._stack.callback(router.close)
        self._stack.callback(attach.close)
        return doors

    def _given_doors(self, endpoint: Endpoint, given: Sequence[int]) -> _Doors | None:
        """None when their files are gone: nobody would find us there. Errors: ConfigError when they are of another
        endpoint."""
        lock, doors = -1, {}
        for fd in given:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                door = socket.socket(fileno=fd)
                doors[door.type] = door
            else:
                lock = fd
        router, attach = doors[socket.SOCK_STREAM], doors[socket.SOCK_SEQPACKET]
        at = router.getsockname()
        if at != str(endpoint.path):
            raise ConfigError(
                f"server.endpoint = {endpoint.address!r} is not allowed; allowed: 'ipc://{at}', where the sockets are "
                "that this daemon was given; stop its keeper to change it"
            )
        if lock < 0:
            return None, router, attach
        try:
            claim = Claim.inherit(endpoint, lock)
        except FileNotFoundError:
            router.close()
            attach.close()
            self._drop(DOORS)
            return None
        self._own(claim)
        return claim, router, attach

    def _new_doors(self, endpoint: Endpoint) -> _Doors:
        prepare_directory(endpoint)
        claim = Claim(endpoint)
        self._own(claim)
        router = open_socket(endpoint.path, socket.SOCK_STREAM)
        attach = open_socket(endpoint.attach_path, socket.SOCK_SEQPACKET)
        if self._store is not None:
            self._store.keep(DOORS, claim.fd, router.fileno(), attach.fileno())
        return claim, router, attach

    def _own(self, claim: Claim) -> None:
        """Ours to give back, unless we leave everything to the next daemon."""

        def release() -> None:
            if claim.fd >= 0:
                claim.release()
                self._drop(DOORS)

        self._stack.callback(release)

    def _drop(self, name: str) -> None:
        if self._store is not None:
            self._store.drop(name)

    # -- memory -----------------------------------------------------------------------------------------------------

    def open_memory(self, cold: bool) -> tuple[dict[str, PoolMemory], Engine]:
        boot_id = os.urandom(16).hex()
        pools = {} if cold else self._stored_pools()
        if pools:
            engine = self._recover(boot_id, pools)
            cached = sum(pool["pages"]["cached"] for pool in engine.snapshot()["pools"].values())
            self._log.info("warm start", sessions=len(engine.sessions), cached_pages=cached)
            return pools, engine
        self._throw_away()
        cache_id = os.urandom(16).hex()
        return self._new_pools(cache_id), Engine(self._config, boot_id, cache_id)

    def _throw_away(self) -> None:
        """Sessions of an earlier daemon end with the memory that they used: their members are let go as well."""
        for name, fds in self._stored.items():
            self._drop(name)
            for fd in fds:
                os.close(fd)
        self._stored.clear()

    def _new_pools(self, cache_id: str) -> dict[str, PoolMemory]:
        """Errors: MemoryTooSmall, before anything is reserved if that can be seen."""
        config, sessions = self._config, self._config.limits.sessions
        tables = sum(geometry_of(pool, cache_id, sessions).table_bytes for pool in config.pools)
        arena.check_memory(tables + sum(pool.machine_bytes for pool in config.pools))
        pools = {}
        for pool in config.pools:
            pools[pool.name] = memory = PoolMemory.create(pool, cache_id, sessions)
            self._lock(memory, self._stack)
        if self._store is not None:
            self._keep(self._store, pools)
        return pools

    def _keep(self, store: Store, pools: Mapping[str, PoolMemory]) -> None:
        for place, memory in enumerate(pools.values()):
            for rank, fd in enumerate(memory.arena_fds):
                store.keep(f"arena-{place}-{rank}", fd)
            for rank, fd in enumerate(memory.host_fds):
                store.keep(f"host-{place}-{rank}", fd)
            store.keep(f"table-{place}", memory.table.fd)
        described = manifest.describe(self._config.pools, self._config.limits.sessions)
        fd = manifest.write(described | {"placed": {name: memory.placement for name, memory in pools.items()}})
        store.keep(MANIFEST, fd)
        os.close(fd)

    def _lock(self, memory: PoolMemory, stack: ExitStack) -> None:
        stack.callback(memory.close)
        self._locks.append(arena.lock(memory.table.fd, LOCK_PATIENCE_S))
        stack.callback(os.close, self._locks[-1])

    def _stored_pools(self) -> dict[str, PoolMemory]:
        """The memory in the store; none if nobody has used it yet, or its daemon found a bug in itself.

        Errors: ConfigError (it is not what the configuration says), MemoryInUse.
        """
        stored, config = self._stored, self._config
        if MANIFEST not in stored:
            return {}
        found = manifest.read(stored[MANIFEST][0])
        different = list(manifest.differences(found, manifest.describe(config.pools, config.limits.sessions)))
        if different:
            raise ConfigError(
                "the configuration does not fit the memory that an earlier daemon left: "
                f"{'; '.join(different)}; undo that, or begin with empty pools by --cold"
            )
        with ExitStack() as opened:
            pools = self._reopen(found, opened)
            if any(memory.tainted for memory in pools.values()):
                self._log.warning("cold start: an earlier daemon marked this memory as not to be trusted")
                self._locks.clear()
                return {}
            self._stack.push(opened.pop_all())
        for name in [name for name in stored if not name.startswith("member-")]:
            for fd in stored.pop(name):
                os.close(fd)
        return pools

    def _reopen(self, found: Mapping[str, Any], opened: ExitStack) -> dict[str, PoolMemory]:
        """What the manifest lists, locked; ``opened`` closes it again. Errors: ConfigError, MemoryInUse."""
        stored, configured = self._stored, {pool.name: pool for pool in self._config.pools}
        pools = {}
        try:
            # The first of them is written first, so they stay in this order, whatever the configuration's is by now.
            for place, name in enumerate(found["order"]):
                pool = configured[name]
                arenas = tuple(os.dup(stored[f"arena-{place}-{rank}"][0]) for rank in range(pool.ranks))
                hosts = tuple(os.dup(stored[f"host-{place}-{rank}"][0]) for rank in range(pool.host_ranks))
                table = os.dup(stored[f"table-{place}"][0])
                pools[name] = PoolMemory.reopen(pool, (arenas, hosts, table), _placed(found, pool))
                self._lock(pools[name], opened)
        except VersionMismatch as error:
            raise ConfigError(f"{error}; begin with empty pools by --cold") from error
        return pools

    def start_copier(self, pools: Mapping[str, PoolMemory]) -> Copiers | None:
        """It holds the locks too: the next daemon has the memory only when nothing of this one writes to it."""
        tiers = {name: memory.tiers for name, memory in pools.items() if memory.host_fds}
        if not tiers:
            return None
        from radixkv.device.copiers import Copiers

        copier = Copiers(tiers, self._locks)
        self._stack.callback(copier.close)
        return copier

    def open_events(self, pools: Mapping[str, PoolMemory]) -> Events | None:
        """Errors: ConfigError, EndpointInUse."""
        config = self._config
        if not config.events.endpoint:
            return None
        from radixkv.ipc.events import Events

        pool = config.told_pool
        with closing(pools[pool.name].read()) as table:
            image = table.image()
            events = Events(config.events, pool, (image, image.states == CACHED))
        self._stack.callback(events.close)
        return events

    def open_quiescence(self, pools: Mapping[str, PoolMemory]) -> Quiescence | None:
        uuids = sorted({uuid for memory in pools.values() for uuid in memory.placement.uuids})
        if not uuids:
            return None
        quiescence = Quiescence(partial(processes_on, uuids))
        if why := quiescence.try_out():
            self._log.warning("pages of workers that die will stay out of use", reason=why)
        return quiescence

    def _drop_half_joined(self) -> None:
        """Ranks that do not know that they had joined: the session goes on without them, and they will ask again."""
        for (_, rank), name in stored_members(self._stored).items():
            lifelines = [fd for fd in self._stored[name] if stat.S_ISFIFO(os.fstat(fd).st_mode)]
            if rank and any(map(never_welcomed, lifelines)):
                self._drop(name)
                for fd in self._stored.pop(name):
                    os.close(fd)

    def _recover(self, boot_id: str, pools: Mapping[str, PoolMemory]) -> Engine:
        """Errors: RecoveryFailed; the tables are marked then."""
        tables = {name: memory.table for name, memory in pools.items()}
        cache_id = next(iter(tables.values())).geometry.cache_id
        self._drop_half_joined()
        members = stored_members(self._stored).keys()
        attached = {session for session, _ in members}
        images, sessions = {}, []
        try:
            for name, memory in pools.items():
                with closing(memory.read()) as table:
                    images[name] = table.image()
                    sessions.append(table.sessions())
                memory.table.repair()
            engine, writes = recover(self._config, (boot_id, cache_id), Found(images, sessions, attached, members))
            apply_all(tables, writes)
        except Exception as error:
            for written in tables.values():
                written.taint()
            raise RecoveryFailed(f"{type(error).__name__}: {error}") from error
        return engine


def _placed(found: Mapping[str, Any], pool: PoolConfig) -> Placement:
    """Where a stored pool is; an earlier version knew only the machine's memory, and did not say so."""
    uuids, size = found.get("placed", {}).get(pool.name, ((), pool.arena_bytes))
    return Placement(tuple(uuids), size)
