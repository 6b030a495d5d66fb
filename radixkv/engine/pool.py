"""One pool: tree, pages and order of eviction joined. The small moves that every command is made of.

What sequences do with them is in ``life.py`` (computed pages become everybody's) and ``holding.py`` (letting go).

Nothing here plans: the callers have checked that there are pages enough. Every change of a page is written to
``writes``, in the order in which it must reach the descriptor table.
"""

from __future__ import annotations

from array import array
from collections import deque

from radixkv.allocator.page_pool import PagePool
from radixkv.allocator.page_states import (
    CACHED,
    CLEAR,
    EVICT,
    FREE,
    LOAD,
    QUARANTINE,
    QUARANTINED,
    RELEASE,
    REUSE,
    SAVING,
)
from radixkv.commands import Assign, NamespaceRecord, Retire, Stamp, Write
from radixkv.config import PoolConfig
from radixkv.engine.flights import Flights
from radixkv.engine.host import HostTier
from radixkv.engine.lineage import Lineage
from radixkv.engine.namespaces import Namespace, Namespaces
from radixkv.engine.sequence import Sequence
from radixkv.engine.waiting import Waiting, WaitingLine
from radixkv.evictor import policies
from radixkv.evictor.policy import Policy
from radixkv.evictor.priorities import Priorities
from radixkv.evictor.shares import Shares
from radixkv.tree.node import Node, Root
from radixkv.tree.prefix_tree import PrefixTree
from radixkv.tree.walk import Match
from radixkv.types import PAGE_ID_BYTES

COUNTERS = (
    "asked_tokens", "hit_tokens", "committed_pages", "shadow_pages", "evicted_pages", "forks", "truncates",
    "saved_pages", "loaded_pages", "failed_copies",
)  # fmt: skip

IN_TREE = (CACHED, SAVING)
"""States of pages that are complete and in the tree."""
LAST_ID = slice(-PAGE_ID_BYTES, None)
"""Of packed page ids."""


class Pool:
    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.name = config.name
        self.page_size = config.spec.page_size
        self.pages = PagePool(config.pages)
        self.tree = PrefixTree(self.page_size)
        self.order: Policy[Node] = policies.make(config.policy, config.pages, scope_of)
        self.shares: Shares[Node] | None = None
        """The order, if namespaces have floors or caps."""
        if config.namespace_floor_pages or config.namespace_cap_pages:
            floor, cap = config.namespace_floor_pages, config.namespace_cap_pages
            self.order = self.shares = Shares(config.pages, floor, cap, namespace_of)
        self.namespaces = Namespaces(config.namespaces)
        self.host: HostTier | None = None
        if config.host_pages:
            self.host = HostTier(self.tree, self.namespaces.emptied, config)
        self.priorities: Priorities[Node] | None = None
        """The order, once somebody has asked for a priority."""
        self.now = 0.0
        """Monotonic seconds; before there are priorities, of the last tick."""
        self.sequences = 0
        self.waiting = WaitingLine()
        """Reserves that wait for pages."""
        self.fetching = WaitingLine()
        """Reserves that wait for copies between the tiers."""
        self.joining = WaitingLine()
        """Reserves that wait for what others are computing."""
        self.arriving = WaitingLine()
        """Those who wait until pages of their sequences have been loaded."""
        self.flights: Flights | None = None
        """What is being computed, once somebody has asked for it."""
        self.copied = False
        """A copy has ended since they were last looked at."""
        self.floors_missing = 0
        """Pages that are missing to the sessions' floors, over all open sessions."""
        self.retired: deque[tuple[Node, list[Node] | None]] = deque()
        """Nodes of invalidated trees to be looked at, each with its children that still are (None: all)."""
        self.publishing: dict[Sequence, int] = {}
        """Sequences with a commit too large for one command: how many pages are to be published in all."""
        self.copying: dict[int, list[Sequence]] = {}
        """Private pages that are the source of other sequences' copy_rows."""
        self.frozen = False
        """Nothing may be evicted: sessions of an earlier daemon's time have yet to say what they hold."""
        self.lineage: Lineage | None = None
        """What is known of pages from an earlier daemon's time."""
        self.stamp = 0
        self.gained = False
        """Pages have come free or fallen idle since the waiting line was last served."""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.writes: list[Write] = []

    # -- who waits ----------------------------------------------------------------------------------------------

    def all_waiting(self) -> list[Waiting]:
        return [waiting for line in self.lines for waiting in line.all()]

    @property
    def lines(self) -> tuple[WaitingLine, WaitingLine, WaitingLine, WaitingLine]:
        return self.waiting, self.fetching, self.joining, self.arriving

    def leave_lines(self, session: int, request: int) -> Waiting | None:
        if self.flights is not None:
            self.flights.leave((session, request))
        left = [line.leave(session, request) for line in self.lines]
        return next((waiting for waiting in left if waiting is not None), None)

    # -- how much there is --------------------------------------------------------------------------------------

    def room(self, own_floor_missing: int, root: Root | None, kept: int = 0) -> int:
        """Pages free or evictable, less ``kept``, that the other sessions' floors leave to one whose own lacks so many,
        and the floors and caps of namespaces to that of ``root`` (None: to a new one).
        """
        idle = 0 if self.frozen else self.tree.idle_pages
        room = self.pages.counts[FREE] + idle - (self.floors_missing - own_floor_missing) - kept
        if self.shares is None:
            return room
        return self.shares.limit(room, NO_NAMESPACE if root is None else root.namespace, self.frozen)

    @property
    def largest(self) -> int:
        """The most pages that a sequence could ever have."""
        return min(self.pages.size, self.config.namespace_cap_pages or self.pages.size)

    # -- pages --------------------------------------------------------------------------------------------------

    def take(self, count: int, owner: int, root: Root) -> array[int]:
        """``count`` private pages for a sequence of ``owner``, evicting what is missing."""
        spare = self.pages.counts[FREE]
        if self.shares is not None:
            pages = self._take_within(self.shares, count, root.namespace)
        elif count <= spare:
            pages = self.pages.take(count)
        else:
            pages = self._evict_for(count - spare)
            if spare:
                pages += self.pages.take(spare)
        if self.lineage is not None:
            self.lineage.handed_out(pages)
        if count:
            self.writes.append(Assign(self.name, pages.tobytes(), owner, root.namespace, root.epoch))
            if self.host is not None:
                self.host.taken += count
        return pages

    def _take_within(self, shares: Shares[Node], count: int, space: int) -> array[int]:
        """``count`` pages within floors and caps: free ones, unless the namespace has to give up some of its own."""
        pages = array("i")
        while (left := count - len(pages)) > 0:
            spare = min(left, self.pages.counts[FREE])
            if spare and shares.excess(space, left) <= 0:
                some = self.pages.take(spare)
            else:
                leaf, most = shares.victim_for(space, left)
                some = array("i", self._trim(leaf, most))
                shares.given(some)
                self.pages.move(some, CACHED, REUSE)
                self.gained = True
            shares.taken(some, space)
            pages += some
        return pages

    def take_to_fill(self, count: int, root: Root) -> array[int]:
        """``count`` pages that a copy from the host tier fills, evicting what is missing. In the table nobody's."""
        while (short := count - self.pages.counts[FREE]) > 0:
            leaf = self.order.victim(short)
            self._evict(leaf, short)
        pages = self.pages.take(count, LOAD)
        if self.lineage is not None:
            self.lineage.handed_out(pages)
        self.writes.append(Assign(self.name, pages.tobytes(), 0, root.namespace, root.epoch))
        return pages

    def push_out(self, leaf: Node, count: int) -> None:
        """The last ``count`` pages of an idle run that nothing on the device follows are free now."""
        if count >= leaf.page_count:
            self.order.remove(leaf)
        self._evict(leaf, count)

    def _evict(self, leaf: Node, count: int) -> None:
        """To the free list. A run that goes as a whole has been taken out of the order."""
        packed = self._trim(leaf, count)
        self.pages.give(array("i", packed), CACHED, EVICT)
        self.writes.append(Retire(self.name, packed))

    def _evict_for(self, count: int) -> array[int]:
        """Exactly ``count`` idle pages from the tree, in the policy's order, private from now on.

        The ``Assign`` that follows says all there is to say of them: see ``TableWriter``.
        """
        pages = array("i")
        while (left := count - len(pages)) > 0:
            pages.frombytes(self._trim(self.order.victim(left), left))
        self.pages.move(pages, CACHED, REUSE)
        self.gained = True  # who waits may have lost a prefix, and with it the hope to fit
        return pages

    def _trim(self, leaf: Node, count: int) -> bytes:
        """Off the device: into the host tier if that has it already, else lost, with what follows there."""
        parent = leaf.parent
        if self.host is not None and leaf.host:
            pages = self.host.sink(leaf, count)
            if leaf.pages:
                self.writes.append(Stamp(self.name, bytes(leaf.pages[-PAGE_ID_BYTES:]), leaf.stamp))
            return pages
        if leaf.children and self.host is not None:
            self.host.drop_below(leaf)
        pages = self.tree.trim(leaf, count)
        self.counters["evicted_pages"] += len(pages) // PAGE_ID_BYTES
        if leaf.parent is not None:  # what is left has a new end, which the next daemon has to find stamped
            self.writes.append(Stamp(self.name, bytes(leaf.pages[-PAGE_ID_BYTES:]), leaf.stamp))
        elif type(parent) is Root and not parent.children:
            self.namespaces.emptied(parent)
        return pages

    def drop(self, pages: array[int], state: int, quarantine: list[int] | None) -> None:
        """One holder lets go of private or shadow pages; the last one sends them to the free list (or quarantine)."""
        if self.pages.extra_holders:
            pages = array("i", [page for page in pages if self.pages.drop(page)])
        if not pages:
            return
        if quarantine is None:
            packed = self.pages.give(pages, state, RELEASE)
            self._given(pages)
        else:
            packed = pages.tobytes()
            self.pages.move(pages, state, QUARANTINE)
            quarantine.extend(pages)
        self.writes.append(Retire(self.name, packed, quarantine is not None))

    def clear(self, pages: list[int]) -> None:
        """Quarantined pages that nobody can write to any longer."""
        if not pages:
            return
        packed = self.pages.give(pages, QUARANTINED, CLEAR)
        self._given(array("i", pages))
        self.writes.append(Retire(self.name, packed))

    def _given(self, pages: array[int]) -> None:
        """They are free now."""
        self.gained = True
        if self.shares is not None:
            self.shares.given(pages)

    # -- paths --------------------------------------------------------------------------------------------------

    def pin(self, match: Match, above: Node | None = None) -> Node:
        """Hold a matched path, from below ``above`` (held already) or from the root. Returns its last node."""
        node, woken = self.tree.pin(match, above=above)
        if woken:
            self.woken(woken)
            self.gained = True  # who waits for what is held now anyway needs nothing
        if self.shares is not None and match.inside is not None:
            self.shares.resized(match.inside)
        return node

    def woken(self, nodes: list[Node]) -> None:
        if self.host is not None:
            for node in nodes:
                (self.order if node.pages else self.host.order).remove(node)
            return
        remove = self.order.remove
        for node in nodes:
            remove(node)

    def next_stamp(self) -> int:
        self.stamp += 1
        return self.stamp

    def fallen_idle(self, nodes: list[Node], retired: bool) -> None:
        """Nodes, leaf to root, whose last holder has let go under the current stamp.

        Only their last pages get it in the table: it holds for all before them.
        """
        ends = []
        add = self.order.add
        for node in nodes:
            add(node)
            ends.append(node.pages[LAST_ID])
        if self.host is not None:
            self.host.used(nodes)
        self.gained = True
        self.writes.append(Stamp(self.name, b"".join(ends), self.stamp))
        if retired:
            self.retired.extend((node, None) for node in nodes)

    # -- invalidation -------------------------------------------------------------------------------------------

    def invalidate(self, namespace: Namespace) -> None:
        old = self.namespaces.renew(namespace)
        self.retired.append((old, None))
        self.gained = True
        if self.flights is not None:
            self.flights.wake_all()
        self.writes.append(namespace_record(self.name, namespace))

    def reclaim(self, budget: int) -> None:
        """Take idle nodes of invalidated trees out, children first, looking at no more than ``budget`` nodes."""
        gone = bytearray()
        while self.retired and budget > 0:
            budget -= 1
            node, below = self.retired.pop()
            if below is None:
                below = list(node.children.values()) if node.children else []
            if below:
                child = below.pop()
                self.retired.append((node, below))
                self.retired.append((child, None))
            elif node.parent is not None and node.holders == 0 and not node.children:
                pages = node.page_count
                if self.host is not None:
                    self.host.forget(node)
                if node.pages:
                    self.order.remove(node)
                gone += self._trim(node, pages)
        if gone:
            packed = bytes(gone)
            self.pages.give(array("i", packed), CACHED, EVICT)
            self._given(array("i", packed))
            self.writes.append(Retire(self.name, packed))


NO_NAMESPACE = -1


def scope_of(root: Node) -> int:
    """Epoch and namespace as one word of 64 bits."""
    assert isinstance(root, Root)
    return root.epoch << 32 | root.namespace


def namespace_of(node: Node) -> int:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node.namespace


def namespace_record(pool: str, namespace: Namespace) -> NamespaceRecord:
    return NamespaceRecord(pool, namespace.id, namespace.root.epoch, namespace.canonical, namespace.invalidations)
