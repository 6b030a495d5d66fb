"""What outlives a daemon: arenas, descriptor tables, and who was attached. In the real thing the keeper holds them.

Also what no part of radixkv can know, and only a simulator does: which content each sequence means (``Scopes``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fuzz.simulator.contents import Arena, Scope
from radixkv import commands
from radixkv.config import Config
from radixkv.device.arena import reopen_readonly
from radixkv.device.descriptors import TableReader
from radixkv.device.pool_memory import geometry_of
from radixkv.device.writer import TableWriter


class Store:
    """One lineage: what has one ``cache_id``. A cold start makes a new one."""

    def __init__(self, config: Config, generation: int = 1) -> None:
        self.generation = generation
        self.cache_id = f"cache-{generation}"
        self.tables = {
            pool.name: TableWriter(geometry_of(pool, self.cache_id, config.limits.sessions)) for pool in config.pools
        }
        self.readers = {name: TableReader(reopen_readonly(table.fd)) for name, table in self.tables.items()}
        self.arenas = {pool.name: Arena(pool.pages, pool.spec.page_size) for pool in config.pools}
        self.host_arenas = {
            pool.name: Arena(pool.host_pages + pool.host_staging_pages, pool.spec.page_size) for pool in config.pools
        }
        self.entries: dict[int, int] = {}
        """Session -> process: the pidfd and the lifeline that were stored at its hello."""
        self.scopes = Scopes()

    def close(self) -> None:
        """The daemon's end of it; workers keep what they have mapped, so readers stay."""
        for table in self.tables.values():
            table.close()


@dataclass
class Scopes:
    """Which namespace, in which version, each sequence belongs to, as the daemon decided when it made it.

    A sequence that a dead daemon made and nobody heard of may be asked for again, under the same id: the later epoch
    counts.
    """

    versions: dict[tuple[str, bytes], int] = field(default_factory=dict)
    _epochs: dict[tuple[str, bytes], int] = field(default_factory=dict)
    _of: dict[tuple[int, int], tuple[int, Scope]] = field(default_factory=dict)
    _tickets: dict[bytes, Scope] = field(default_factory=dict)

    def of(self, session: int, seq: int) -> Scope:
        return self._of[session, seq][1]

    def current(self, pool: str, namespace: bytes) -> Scope:
        return pool, namespace, self.versions.get((pool, namespace), 0)

    def learn(self, request: commands.Request, reply: commands.Reply) -> None:
        """A request was carried out to its end, and this is what is answered (perhaps once more)."""
        session, body = request.session, request.body
        match body, reply:
            case commands.Reserve(), commands.Reserved():
                self._made(request, body.seq, self.current(body.pool, body.namespace))
            case commands.Handoff(), commands.Done():
                self._tickets.setdefault(body.ticket, self.of(session, body.seq))
            case commands.Adopt(), commands.Adopted():
                self._made(request, body.seq, self._tickets[body.ticket])
            case commands.Step(), commands.Stepped():
                for item, result in zip(body.share, reply.share, strict=True):
                    if isinstance(result, commands.Shared):
                        for child in range(item.first_child, item.first_child + item.count):
                            self._made(request, child, self.of(session, item.seq))
            case commands.Resume(), commands.Resumed():
                self._resumed(request, body, reply)
            case commands.Invalidate(), commands.Invalidated():
                name = (body.pool, body.namespace)
                if reply.epoch > self._epochs.get(name, 0):
                    self._epochs[name] = reply.epoch
                    self.versions[name] = self.versions.get(name, 0) + 1

    def _made(self, request: commands.Request, seq: int, scope: Scope) -> None:
        epoch, _ = self._of.get((request.session, seq), (0, scope))
        if request.epoch > epoch:
            self._of[request.session, seq] = (request.epoch, scope)

    def _resumed(self, request: commands.Request, body: commands.Resume, reply: commands.Resumed) -> None:
        """A sequence without pages has nothing of an earlier version: it goes on in the present one."""
        for claim, result in zip(body.claims, reply.results, strict=True):
            if isinstance(result, commands.Kept) and not claim.page_table:
                self._made(request, claim.seq, self.current(claim.pool, claim.namespace))
