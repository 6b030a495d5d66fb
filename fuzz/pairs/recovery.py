"""The engine on a real descriptor table, which dies at any store and goes on from what the table says.

Two questions. At *cuts*, between any two writes and in the middle of them: does a scan serve exactly the pages that
were committed, with their tokens, and lose nothing? At *restarts*, between two commands: does everything go on, beside
a model for which nothing has happened but what a restart is said to cost?
"""

from __future__ import annotations

import os
import random
from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np

from fuzz.model.mismatch import expect, require
from fuzz.model.packing import pack_pages, pack_tokens, unpack_pages, unpack_tokens
from fuzz.model.pool import CACHED, FREE, PRIVATE, SHADOW, PoolModel, Sequence
from fuzz.model.state import SessionModel
from fuzz.pairs.engine import EnginePair
from fuzz.pairs.torn import tear
from radixkv import commands
from radixkv.config import Config
from radixkv.device.descriptors import TableReader
from radixkv.device.pool_memory import geometry_of
from radixkv.device.writer import TableWriter
from radixkv.engine.invariants import check
from radixkv.engine.pool import Pool
from radixkv.engine.recover import Found, recover
from radixkv.tree.node import Node, Root

Path = tuple[int, int, tuple[int, ...]]
"""Namespace id, epoch, all tokens up to the end of a page."""
Places = dict[int, Path]
"""What the table has in its places: pages of the device, then those of the host tier."""
Cached = dict[str, Places]
"""By pool."""


class Tables:
    """The descriptor tables of all pools, and a second set to put damaged copies in."""

    def __init__(self, config: Config) -> None:
        geometries = {pool.name: geometry_of(pool, "c" * 32, config.limits.sessions) for pool in config.pools}
        self.writers = {name: TableWriter(geometry) for name, geometry in geometries.items()}
        self._scratch = {name: TableWriter(geometry) for name, geometry in geometries.items()}
        self._readers = {name: TableReader(os.dup(table.fd)) for name, table in self._scratch.items()}

    def apply(self, write: commands.Write) -> None:
        named = self.writers.values() if isinstance(write, commands.SessionRecord) else [self.writers[write.pool]]
        for table in named:
            table.apply(write)

    def raw(self) -> dict[str, bytes]:
        return {name: os.pread(t.fd, t.geometry.table_bytes, 0) for name, t in self.writers.items()}

    def found(self, raw: dict[str, bytes], attached: set[int]) -> Found:
        for name, content in raw.items():
            os.pwrite(self._scratch[name].fd, content, 0)
        images = {name: reader.image() for name, reader in self._readers.items()}
        return Found(images, [reader.sessions() for reader in self._readers.values()], attached)

    def close(self) -> None:
        tables: list[TableWriter | TableReader] = [*self.writers.values(), *self._scratch.values()]
        for table in [*tables, *self._readers.values()]:
            table.close()

    def __del__(self) -> None:
        self.close()


@dataclass
class Odds:
    """How often a command is looked at store by store, and how many damaged states are tried of each write."""

    command: float = 0.25
    tears: int = 2


class RecoveryPair(EnginePair):
    def __init__(self, config: Config, rng: random.Random, odds: Odds | None = None) -> None:
        super().__init__(config)
        self.tables = Tables(config)
        self._rng = rng
        self._odds = odds or Odds()
        self._mapped: set[int] = set()
        """Ended sessions whose processes may still write."""
        self._scopes: dict[str, Scopes] = {name: {} for name in self.table.pages}

    def do(self, command: commands.Command) -> commands.Outcome:
        before = self._cached() if self._rng.random() < self._odds.command else None
        if before is not None:
            for name, records in self.table.pages.items():
                self._scopes[name] = {page: (record.namespace, record.epoch) for page, record in enumerate(records)}
        outcome = super().do(command)
        self._attend(command, outcome)
        if before is None:
            for write in outcome.writes:
                self.tables.apply(write)
        else:
            self._cut_everywhere(outcome.writes, before)
        return outcome

    def _attend(self, command: commands.Command, outcome: commands.Outcome) -> None:
        if isinstance(command, commands.EndSession) and command.mapped:
            self._mapped.add(command.session)
        if isinstance(command, commands.MappingGone):
            self._mapped.discard(command.session)
        self._mapped.update(outcome.ended)

    def _attached(self) -> set[int]:
        return self._mapped | set(self.model.state.sessions)

    # -- cuts -----------------------------------------------------------------------------------------------------

    def _cut_everywhere(self, writes: list[commands.Write], cached: Cached) -> None:
        raw = self.tables.raw()
        for write in writes:
            after = {name: dict(pages) for name, pages in cached.items()}
            if not isinstance(write, commands.SessionRecord):
                follow(write, after[write.pool], self._scopes[write.pool])
            self.tables.apply(write)
            whole = self.tables.raw()
            self._scan(whole, after, after)
            for _ in range(self._odds.tears):
                torn = {name: self._torn(name, raw[name], whole[name]) for name in raw}
                self._scan(torn, cached, after)
            raw, cached = whole, after
        expect("I5", "pages the writes say are cached", cached, self._cached())
        self.events["cut"] += len(writes)

    def _torn(self, name: str, before: bytes, after: bytes) -> bytes:
        return tear(self._rng, self.tables.writers[name].geometry, before, after)

    def _scan(self, raw: dict[str, bytes], before: Cached, after: Cached) -> None:
        """What a daemon finds in this state: every page cached before and after, none that is neither."""
        engine, _ = recover(self.config, ("boot", "cache"), self.tables.found(raw, self._attached()))
        check(engine)
        for name, pool in engine.pools.items():
            compare_served(pool, before[name], after[name])

    def _cached(self) -> Cached:
        return {pool.name: dict(self._paths(pool)) for pool in self.model.state.pools.values()}

    def _paths(self, pool: PoolModel) -> Iterator[tuple[int, Path]]:
        for page, (_, _, tokens) in pool.key_of.items():
            record = self.table.pages[pool.name][page]
            yield page, (record.namespace, record.epoch, tokens)

    # -- restarts -------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """The daemon dies between two commands; the next one goes on, and all sessions come back."""
        self._compare_order()
        raw = self.tables.raw()
        self.real, writes = recover(self.config, ("boot", "cache"), self.tables.found(raw, self._attached()))
        self._written(writes)
        for table in self.tables.writers.values():
            table.repair()
        check(self.real)
        known = self.model.state.sessions
        self.model.state.sessions = {session.id: known[session.id] for session in self.real.sessions.all()}
        for session in list(self.model.state.sessions.values()):  # in the order of their slots: none was silent longer
            self._come_back(session)
        require("I10", not self.real.window_open, "all are back, and the window is open")
        self._cost()
        self.events["restart"] += 1

    def _written(self, writes: list[commands.Write]) -> None:
        for write in writes:
            self.table.write(write)
            self.tables.apply(write)

    def _step_alone(self, command: commands.Command) -> commands.Outcome:
        """A command that the model knows nothing of."""
        outcome = self.real.step(command, self.now)
        self._written(outcome.writes)
        check(self.real)
        return outcome

    def _come_back(self, session: SessionModel) -> None:
        outdated = self.request(session.id, commands.Heartbeat())
        token = session.id.to_bytes(16, "little")
        require("I15", self._refused(commands.RejoinSession(session.id, b"x" * 16)), "a wrong token was taken")
        require("I15", self._refused(outdated), "a request was executed for a session that is not back")
        expect("I16", "rejoin", self._step_alone(commands.RejoinSession(session.id, token)).reply, commands.Done())
        session.epoch += 1
        session.taken, session.answers, session.seen_s = set(), [], 0.0
        require("I15", self._refused(outdated), "a request of the last daemon's time was executed")
        sequences = sorted(session.sequences.items())
        middle = self._rng.randint(0, len(sequences))
        for some, last in ((sequences[:middle], False), (sequences[middle:], True)):
            body = commands.Resume([self._claim(identity, sequence) for identity, sequence in some], last)
            reply = self._step_alone(self.request(session.id, body)).reply
            assert isinstance(reply, commands.Resumed), reply
            for (_, sequence), result in zip(some, reply.results, strict=True):
                pool = self.model.state.pools[sequence.pool]
                size = pool.page_size
                if not sequence.pages:  # nothing that could be of an earlier epoch
                    sequence.epoch = pool.epoch_of(sequence.namespace)
                if sequence.epoch != pool.epoch_of(sequence.namespace):  # nothing is added: shadows need no path
                    own = [pool.state[page] == CACHED for page in sequence.pages[: sequence.published]]
                    sequence.depth = max((at for at, cached in enumerate(own, 1) if cached), default=0)
                immutable = sequence.published * size
                if sequence.committed + 1 != immutable:  # else perhaps found whole and kept
                    sequence.committed = max(sequence.committed, immutable)
                expect("I4", "resumed", result, commands.Kept(sequence.committed, sequence.published * size))
                sequence.born_shared = min(sequence.published, sequence.cached // size)

    def _refused(self, command: commands.Command) -> bool:
        reply = self._step_alone(command).reply
        return isinstance(reply, commands.Failure) and reply.code == "session_lost"

    def _claim(self, identity: int, sequence: Sequence) -> commands.Claim:
        records = self.table.pages[sequence.pool]
        return commands.Claim(
            pool=sequence.pool,
            seq=identity,
            namespace=sequence.namespace,
            tokens=pack_tokens(sequence.tokens),
            page_table=pack_pages(sequence.pages),
            generations=np.array([records[page].generation for page in sequence.pages], "<u8").tobytes(),
            committed=sequence.committed,
            cached=sequence.cached,
            copy_rows=list(sequence.copy_rows),
        )

    def _compare_order(self) -> None:
        """Pages that were idle keep their order of release, which for LRU is that of eviction."""
        engine, _ = recover(self.config, ("boot", "cache"), self.tables.found(self.tables.raw(), self._attached()))
        for pool in self.model.state.pools.values():
            held = self.model.state.held(pool)
            idle = [page for page in pool.key_of if page not in held]
            wanted = sorted(idle, key=lambda page: (pool.order.stamp[page], -len(pool.key_of[page][2])))
            nodes = sorted(engine.pools[pool.name].order, key=lambda node: node.stamp)
            order = [page for node in nodes for page in reversed(unpack_pages(bytes(node.pages)))]
            expect("I7", f"order of eviction of {pool.name}", [p for p in order if p not in held], wanted)

    def _cost(self) -> None:
        """What a restart takes away: who waits, sequences in transit, remembered replies, counters, priorities."""
        state = self.model.state
        for queue in state.queue.values():
            queue.clear()
        state.running_s = self.running_s = 0.0
        state.draining = False
        before = {pool.name: state.held(pool) for pool in state.pools.values()}
        state.transit.clear()
        for sequence in state.sequences():
            sequence.retain = []
        for name in state.counters:
            state.counters[name] = self.real.snapshot()["counters"][name]
        for pool in state.pools.values():
            latest = self.table._latest_stamps(pool)
            held = state.held(pool)
            for page in before[pool.name] - held:
                if pool.state[page] in (PRIVATE, SHADOW):
                    pool.state[page] = FREE
            pool.recovered(latest)


Scopes = dict[int, tuple[int, int]]
"""Place -> (namespace, epoch) for which it was handed out, as far as the writes have been followed."""


def follow(write: commands.Write, places: Places, scopes: Scopes) -> None:
    """What is cached by the writes alone, without looking at what the engine made of them."""
    match write:
        case commands.Publish() if not write.shadow:
            each = len(write.tokens) // len(unpack_pages(write.pages))
            parent = write.parent_page
            for index, page in enumerate(unpack_pages(write.pages)):
                above = places[parent][2] if parent >= 0 else ()
                tokens = unpack_tokens(write.tokens[index * each : (index + 1) * each])
                scope = places[parent][:2] if parent >= 0 else scopes[page]
                places[page] = (*scope, (*above, *tokens))
                parent = page
        case commands.Copied():
            for source, target in zip(unpack_pages(write.sources), unpack_pages(write.targets), strict=True):
                places[target] = places[source]
        case commands.Retire() | commands.Assign():  # an evicted page may be somebody's at once
            for page in unpack_pages(write.pages):
                places.pop(page, None)
                if isinstance(write, commands.Assign):
                    scopes[page] = (write.namespace, write.epoch)


def compare_served(pool: Pool, before: Places, after: Places) -> dict[int, Node]:
    """What is served was there before or is there after the write that was cut, in just that place; and what was there
    all the time is served, if all before it is: on the device from the device, else from either tier. Of the host tier
    as much as may be there: with what was being loaded when the daemon died it may be more.

    Returns what is served, by place.
    """
    size = pool.pages.size
    served = dict(served_by(pool))
    sure = {place: path for place, path in before.items() if after.get(place) == path}
    on_device = {place: path for place, path in sure.items() if place < size}
    for place, (path, _) in served.items():
        allowed = (before.get(place), after.get(place))
        require("I5", path in allowed, f"place {place} is served as {path}, it held {allowed}")
    lost = [_lost(places, served, pool.page_size) for places in (on_device, sure)]
    require("I5", not lost[0], f"places {lost[0]}, committed, are not served")
    trimmed = pool.host.evicted_pages if pool.host else 0
    require("I5", len(lost[1]) <= trimmed, f"places {lost[1]}, committed, are not served; {trimmed} were too much")
    return {place: node for place, (_, node) in served.items()}


def served_by(pool: Pool) -> Iterator[tuple[int, tuple[Path, Node]]]:
    """All pages that lie in a tree, by their places, with the tokens on the way to them."""
    roots = [space.root for space in pool.namespaces.all()]
    roots += [node for node, _ in pool.retired if isinstance(node, Root)]
    for root in roots:
        scope = root.namespace, root.epoch
        stack: list[tuple[Node, tuple[int, ...]]] = [(root, ())]
        while stack:
            node, above = stack.pop()
            tokens, host = unpack_tokens(bytes(node.tokens)), unpack_pages(bytes(node.host))
            for pages in (unpack_pages(bytes(node.pages)), [pool.pages.size + page for page in host]):
                for index, place in enumerate(pages, 1):
                    yield place, ((*scope, (*above, *tokens[: index * pool.page_size])), node)
            stack += [(child, (*above, *tokens)) for child in (node.children or {}).values()]


def _lost(places: Places, served: Container[int], page_size: int) -> list[int]:
    """Which are not served although all before them are there too."""
    known = set(places.values())
    return [place for place, path in places.items() if place not in served and _whole(known, path, page_size)]


def _whole(known: set[Path], path: Path, page_size: int) -> bool:
    """Are all pages before this one there too?"""
    return all((*path[:2], path[2][:end]) in known for end in range(page_size, len(path[2]), page_size))
