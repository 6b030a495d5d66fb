"""Two tiers on a real descriptor table: the daemon dies at any store, its copier with it, and the next one goes on.

As ``recovery.py``, and besides: what is served from either tier holds the right bytes, whatever was being copied; pages
that no sequence held have the place in the order of eviction that they had.
"""

from __future__ import annotations

import random

import numpy as np

from fuzz.model.mismatch import expect, require
from fuzz.model.packing import pack_pages
from fuzz.pairs.recovery import Odds, Places, Scopes, Tables, compare_served, follow, served_by
from fuzz.pairs.tiered import Tiered, scope_of
from fuzz.pairs.torn import tear
from radixkv import commands
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.engine.invariants import check
from radixkv.engine.pool import Pool
from radixkv.engine.recover import recover
from radixkv.engine.sequence import Sequence
from radixkv.tree.node import Node, Root


class TieredRecovery(Tiered):
    def __init__(self, config: Config, rng: random.Random, odds: Odds | None = None) -> None:
        """With one pool."""
        super().__init__(config)
        self.tables = Tables(config)
        self._rng = rng
        self._odds = odds or Odds()
        self._cutting = False
        self._mapped: set[int] = set()
        """Ended sessions whose processes may still write."""
        self._cached: Places = {}
        self._scopes: Scopes = {}

    # -- cuts -----------------------------------------------------------------------------------------------------

    def do(self, command: commands.Command) -> commands.Outcome:
        self._cutting = self._rng.random() < self._odds.command
        outcome = super().do(command)
        if isinstance(command, commands.EndSession) and command.mapped:
            self._mapped.add(command.session)
        if isinstance(command, commands.MappingGone):
            self._mapped.discard(command.session)
        self._mapped.update(outcome.ended)
        if self._cutting:  # now copies have begun
            served = self._scan(self._raw(), self._cached, self._cached)
            self._same_stamps(served)
        return outcome

    def written(self, write: commands.Write) -> None:
        super().written(write)
        before, raw = self._cached.copy(), self._raw() if self._cutting else b""
        if not isinstance(write, commands.SessionRecord):
            follow(write, self._cached, self._scopes)
        self.tables.apply(write)
        if not self._cutting:
            return
        self.events["cut"] += 1
        whole = self._raw()
        self._scan(whole, self._cached, self._cached)
        geometry = self.tables.writers[self.pool.name].geometry
        for _ in range(self._odds.tears):
            self._scan(tear(self._rng, geometry, raw, whole), before, self._cached)

    def _raw(self) -> bytes:
        return self.tables.raw()[self.pool.name]

    def _recovered(self, raw: bytes) -> tuple[Engine, list[commands.Write]]:
        attached = self._mapped | {session.id for session in self.real.sessions.all()}
        return recover(self.config, ("boot", "cache"), self.tables.found({self.pool.name: raw}, attached))

    def _scan(self, raw: bytes, before: Places, after: Places) -> dict[int, Node]:
        engine, _ = self._recovered(raw)
        check(engine)
        pool = engine.pools[self.pool.name]
        self._right_bytes(pool)
        return compare_served(pool, before, after)

    def _right_bytes(self, pool: Pool) -> None:
        """Of all that is served, in the arenas as they are now: what is being filled holds garbage."""
        size, pages = pool.page_size, pool.pages.size
        for place, ((namespace, epoch, tokens), _) in served_by(pool):
            rows = self.paths.of(scope_of(Root(namespace, epoch)), list(tokens))[-size:]
            arena, page = (self.device, place) if place < pages else (self.host, place - pages)
            require("I5", arena.rows[page].tolist() == rows, f"place {place} would be served and holds something else")

    def _same_stamps(self, served: dict[int, Node]) -> None:
        """Copies come to nothing with the daemon: what they alone held is where it was."""
        tree = self.pool.tree
        held: set[Node] = set()
        for seq in self.real.live_sequences():
            for end in (seq.node, seq.source_node):
                held.update(() if end is None else tree.path(end))
        for place, (_, node) in served_by(self.pool):
            if node not in held and place in served:
                expect("I7", f"stamp of what is in place {place}", served[place].stamp, node.stamp)

    # -- restarts -------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """The daemon dies between two commands; the next one goes on, and all sessions come back.

        What was still loading was complete nowhere: who had that in its table has lost it.
        """
        loading = {(seq.session, seq.id) for seq in self.real.live_sequences() if seq.loading}
        claims = {
            session.id: [self._claim(seq) for seq in session.sequences.values()] for session in self.real.sessions.all()
        }
        self._cutting = False
        self.running.clear()
        self._failed.clear()
        self.real, writes = self._recovered(self._raw())
        self.pool = self.real.pools[self.pool.name]
        self._stored(writes)
        for table in self.tables.writers.values():
            table.repair()
        check(self.real)
        for session, own in claims.items():
            token = session.to_bytes(16, "little")
            expect("I16", "rejoin", self._step(commands.RejoinSession(session, token)), commands.Done())
            self.epochs[session] = self.epochs.get(session, 1) + 1
            reply = self._step(self.request(session, commands.Resume(own)))
            require("I4", isinstance(reply, commands.Resumed), f"resume: {reply}")
            for claim, result in zip(own, reply.results, strict=True):  # type: ignore[union-attr]
                expected = commands.Failure if (session, claim.seq) in loading else commands.Kept
                require("I4", isinstance(result, expected), f"a claim of {session}, {claim}: {result}")
                self.events["lost while loading"] += expected is commands.Failure
        require("I10", not self.real.window_open, "all are back, and the window is open")
        self.check()
        self.events["restart"] += 1
        self.events["host only"] += self.pool.host is not None and self.pool.host.only_pages > 0

    def _stored(self, writes: list[commands.Write]) -> None:
        for write in writes:
            self.written(write)

    def _step(self, command: commands.Command) -> commands.Reply | None:
        outcome = self.real.step(command, self.now)
        self._stored(outcome.writes)
        check(self.real)
        return outcome.reply

    def _claim(self, seq: Sequence) -> commands.Claim:
        """Rows that were to be copied have been."""
        records = self.table.pages[self.pool.name]
        namespace = self.pool.namespaces.of(seq.root).canonical
        generations = np.array([records[page].generation for page in seq.pages], "<u8").tobytes()
        tokens, pages = bytes(seq.tokens), pack_pages(list(seq.pages))
        return commands.Claim(self.pool.name, seq.id, namespace, tokens, pages, generations, seq.committed, seq.cached)
