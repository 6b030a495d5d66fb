"""An engine with a host tier, beside what is really in the pages of both tiers: never a wrong byte.

Workers write what they compute when they commit it; what they copy between pages they copy at once. A copy between the
tiers reads nothing and writes nothing until it is known to have ended: until then its targets hold garbage, and whoever
gives them to somebody is found out. Nobody may write to what it reads or fills, nor hand it to anybody, unless the
answer says that it is still loading. Nobody is told that more layers of it are there than are (``progress``).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuzz.model.mismatch import expect, require
from fuzz.model.packing import unpack_pages, unpack_tokens
from fuzz.model.pool import CACHED, FREE, PRIVATE, QUARANTINED, SHADOW
from fuzz.model.table import TableMirror
from fuzz.simulator.contents import Arena, Paths, Scope
from radixkv import commands
from radixkv.allocator.page_states import State
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.engine.invariants import check
from radixkv.engine.pool import IN_TREE
from radixkv.engine.sequence import Sequence
from radixkv.tree.node import Node, Root

FAR = 1e9
"""A deadline that never comes."""
IN_TABLE = {
    State.FREE: FREE,
    State.PRIVATE: PRIVATE,
    State.CACHED: CACHED,
    State.SHADOW: SHADOW,
    State.LOADING: PRIVATE,
    State.SAVING: CACHED,
    State.QUARANTINED: QUARANTINED,
}
"""What a page is to the next daemon: copies end with the daemon that has begun them."""


@dataclass
class Running:
    """A copy that runs: what its sources hold; how many layers of it all are there."""

    copy: commands.Copy
    sources: list[int]
    targets: list[int]
    rows: NDArray[np.int64]
    layers: int = 0

    def device_pages(self) -> set[int]:
        return set(self.sources if self.copy.to_host else self.targets)


class Tiered:
    """``do`` carries one command out and looks at everything. Time stands still unless told otherwise."""

    def __init__(self, config: Config) -> None:
        """With one pool."""
        self.config = config
        (pool,) = config.pools
        self.real = Engine(config, "boot", "cache")
        self.pool = self.real.pools[pool.name]
        self.now = 100.0
        self.running_s = 0.0
        self.events: Counter[str] = Counter()
        self.running: dict[int, Running] = {}
        """Copies by number, in the order of their beginning."""
        self._failed: dict[tuple[int, ...], int] = {}
        """Layers that were there of loads that have failed, by their targets: they stay if it is begun again."""
        self.granted: dict[tuple[int, int], commands.Reply] = {}
        """Late answers, by session and request."""
        self.table = TableMirror({pool.name: pool.pages + pool.host_pages + pool.host_staging_pages})
        self.paths = Paths()
        self.device = Arena(pool.pages, pool.spec.page_size)
        self.host = Arena(pool.host_pages + pool.host_staging_pages, pool.spec.page_size)
        self._garbage = 0
        self._next_request: dict[int, int] = {}
        self._next_session = 0
        self._asked: dict[tuple[int, int], commands.Body] = {}
        self.epochs: dict[int, int] = {}
        """Of sessions that have come back."""

    # -- commands -----------------------------------------------------------------------------------------------

    def do(self, command: commands.Command) -> commands.Outcome:
        """One command at the present time. Raises Mismatch or BrokenInvariant."""
        self._compute(command)
        if isinstance(command, commands.CopyDone):
            self._end(command)
        untouchable = {page for one in self.running.values() for page in one.device_pages()}
        outcome = self.real.step(command, self.now)
        for write in outcome.writes:
            self.written(write)
            if isinstance(write, commands.Assign | commands.Publish | commands.Retire | commands.Own):
                touched = untouchable.intersection(unpack_pages(write.pages))
                require("I11", not touched, f"{type(write).__name__} of pages {touched} of a copy that runs")
        for effect in outcome.effects:
            self._begin(effect)
        for reply in [outcome.reply, *(late.reply for late in outcome.granted)]:
            self.device.copy_rows(_rows_to_copy(reply), "a worker")
            if isinstance(reply, commands.Reserved):
                self._named(reply)
        if isinstance(command, commands.Request):
            self._asked[command.session, command.id] = command.body
            self._told(command.session, command.body, outcome.reply)
        for late in outcome.granted:
            self._told(late.session, self._asked[late.session, late.request], late.reply)
            self.granted[late.session, late.request] = late.reply
            self.events["granted"] += isinstance(late.reply, commands.Reserved)
        check(self.real)
        self.check()
        return outcome

    def written(self, write: commands.Write) -> None:
        """The daemon stores it."""
        self.table.write(write)

    def finish(self, copy: int | None = None, ok: bool = True) -> commands.Outcome:
        """A copy (the oldest, if none is named) has ended."""
        return self.do(commands.CopyDone(next(iter(self.running)) if copy is None else copy, ok))

    def progress(self, copy: int, layers: int) -> commands.Outcome:
        """So many layers of a copy are there, and the daemon is told."""
        if copy in self.running:
            self.running[copy].layers = max(self.running[copy].layers, layers)
        return self.do(commands.CopyProgress(copy, layers))

    def finish_all(self) -> None:
        """And all that follow from them."""
        while self.running:
            self.finish()

    def open(self) -> int:
        self._next_session += 1
        self.do(commands.OpenSession(self._next_session, self._next_session.to_bytes(16, "little"), "worker"))
        return self._next_session

    def ask(self, session: int, body: commands.Body, deadline: float = FAR) -> commands.Reply | None:
        """A new request of a session, under its next id."""
        return self.do(self.request(session, body, deadline)).reply

    def request(self, session: int, body: commands.Body, deadline: float = FAR) -> commands.Request:
        self._next_request[session] = self._next_request.get(session, 0) + 1
        return commands.Request(session, self.epochs.get(session, 1), self._next_request[session], deadline, body)

    def late(self, session: int) -> Any:
        """The latest answer that came later, of those to a session's requests; None: there is none."""
        return next((reply for (who, _), reply in reversed(self.granted.items()) if who == session), None)

    def tick(self, seconds: float) -> commands.Outcome:
        self.now += seconds
        self.running_s += seconds
        return self.do(commands.Tick(self.running_s))

    # -- what is written ----------------------------------------------------------------------------------------

    def scribble(self, page: int, first_row: int = 0) -> None:
        """Somebody writes anything where he may."""
        self._garbage -= 1
        self.device.rows[page, first_row:] = self._garbage

    def sequences(self, session: int) -> dict[int, Sequence]:
        """Of a session, as the engine knows them."""
        return next((one.sequences for one in self.real.sessions.all() if one.id == session), {})

    def _compute(self, command: commands.Command) -> None:
        """What a step commits has been written before, but for what is there already."""
        if not isinstance(command, commands.Request) or not isinstance(command.body, commands.Step):
            return
        own = self.sequences(command.session)
        items = [(item.seq, item.n) for item in command.body.commit]
        items += [(item.seq, item.commit) for item in command.body.free]
        for identity, n in items:
            if (seq := own.get(identity)) is not None:
                self._write(seq, min(n, seq.length))

    def _write(self, seq: Sequence, n: int) -> None:
        size, paths = self.pool.page_size, self._paths(seq)
        for at in range(max(seq.committed, seq.published * size), n):
            self.device.rows[seq.pages[at // size], at % size] = paths[at]

    def _paths(self, seq: Sequence) -> list[int]:
        return self.paths.of(scope_of(seq.root), unpack_tokens(bytes(seq.tokens)))

    # -- copies between the tiers ---------------------------------------------------------------------------------

    def _arenas(self, copy: commands.Copy) -> tuple[Arena, Arena]:
        return (self.device, self.host) if copy.to_host else (self.host, self.device)

    def _begin(self, copy: commands.Copy) -> None:
        """Whatever its targets held is gone."""
        sources, targets = unpack_pages(copy.sources), unpack_pages(copy.targets)
        require("I11", len(sources) == len(targets) > 0, f"{copy} copies {len(sources)} to {len(targets)} pages")
        for one in self.running.values():
            require("I11", copy.copy != one.copy.copy, f"two copies are number {copy.copy}")
            _apart(copy.to_host == one.copy.to_host, (sources, targets), one)
        require("I11", len(set(targets)) == len(targets), f"{copy} fills a page twice")
        source, target = self._arenas(copy)
        layers = self._failed.pop(tuple(targets), 0)
        self.running[copy.copy] = Running(copy, sources, targets, source.rows[sources].copy(), layers)
        self._garbage -= 1
        target.rows[targets] = self._garbage
        self.events["save" if copy.to_host else "load"] += 1

    def _end(self, done: commands.CopyDone) -> None:
        one = self.running.pop(done.copy, None)
        if one is None:
            self.events["unknown"] += 1
            return
        source, target = self._arenas(one.copy)
        same = bool((source.rows[one.sources] == one.rows).all())
        require("I11", same, f"somebody wrote to pages {one.sources} while they were copied")
        if done.ok:
            target.rows[one.targets] = one.rows
        else:
            self._failed[tuple(one.targets)] = one.layers
        self.events["copied" if done.ok else "failed"] += 1

    # -- what is still loading ------------------------------------------------------------------------------------

    def _named(self, reply: commands.Reserved) -> None:
        """The answer names just those pages of its table that a copy fills."""
        filled = {page for one in self.running.values() if not one.copy.to_host for page in one.targets}
        pages = unpack_pages(reply.page_table)
        first, count = reply.loading
        loading = [at for at, page in enumerate(pages) if page in filled]
        expect("I11", f"entries of {pages} that are loading", list(range(first, first + count)), loading)
        require("I11", count <= 0 or reply.cached_tokens <= (first + count) * self.pool.page_size, "a hit beyond all")
        self.events["early"] += count > 0

    def _told(self, session: int, body: commands.Body, reply: object) -> None:
        """So many layers of all pages of a sequence are there: is that so?"""
        if not isinstance(body, commands.WaitLoaded) or not isinstance(reply, commands.Loaded):
            return
        self.events["told"] += 1
        first, count = reply.loading
        pages = self.sequences(session)[body.seq].pages[first : first + count]
        for one in self.running.values():
            if not one.copy.to_host and set(pages) & set(one.targets):
                require("I4", reply.layers <= one.layers, f"{reply.layers} layers are there, the copy has {one.layers}")
                self.events["layers"] += 1
        asked_all = body.layer is None or reply.layers <= body.layer
        require("I11", not (count and asked_all), f"{body} is answered with {reply}")

    # -- what must be there ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """All that could be served, and all that somebody holds, is what its tokens say."""
        known = set(self.pool.host.copies if self.pool.host else ())
        for tier in self.real.tiers.values():
            known -= {copying.id for copying in tier.again}
        expect("I11", "running copies", sorted(known), sorted(self.running))
        for seq in self.real.live_sequences():
            loading = seq.loading
            size, paths = self.pool.page_size, self._paths(seq)[: seq.committed]
            parts = [(0, loading.start), (loading.stop, len(seq.pages))] if loading else [(0, len(seq.pages))]
            for begin, end in parts:
                wrong = self.device.wrong(np.array(seq.pages[begin:end]), paths[begin * size : end * size])
                require("I4", not wrong, f"sequence {seq.id}, pages {begin} to {end}: {wrong}")
        stamps: Counter[Node] = Counter()
        for node, path in self.nodes():
            for above in path[1:]:
                stamps[above] = max(stamps[above], self._stamp(node))
            rows = self.paths.of(scope_of(path[0]), unpack_tokens(b"".join(bytes(part.tokens) for part in path[1:])))
            self._holds(self.device, bytes(node.pages), rows, "device")
            self._holds(self.host, bytes(node.host), rows, "host")
        for node, stamp in stamps.items():
            if not node.holders:
                expect("I27", f"stamp of pages {self._places(node)} in the table", stamp, node.stamp)
        states = [record.state for record in self.table.pages[self.pool.name]]
        wanted = [IN_TABLE[State(state)] for state in self.pool.pages.states]
        if self.pool.host is not None:
            wanted += [CACHED if state in IN_TREE else FREE for state in self.pool.host.pages.states]
        expect("I1", "states in the table", states, wanted)

    def _stamp(self, node: Node) -> int:
        """The latest that the table has of its pages."""
        records = self.table.pages[self.pool.name]
        return max(records[place].stamp for place in self._places(node))

    def _places(self, node: Node) -> list[int]:
        """Of its pages in both tiers, in the table."""
        behind = self.config.pools[0].pages
        return unpack_pages(bytes(node.pages)) + [behind + page for page in unpack_pages(bytes(node.host))]

    def nodes(self) -> Iterator[tuple[Node, list[Node]]]:
        """All runs below present roots, each with its path from the root."""
        stack: list[list[Node]] = [[space.root] for space in self.pool.namespaces.all()]
        while stack:
            path = stack.pop()
            if len(path) > 1:
                yield path[-1], path
            stack += [[*path, child] for child in (path[-1].children or {}).values()]

    @staticmethod
    def _holds(arena: Arena, packed: bytes, rows: list[int], tier: str) -> None:
        if packed:
            pages = array("i", packed)
            found = arena.rows[pages].ravel().tolist()
            require("I5", found == rows[-len(found) :], f"cached {tier} pages {pages.tolist()} hold something else")

    def quarantined(self) -> list[int]:
        """Pages that processes of ended sessions may still write to."""
        return [page for page, state in enumerate(self.pool.pages.states) if state == State.QUARANTINED]


def _apart(same_way: bool, pages: tuple[list[int], list[int]], one: Running) -> None:
    """Two copies never touch one page, but that a host page that is full may be read by both."""
    here, there = set(pages[1]), set(one.targets)
    if same_way:
        require("I11", not here & there, f"pages {here & there} are filled by two copies")
    else:
        crossed = (set(pages[0]) & there) | (here & set(one.sources))
        require("I11", not crossed, f"pages {crossed} are read by one copy and filled by another")


def _rows_to_copy(reply: object) -> Iterator[commands.CopyRow]:
    if isinstance(reply, commands.Stepped):
        for item in [*reply.truncate, *reply.share]:
            if not isinstance(item, commands.Failure):
                yield from item.copy_rows
    elif isinstance(reply, commands.Reserved | commands.Adopted):
        yield from reply.copy_rows


def scope_of(root: Node) -> Scope:
    assert isinstance(root, Root)
    return "a", root.namespace.to_bytes(4, "little"), root.epoch
