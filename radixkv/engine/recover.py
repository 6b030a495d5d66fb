"""The next daemon's state, from what the last one's descriptor table says. No log is replayed: this is one scan.

::

    record in the table                          becomes
    CACHED, sound, its parents too up to a root  cached: in the tree, idle, in the order of its stamp
    CACHED, anything else                        free
    PRIVATE, SHADOW of a known session           quarantined until the session claims it (``resume.py``) or is over
    PRIVATE, SHADOW of nobody (in transit)       quarantined until the resume window closes
    PRIVATE, SHADOW of an ended one              quarantined until nothing of it maps the arena; free if nothing does
    QUARANTINED                                  quarantined, until we hear that nothing maps the arena any more
    FREE                                         free

Why any state that a kill can leave is good: a record's state word is stored last and whole, so each record is as it
was before a write or as it is after, or is a cached page on its way to somebody else, which is not sound. A page is
linked to its parent by the serial of the parent's *content* (``scan.py``): a place that has become something else is
not taken for what it was. A worker is told of a page only when the table says so; what the table says and no worker was
told is claimed by nobody and comes back.

Stamps: a page's place in the order of eviction is the latest stamp of its own and of those of the pages that continue
it. A page without either was held when the daemon died, and is the newest.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.allocator.page_states import State as PageState
from radixkv.commands import Retire, SessionRecord, Stamp, Write
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.engine.lineage import Lineage
from radixkv.engine.pool import LAST_ID, Pool, namespace_of
from radixkv.engine.scan import Runs, runs_of, scan
from radixkv.engine.state import NOBODY
from radixkv.image import SessionImage, TableImage
from radixkv.tree.node import Node, Root
from radixkv.types import PAGE_ID_BYTES


class Found(NamedTuple):
    """What there is to recover from. All mappings have one entry a pool, in the order in which tables are written.

    sessions: those that are not over, as each pool's table has them; the first table is written first and decides.
    attached: ids of sessions, open or ended, whose processes are still watched: one that is not among them is gone.
    ranks: which further processes of them had joined, as (session, rank).
    """

    images: Mapping[str, TableImage]
    sessions: Sequence[list[SessionImage]]
    attached: Collection[int]
    ranks: Collection[tuple[int, int]] = ()


def recover(config: Config, ids: tuple[str, str], found: Found) -> tuple[Engine, list[Write]]:
    """An engine that goes on with what was found, and the writes that make the table agree with it.

    ``ids``: boot_id, cache_id. The caller has checked that the tables fit the configuration.
    """
    engine = Engine(config, *ids)
    writes: list[Write] = list(_sessions(engine, found.sessions))
    known = {session.id for session in engine.sessions.all()}
    for identity, rank in found.ranks:
        if identity in known:
            engine.sessions.find_quietly(identity).ranks.add(rank)
    for name, image in found.images.items():
        pool = engine.pools[name]
        pool.floors_missing = pool.config.session_floor_pages * len(known)
        restored = _Restore(pool, image)
        restored.trees()
        restored.others(engine, known, found.attached)
        writes += restored.writes
    engine.begin_resuming(known)
    writes += engine.writes  # nobody to wait for: what was in transit is free at once
    engine.writes.clear()
    return engine, writes


def _sessions(engine: Engine, tables: Sequence[list[SessionImage]]) -> Iterable[Write]:
    """A kill between the tables leaves them apart: the first says what is so."""
    first = tables[0] if tables else []
    for image in first:
        engine.sessions.restore(image.slot, image.id, image.epoch, image.token)
    known = {image.id for image in first}
    for image in {image for table in tables[1:] for image in table if image.id not in known}:
        yield SessionRecord(image.slot, image.id, 0, b"")
    for image in first:
        yield SessionRecord(image.slot, image.id, image.epoch, image.token)


class _Restore:
    """One pool being put together again."""

    def __init__(self, pool: Pool, image: TableImage) -> None:
        self.pool = pool
        self.image = image
        self.contents = scan(image)
        self.writes: list[Write] = []
        self.roots: dict[tuple[int, int], Root] = {}
        newest = int(image.epochs.max(initial=0))
        for name in pool.namespaces.restore(image.names, newest):
            self.roots[name.id, name.root.epoch] = name.root
        self._ids = pool.namespaces.ids()
        self.states: NDArray[np.uint8] = image.states.copy()

    # -- cached pages ---------------------------------------------------------------------------------------------

    def trees(self) -> None:
        """Build the trees from pages that follow one another."""
        pool, contents = self.pool, self.contents
        runs = runs_of(contents, self._stamped())
        placed = np.zeros(len(contents.above), bool)
        nodes = []
        for node, depth, entries in _Builder(self, runs).nodes():
            nodes.append((int(runs.stamps[entries[0]]), depth, node))
            placed[entries] = True
        lost = self.image.states == PageState.CACHED
        for places in (contents.device[placed], contents.host[placed]):
            lost[places[places >= 0]] = False
        self._free(np.flatnonzero(lost))
        self._order(nodes)
        if pool.host is not None:
            pool.host.pages.restore(self.states[self.image.pages :])

    def root_of(self, key: tuple[int, int]) -> Root | None:
        """The tree of (namespace id, epoch) that a first page belongs to; None if the namespace is not there."""
        root = self.roots.get(key)
        if root is None and key[0] in self._ids:
            root = self.pool.namespaces.retired_root(*key)
            self.roots[key] = root
        return root

    def _stamped(self) -> NDArray[np.uint64]:
        """The contents' own stamps. Paths that nobody had let go get new ones: they are the newest, each as a whole."""
        pool, contents = self.pool, self.contents
        stamps = contents.stamps.copy()
        here = contents.device >= 0
        pool.stamp = int(stamps.max(initial=0))
        for end in np.flatnonzero(here & (stamps == 0) & (contents.followers(here) == 0)).tolist():
            stamps[end] = pool.next_stamp()
            self.writes.append(Stamp(pool.name, np.int32(contents.device[end]).tobytes(), pool.stamp))
        return stamps

    def _order(self, nodes: list[tuple[int, int, Node]]) -> None:
        """Into the order of eviction: by stamp, deeper ones first.

        A stamp that a node has from pages behind it is written to its own end: those may leave before it.
        """
        pool, own = self.pool, self.image.stamps
        for stamp, _, node in sorted(nodes, key=lambda entry: (entry[0], -entry[1])):
            node.stamp = stamp
            end = self._into_order(node)
            if node.children and own[int.from_bytes(end, "little")] != stamp:
                self.writes.append(Stamp(pool.name, end, stamp))
        for root in self.roots.values():
            if root.retired and root.children:
                pool.retired.append((root, None))

    def _into_order(self, node: Node) -> bytes:
        """Of the tier that it is in. Returns the place of its last page."""
        pool, host = self.pool, self.pool.host
        if node.pages:
            pool.order.add(node)
            if pool.shares is not None:
                pool.shares.taken(array("i", bytes(node.pages)), namespace_of(node))
            if host is not None and node.host:
                host.clean[node] = None
            return bytes(node.pages[LAST_ID])
        assert host is not None
        host.order.add(node)
        host.only_pages += node.page_count
        return host.end(node)

    # -- all others -----------------------------------------------------------------------------------------------

    def others(self, engine: Engine, known: set[int], attached: Collection[int]) -> None:
        image, pool = self.image, self.pool
        lineage = Lineage(image, self.roots)
        device = image.states[: image.pages]
        outside = np.flatnonzero((device != PageState.FREE) & (device != PageState.CACHED))
        self.states[outside] = PageState.QUARANTINED
        for owner in np.unique(image.owners[outside]).tolist():
            mine = outside[image.owners[outside] == owner]
            over = image.states[mine] == PageState.QUARANTINED
            self._quarantine(engine, owner, mine[over])
            mine = mine[~over]
            if owner in known or owner == NOBODY:
                lineage.wait_for(owner, mine.tolist())
            elif owner in attached:
                self._quarantine(engine, owner, mine)
            else:
                self._free(mine)
        pool.pages.restore(self.states[: image.pages])
        pool.lineage = lineage
        if pool.host is not None:
            pool.host.trim()  # what was being loaded when the daemon died is too much now

    def _quarantine(self, engine: Engine, owner: int, pages: NDArray[np.intp]) -> None:
        """Of an ended session, which may still write to them."""
        if not len(pages):
            return
        engine.quarantine.setdefault(owner, {}).setdefault(self.pool.name, []).extend(pages.tolist())
        new = pages[self.image.states[pages] != PageState.QUARANTINED]
        if len(new):
            self.writes.append(Retire(self.pool.name, new.astype("<i4").tobytes(), True))

    def _free(self, pages: NDArray[np.intp]) -> None:
        if len(pages):
            self.states[pages] = PageState.FREE
            self.writes.append(Retire(self.pool.name, pages.astype("<i4").tobytes()))


class _Builder:
    """Makes a node of each run. What a table says is packed once in the order of the runs, and cut."""

    def __init__(self, restore: _Restore, runs: Runs) -> None:
        image, contents, entries = restore.image, restore.contents, runs.entries
        self._restore = restore
        self._tree = restore.pool.tree
        self._begins = runs.begins.tolist()
        self._entries = entries
        firsts = entries[runs.begins[:-1]]
        self._above = contents.above[firsts].tolist()
        self._tiers = contents.tiers[firsts].tolist()
        records = contents.records[entries]
        heads = records[runs.begins[:-1]]
        self._scopes = list(zip(image.namespaces[heads].tolist(), image.epochs[heads].tolist(), strict=True))
        self._tokens = image.tokens[records].tobytes()
        self._device = contents.device[entries].astype("<i4").tobytes()
        self._host = (contents.host[entries] - image.pages).astype("<i4").tobytes()

    def nodes(self) -> Iterator[tuple[Node, int, NDArray[np.int64]]]:
        """Each with its depth in pages and its contents. Whatever hangs below what could not be made is left out."""
        ends: dict[int, tuple[Node, int]] = {}
        for run, (begin, end) in enumerate(pairwise(self._begins)):
            above = self._above[run]
            at = ends.get(above) if above >= 0 else self._root(run)
            node = None if at is None else self._node(at[0], begin, end, self._tiers[run])
            if at is None or node is None:
                continue
            entries = self._entries[begin:end]
            depth = at[1] + end - begin
            ends[int(entries[-1])] = node, depth
            yield node, depth, entries

    def _root(self, run: int) -> tuple[Node, int] | None:
        root = self._restore.root_of(self._scopes[run])
        return None if root is None else (root, 0)

    def _node(self, parent: Node, begin: int, end: int, tiers: int) -> Node | None:
        size, ids = self._tree.page_token_bytes, slice(begin * PAGE_ID_BYTES, end * PAGE_ID_BYTES)
        return self._tree.restore(
            parent,
            self._tokens[begin * size : end * size],
            self._device[ids] if tiers & 1 else b"",
            self._host[ids] if tiers & 2 else b"",
        )
