"""The host tier of one pool: where cold pages go when the device runs short, and what is on its way between the two.

::

    device only ──save──> both ("clean") ──sink──> host only ──evict──> gone
         ^                  │ ^                        │
         └────uncover───────┘ └─────────load───────────┘

A page of the host tier is free, being filled (LOADING), full (CACHED) or being read (SAVING). A run of the tree lies in
one of the three places above, all its pages alike. Host copies of what is on the device as well are dropped before any
page that is nowhere else. Those leave in the order of their last release, leaf first: the exact LRU of both tiers
together, if the device's policy is LRU (Belady would know better; an exclusive second tier is as old as victim caches:
Jouppi, 1990).

A copy holds the paths of what it copies like a sequence does: whatever happens meanwhile, nobody evicts, merges or
reuses what a copy reads or writes. Only when it is known to have ended it lets go, and that is no use: runs return to
the place in the order of eviction that they had.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from msgspec import Struct

from radixkv.allocator.page_pool import PagePool
from radixkv.allocator.page_states import CACHED, EVICT, FREE, LOAD, SAVING
from radixkv.commands import Retire, Stamp, Write
from radixkv.config import PoolConfig
from radixkv.engine.sequence import Sequence
from radixkv.evictor.lru import LRU
from radixkv.evictor.priorities import Priorities
from radixkv.tree.node import Node, Root
from radixkv.tree.prefix_tree import PrefixTree
from radixkv.types import PAGE_ID, PAGE_ID_BYTES


class CopyRun(Struct, eq=False):
    """Pages that follow one another up to the end of ``node``, device and host pages in the order of the path."""

    node: Node
    device: array[int]
    host: array[int]

    def spanned(self) -> list[Node]:
        """The runs of the tree that its pages are now, the end first: it may have been split since."""
        nodes, left, node = [], len(self.host), self.node
        while left > 0:
            nodes.append(node)
            left -= node.page_count
            assert node.parent is not None
            node = node.parent
        return nodes


class Copying(Struct, eq=False):
    """One copy that runs. ``guard``: the end of a further path that stays where it is meanwhile.

    A load has one run. ``readers``: sequences that have pages of it in their tables already (``early.py``); ``layers``:
    how many layers of all its pages are there. It may be begun again, under another id: ``tries``, since when, and
    when the next of them is ``due``.
    """

    id: int
    to_host: bool
    runs: list[CopyRun]
    guard: Node | None = None
    by_layer: bool = False
    readers: dict[Sequence, None] = {}
    layers: int = 0
    tries: int = 1
    since: float = 0.0
    due: float = 0.0

    @property
    def pages(self) -> int:
        return sum(len(run.host) for run in self.runs)

    @property
    def ends(self) -> list[Node]:
        """Of all paths that it holds."""
        ends = [run.node for run in self.runs]
        return ends if self.guard is None else [*ends, self.guard]


class HostTier:
    def __init__(self, tree: PrefixTree, emptied: Callable[[Root], None], config: PoolConfig) -> None:
        """``emptied`` is told when the last run below a root has gone."""
        self.tree = tree
        self._emptied = emptied
        self._pool = config.name
        self._device_pages = config.pages
        self.limit = config.host_pages
        """How many pages may be in the host tier alone. There are further ones, for what passes through."""
        self.pages = PagePool(config.host_pages + config.host_staging_pages)
        self.order: LRU[Node] | Priorities[Node] = LRU()
        """Runs that are in the host tier alone and not held by a copy."""
        self.clean: OrderedDict[Node, None] = OrderedDict()
        """Runs on the device that the host tier has too, the coldest first. Some have melted into others since."""
        self.only_pages = 0
        self.saving_pages = 0
        self.leaving_pages = 0
        """Of ``only_pages`` those that are being loaded."""
        self.copies: dict[int, Copying] = {}
        self.fresh: dict[Node, None] = {}
        """Runs committed since the last copy, if they are to be in both tiers at once."""
        self.rests_until = -math.inf
        """After a failed copy nothing is begun for a while."""
        self.taken = 0
        """Device pages handed out since the coldest were last looked at."""
        self.writes: list[Write] = []
        """As a pool's: what is FREE here must be so in the table before anything else is copied into it."""
        self.evicted_pages = 0
        """Dropped from the host tier when they were nowhere else."""

    # -- priorities ---------------------------------------------------------------------------------------------

    def begin_priorities(self, now_ms: int) -> None:
        """Runs can have some, here too. Pins are as many as the device had."""
        assert isinstance(self.order, LRU)
        self.order = Priorities(self.order, self.pages.size, now_ms)

    def next_end_ms(self) -> int | None:
        return self.order.next_end_ms() if isinstance(self.order, Priorities) else None

    def expire(self, now_ms: int, budget: int) -> None:
        assert isinstance(self.order, Priorities)
        self.order.expire(now_ms, budget)

    # -- room ---------------------------------------------------------------------------------------------------

    def take(self, count: int, leaving: int = 0) -> array[int]:
        """Up to ``count`` pages to be filled, now LOADING, fewer if what is there may not go.

        ``leaving``: so many more pages than are known of will leave the host tier soon (or, negative, come into it).
        """
        count = self.room(count, leaving)
        short = count - self.pages.counts[FREE]
        if short > 0:
            self._uncover_some(short)
            short = count - self.pages.counts[FREE]
        if short > 0:
            self.evict(short)
        return self.pages.take(max(0, min(count, self.pages.counts[FREE])), LOAD)

    def room(self, count: int, leaving: int) -> int:
        """Make room for ``count`` pages. Returns for how many there may be; ``leaving`` as for ``take``."""
        self.trim(count - leaving)
        return max(0, min(count, self.limit - self.only_pages + self.leaving_pages - self.saving_pages + leaving))

    def trim(self, more: int = 0) -> None:
        """Evict what is too much, with ``more`` pages to come."""
        excess = self.only_pages - self.leaving_pages + self.saving_pages + more - self.limit
        if excess > 0:
            self.evict(excess)

    def evict(self, count: int) -> None:
        """Up to ``count`` pages that are nowhere else are gone, the coldest ends first."""
        while count > 0 and len(self.order):
            leaf = self.order.victim(count)
            gone = min(count, leaf.page_count)
            self._give(bytes(leaf.host[-gone * PAGE_ID_BYTES :]))
            self.only_pages -= gone
            self.evicted_pages += gone
            self._trim(leaf, gone)
            if leaf.parent is not None:
                self.writes.append(Stamp(self._pool, self.end(leaf), leaf.stamp))
            count -= gone

    def _trim(self, leaf: Node, pages: int) -> None:
        parent = leaf.parent
        self.tree.trim(leaf, pages)
        if leaf.parent is None and type(parent) is Root and not parent.children:
            self._emptied(parent)

    def _uncover_some(self, count: int) -> None:
        """Drop copies of what is on the device as well until ``count`` pages are free, of the hottest first."""
        read = []
        while count > 0 and self.clean:
            node, _ = self.clean.popitem()
            if node.parent is not None and self.pages.states[_first(node.host)] == SAVING:
                read.append(node)  # computed again while it was being loaded: the copy goes on
                continue
            count -= len(node.host) // PAGE_ID_BYTES if node.parent is not None else 0
            self.uncover(node)
        self.clean.update(dict.fromkeys(reversed(read)))

    def _give(self, packed: bytes) -> None:
        self.pages.give(array("i", packed), CACHED, EVICT)
        self.writes.append(Retire(self._pool, self.places(packed)))

    # -- in the descriptor table --------------------------------------------------------------------------------

    def places(self, packed: bytes | bytearray | array[int]) -> bytes:
        """Which records these pages have: those behind the device's."""
        return (np.frombuffer(packed, np.int32) + np.int32(self._device_pages)).tobytes()

    def end(self, node: Node) -> bytes:
        """The place of a run's last page: where its stamp is written."""
        (page,) = PAGE_ID.unpack_from(node.host, -PAGE_ID_BYTES)
        return PAGE_ID.pack(page + self._device_pages)

    # -- runs ---------------------------------------------------------------------------------------------------

    def cover(self, node: Node, host: bytes) -> None:
        """The host tier has the run now: it is as cold as any (whoever is copied is)."""
        node.host = host
        self.clean[node] = None
        self.clean.move_to_end(node, last=False)

    def uncover(self, node: Node) -> None:
        """The host tier's copy of a run on the device goes. Nothing to do for one that has melted into another."""
        self.clean.pop(node, None)
        if node.parent is not None:
            self._give(bytes(node.host))
            node.host = b""

    def used(self, nodes: list[Node]) -> None:
        """Their last holder has let go just now."""
        for node in nodes:
            if node.host:
                self.clean[node] = None
                self.clean.move_to_end(node)
        if len(self.clean) > 2 * self.tree.nodes + 64:  # those that have melted into others must not fill it
            self.clean = OrderedDict((node, None) for node in self.clean if node.parent is not None)

    def sink(self, leaf: Node, count: int) -> bytes:
        """The last ``count`` pages of an idle clean run leave the device. Returns their packed ids there."""
        packed, sunk, melted = self.tree.sink(leaf, count)
        self.clean.pop(sunk, None)
        if melted is not None:
            self.order.remove(melted)
        self.order.add(sunk)
        self.writes.append(Stamp(self._pool, self.end(sunk), sunk.stamp))
        self.only_pages += len(packed) // PAGE_ID_BYTES
        self.trim()
        return packed

    def surface(self, node: Node, pages: bytes) -> None:
        """A held run of the host tier is on the device too, in these pages, and as hot as any."""
        self.tree.surface(node, pages)
        self.only_pages -= node.page_count
        self.clean[node] = None

    def drop_below(self, node: Node) -> None:
        """Whatever follows an idle run is in the host tier alone, and goes with it."""
        while node.children:
            leaf = node
            while leaf.children:
                leaf = next(iter(leaf.children.values()))
            self.order.remove(leaf)
            self.only_pages -= leaf.page_count
            self.evicted_pages += leaf.page_count
            self._give(bytes(leaf.host))
            self._trim(leaf, leaf.page_count)

    def forget(self, node: Node) -> None:
        """An idle run without children is about to leave the tree: what the host tier has of it is free."""
        if node.pages:
            if node.host:
                self.uncover(node)
            return
        self.order.remove(node)
        self.only_pages -= node.page_count
        self.evicted_pages += node.page_count
        self._give(bytes(node.host))
        node.host = b""


def _first(packed: bytes | bytearray) -> int:
    return int.from_bytes(packed[:PAGE_ID_BYTES], "little")
