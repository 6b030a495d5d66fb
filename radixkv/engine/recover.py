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
linked to its parent by the parent's id *and generation*: a parent that left and came back as something else is not
taken for what it was. A worker is told of a page only when the table says so; what the table says and no worker was
told is claimed by nobody and comes back.

Stamps: a page's place in the order of eviction is the latest stamp of its own and of those of the pages that continue
it. A page without either was held when the daemon died, and is the newest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.allocator.page_states import State as PageState
from radixkv.commands import Retire, SessionRecord, Stamp, Write
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.engine.lineage import Lineage
from radixkv.engine.pool import LAST_ID, Pool
from radixkv.engine.state import NOBODY
from radixkv.image import NO_PAGE, SessionImage, TableImage
from radixkv.tree.node import Node, Root
from radixkv.types import HASH_BYTES, PAGE_ID_BYTES

_LOST = -2
_UNSEEN, _PLACED, _BROKEN = range(3)


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
        self.writes: list[Write] = []
        self.roots: dict[tuple[int, int], Root] = {}
        newest = int(image.epochs.max(initial=0))
        for name in pool.namespaces.restore(image.names, newest):
            self.roots[name.id, name.root.epoch] = name.root
        self._ids = pool.namespaces.ids()
        self.states: NDArray[np.uint8] = image.states.copy()

    # -- cached pages ---------------------------------------------------------------------------------------------

    def trees(self) -> None:
        """Build the trees from pages that follow one another, the most recently used ends first."""
        image = self.image
        cached = (image.states == PageState.CACHED) & image.sound
        pages = np.flatnonzero(cached)
        above = self._above(pages, cached)
        fans = np.bincount(above[above >= 0], minlength=len(cached))
        stamps = image.stamps.copy()
        self._stamp_held(pages[(image.stamps[pages] == 0) & (fans[pages] == 0)], stamps)
        order = pages[np.argsort(stamps[pages], kind="stable")[::-1]]
        walk = _Walk(self, above.tolist(), fans.tolist())
        for page, stamp in zip(order.tolist(), stamps[order].tolist(), strict=True):
            walk.take_in(page, stamp)
        self._free(
            np.flatnonzero((image.states == PageState.CACHED) & (np.frombuffer(walk.status, np.uint8) != _PLACED))
        )
        self._order(walk.nodes)

    def _above(self, pages: NDArray[np.intp], cached: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The page before each page: NO_PAGE for a first one, ``_LOST`` where the link does not hold."""
        image = self.image
        above = np.full(len(cached), _LOST, np.int64)
        parents = image.parents[pages]
        inside = (parents >= 0) & (parents < len(cached))
        at = np.where(inside, parents, 0)
        same = cached[at] & (image.generations[at] == image.parent_generations[pages])
        same &= (image.namespaces[at] == image.namespaces[pages]) & (image.epochs[at] == image.epochs[pages])
        above[pages] = np.where(parents == NO_PAGE, NO_PAGE, np.where(inside & same, parents, _LOST))
        return above

    def root_of(self, page: int, key: tuple[int, int]) -> Root | None:
        """The tree of (namespace id, epoch) that a first page belongs to; None if the namespace is not there."""
        root = self.roots.get(key)
        if root is None and key[0] in self._ids:
            root = self.pool.namespaces.retired_root(*key, seed=self.image.seeds[page].tobytes())
            self.roots[key] = root
        return root

    def _stamp_held(self, ends: NDArray[np.intp], stamps: NDArray[np.uint64]) -> None:
        """Paths that nobody had let go are the newest, each as a whole."""
        pool = self.pool
        pool.stamp = int(stamps.max(initial=0))
        for end in ends.tolist():
            stamps[end] = pool.next_stamp()
            self.writes.append(Stamp(pool.name, np.int32(end).tobytes(), pool.stamp))

    def _order(self, nodes: list[tuple[int, int, Node]]) -> None:
        """Into the order of eviction: by stamp, deeper ones first.

        A stamp that a node has from pages behind it is written to its own end: those may leave before it.
        """
        pool, own = self.pool, self.image.stamps
        for stamp, _, node in sorted(nodes, key=lambda entry: (entry[0], -entry[1])):
            node.stamp = stamp
            pool.order.add(node)
            end = bytes(node.pages[LAST_ID])
            if node.children and own[int.from_bytes(end, "little")] != stamp:
                self.writes.append(Stamp(pool.name, end, stamp))
        for root in self.roots.values():
            if root.retired and root.children:
                pool.retired.append((root, None))

    # -- all others -----------------------------------------------------------------------------------------------

    def others(self, engine: Engine, known: set[int], attached: Collection[int]) -> None:
        image, pool = self.image, self.pool
        lineage = Lineage(image, self.roots)
        outside = np.flatnonzero((image.states != PageState.FREE) & (image.states != PageState.CACHED))
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
        pool.pages.restore(self.states)
        pool.lineage = lineage

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


class _Walk:
    """Takes pages in, each with all before it that are not in yet: runs that become nodes."""

    def __init__(self, restore: _Restore, above: list[int], fans: list[int]) -> None:
        image = restore.image
        self._restore = restore
        self._tree = restore.pool.tree
        self._above = above
        self._fans = fans
        """How many pages follow each."""
        self.status = bytearray(len(above))
        self.nodes: list[tuple[int, int, Node]] = []
        """(stamp, depth in pages, node)."""
        self._ends: dict[int, tuple[Node, int]] = {}
        """By the last page of a node: the node, its depth."""
        self._tokens = image.tokens.tobytes()
        self._hashes = image.chains.tobytes()
        self._ids = np.arange(len(above), dtype="<i4").tobytes()
        self._scopes = list(zip(image.namespaces.tolist(), image.epochs.tolist(), strict=True))

    def take_in(self, page: int, stamp: int) -> None:
        status, above = self.status, self._above
        if status[page]:
            return
        run = []
        while page >= 0 and not status[page]:
            status[page] = _PLACED
            run.append(page)
            page = above[page]
        at = self._place(page, run[-1])
        if at is None:
            for lost in run:
                status[lost] = _BROKEN
            return
        self._hang(run[::-1], at, stamp)

    def _place(self, page: int, first: int) -> tuple[Node, int] | None:
        """Where a run that begins with ``first`` hangs: behind ``page``."""
        if page >= 0:
            return self._ends.get(page)
        root = self._restore.root_of(first, self._scopes[first]) if page == NO_PAGE else None
        return None if root is None else (root, 0)

    def _hang(self, run: list[int], at: tuple[Node, int], stamp: int) -> None:
        """One node up to each page that several follow."""
        node, depth = at
        begin = 0
        for place, page in enumerate(run, 1):
            if place < len(run) and self._fans[page] == 1:
                continue
            pages = run[begin:place]
            made = self._node(node, pages)
            if made is None:
                for lost in run[begin:]:
                    self.status[lost] = _BROKEN
                return
            depth += len(pages)
            node, begin = made, place
            self._ends[page] = node, depth
            self.nodes.append((stamp, depth, node))

    def _node(self, parent: Node, pages: list[int]) -> Node | None:
        tokens, ids, hashes = self._tokens, self._ids, self._hashes
        size, each, digest = self._tree.page_token_bytes, PAGE_ID_BYTES, HASH_BYTES
        return self._tree.restore(
            parent,
            b"".join([tokens[at * size : at * size + size] for at in pages]),
            b"".join([ids[at * each : at * each + each] for at in pages]),
            b"".join([hashes[at * digest : at * digest + digest] for at in pages]),
        )
