"""One pool: tree, pages and order of eviction joined. The small moves that every command is made of.

Nothing here plans: the callers have checked that there are pages enough. Every change of a page is written to
``writes``, in the order in which it must reach the descriptor table.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable

from radixkv.allocator.page_pool import PagePool
from radixkv.allocator.page_states import (
    CACHED,
    CLEAR,
    EVICT,
    FREE,
    LOAD,
    PRIVATE,
    PUBLISH,
    QUARANTINE,
    QUARANTINED,
    RELEASE,
    REUSE,
    SAVING,
    SHADE,
    SHADOW,
)
from radixkv.commands import Assign, Copied, NamespaceRecord, Publish, Retain, Retire, Stamp, Write
from radixkv.config import PoolConfig
from radixkv.engine.flights import Flights
from radixkv.engine.host import HostTier
from radixkv.engine.lineage import Lineage
from radixkv.engine.namespaces import Namespace, Namespaces
from radixkv.engine.sequence import Sequence
from radixkv.engine.waiting import Waiting, WaitingLine
from radixkv.evictor import policies
from radixkv.evictor.lru import LRU
from radixkv.evictor.policy import Mark, Policy
from radixkv.evictor.priorities import DEFAULT, NEVER, Priorities
from radixkv.evictor.shares import Shares
from radixkv.image import NO_PAGE
from radixkv.tree.node import Node, Root
from radixkv.tree.prefix_tree import PrefixTree
from radixkv.tree.walk import Match
from radixkv.types import PAGE_ID, PAGE_ID_BYTES

COUNTERS = (
    "asked_tokens", "hit_tokens", "committed_pages", "shadow_pages", "evicted_pages", "forks", "truncates",
    "saved_pages", "loaded_pages", "failed_copies",
)  # fmt: skip

IN_TREE = (CACHED, SAVING)
"""States of pages that are complete and in the tree."""
LAST_ID = slice(-PAGE_ID_BYTES, None)
"""Of packed page ids."""
SLICE_PAGES = 8192
"""How many pages one command or tick publishes: well under 10 ms."""


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
        self.woken(woken)
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

    def let_go(self, seq: Sequence, depth: int, quarantine: list[int] | None = None) -> None:
        """The source of copy_rows and the path beyond its first ``depth`` pages: one release, one use of each page."""
        if seq.retain:
            self._mark(seq, depth)
        if self.order.counts_uses:
            kept = self.tree.node_at(seq.node, seq.depth - depth) if seq.depth > depth else seq.node
            self.order.used(self._path_to_source(seq) + self.tree.path(seq.node, above=kept))
        if seq.source >= 0:
            self._let_go_of_source(seq, quarantine)
        elif seq.depth > depth:
            self.stamp += 1
        if seq.depth > depth:
            self._stamp_for_copies(seq.node)
            if depth:
                seq.node, idle = self.tree.lift(seq.node, seq.depth - depth, self.stamp)
            else:
                idle, seq.node = self.tree.unpin(seq.node, self.stamp)
            seq.depth = depth
            if idle:
                self.fallen_idle(idle, seq.root.retired)

    # -- priorities ---------------------------------------------------------------------------------------------

    def begin_priorities(self) -> None:
        """From now on runs can have some. Until then nothing is paid for them."""
        assert isinstance(self.order, LRU)
        now_ms = round(self.now * 1000)
        self.order = self.priorities = Priorities(self.order, self.config.pin_limit_pages, now_ms)
        if self.host is not None:
            self.host.begin_priorities(now_ms)

    def _mark(self, seq: Sequence, depth: int) -> None:
        """The sequence says the priorities of what it lets go of: path beyond ``depth``, source of copy_rows."""
        tree, source = self.tree, seq.source_node
        below_source = 0 if source is None else sum(node.page_count for node in tree.path(source))
        for one in seq.retain:
            mark, first = self._mark_of(one), -(-one.start // self.page_size)
            last = math.inf if one.end is None else -(-one.end // self.page_size)
            for node in self._stretch(seq.node, seq.depth, max(first, depth), last):
                node.mark = mark
            if source is not None:
                there = self._stretch(source, below_source, first, last)
                own = set(tree.path(seq.node))
                for node in there:
                    if node not in own:
                        node.mark = mark

    def _stretch(self, end: Node, depth: int, first: int, last: float) -> list[Node]:
        """Pages ``first`` to ``last`` (not with it) of the path of ``depth`` to ``end``, if they exist."""
        last = int(min(last, depth))
        return self.tree.stretch(end, depth - last, last - first) if first < last else []

    def _mark_of(self, one: Retain) -> Mark:
        if one.priority == DEFAULT:
            return ()
        return (one.priority, NEVER if one.for_s is None else round((self.now + one.for_s) * 1000))

    def next_end(self) -> float | None:
        """When the next priority is over (monotonic seconds)."""
        ends = [
            None if self.priorities is None else self.priorities.next_end_ms(),
            None if self.host is None else self.host.next_end_ms(),
        ]
        return min((end / 1000 for end in ends if end is not None), default=None)

    def expire(self, now: float, budget: int) -> None:
        """Priorities whose time is over are."""
        assert self.priorities is not None
        self.priorities.expire(round(now * 1000), budget)
        if self.host is not None:
            self.host.expire(round(now * 1000), budget)

    # -- the source of copy_rows --------------------------------------------------------------------------------

    def _stamp_for_copies(self, end: Node) -> None:
        """What a copy holds does not fall idle when it is let go of; its place is that of now all the same, and stays
        so when what is behind it leaves."""
        host = self.host
        if host is not None and host.copies:
            ends = b"".join([node.pages[LAST_ID] if node.pages else host.end(node) for node in self.tree.path(end)])
            self.writes.append(Stamp(self.name, ends, self.stamp))

    def release_source(self, seq: Sequence) -> None:
        """The rows have been copied, or never will be."""
        if seq.source >= 0:
            self.let_go(seq, min(seq.depth, seq.published))
            if self.flights is not None:
                self.flights.note(seq)

    def _let_go_of_source(self, seq: Sequence, quarantine: list[int] | None) -> None:
        """Under a new stamp. Where the path reaches over the source, that is let go of next, under the same one."""
        self.stamp += 1
        source = seq.source
        if seq.counts_source:
            sharers = self.copying.get(source)
            if sharers is not None:
                sharers.remove(seq)
                if not sharers:
                    del self.copying[source]
            self.drop(array("i", (source,)), self.pages.states[source], quarantine)
        elif seq.source_node is not None:
            self._stamp_for_copies(seq.source_node)
            idle, root = self.tree.unpin(seq.source_node, self.stamp)
            self.fallen_idle(idle, root.retired)
            seq.source_node = None
        seq.source = -1

    def _path_to_source(self, seq: Sequence) -> list[Node]:
        """The nodes that the sequence holds by its second pin alone, leaf to root."""
        if seq.source_node is None:
            return []
        own = set(self.tree.path(seq.node))
        return [node for node in self.tree.path(seq.source_node) if node not in own]

    def counts_hold_of(self, seq: Sequence) -> bool:
        """Is a private page of this sequence, or one it copies from, held by count across sequences?"""
        return seq.counts_source or any(page in self.copying for page in seq.pages[seq.published :])

    # -- the life of a sequence ---------------------------------------------------------------------------------

    def opened(self, namespace: Namespace) -> None:
        """One sequence more, in any epoch of this namespace."""
        self.sequences += 1
        namespace.users += 1

    def publish_in_slices(self, seq: Sequence, full_pages: int) -> None:
        """A slice now, what is left with the coming ticks, or before anything else happens to the sequence."""
        if full_pages - seq.published <= SLICE_PAGES:
            self.publish(seq, full_pages)
        else:
            self.publish(seq, seq.published + SLICE_PAGES)
            self.publishing[seq] = full_pages

    def publish_some(self) -> None:
        """A slice of one commit that was too large."""
        if self.publishing:
            seq, full_pages = self.publishing.popitem()
            self.publish_in_slices(seq, full_pages)

    def settle(self, seq: Sequence) -> None:
        """Nothing of the sequence is left to publish: what its commit said is so."""
        full_pages = self.publishing.pop(seq, None)
        if full_pages is not None:
            self.publish(seq, full_pages)

    def publish(self, seq: Sequence, full_pages: int) -> None:
        """The first ``full_pages`` pages of the table are complete: into the tree, or shadows of what is there."""
        if seq.root.retired:
            self.release_source(seq)
        first = seq.published
        size = self.tree.page_token_bytes
        tokens = bytes(seq.tokens[first * size : full_pages * size])
        shadows = full_pages - first if seq.root.retired else self._already_there(seq, tokens)
        new = full_pages - first - shadows
        if shadows:
            pages = seq.pages[first : first + shadows]
            self.pages.move(pages, PRIVATE, SHADE)
            seq.shadows = seq.shadows.union(pages)
            for page in pages if self.copying else ():
                self.copying.pop(page, None)  # its further holders are counted like those of any shadow
            self.counters["shadow_pages"] += shadows
            before = seq.pages[first - 1] if first else NO_PAGE
            self.writes.append(Publish(self.name, pages.tobytes(), True, tokens[: shadows * size], before))
            tokens = tokens[shadows * size :]
        if new:
            pages = seq.pages[first + shadows : full_pages]
            packed = pages.tobytes()
            self.pages.move(pages, PRIVATE, PUBLISH)
            risen = self._raise(seq, tokens, packed) if self.host is not None else 0
            if risen:
                packed, tokens = packed[risen * PAGE_ID_BYTES :], tokens[risen * size :]
            if packed:
                (before,) = PAGE_ID.unpack_from(seq.node.pages, -PAGE_ID_BYTES) if seq.depth + risen else (NO_PAGE,)
                seq.node = self.tree.grow(seq.node, tokens, packed)
                self.writes.append(Publish(self.name, packed, False, tokens, before))
            if self.host is not None and self.config.host_write == "through":
                self.host.fresh[seq.node] = None
            seq.depth = full_pages
            self.counters["committed_pages"] += new
            self.gained = True  # who waits may need fewer pages now
            if self.copying:
                self._sources_published(pages, seq.node)
        seq.published = full_pages
        if self.flights is not None:
            self.flights.note(seq)

    def _already_there(self, seq: Sequence, tokens: bytes) -> int:
        """How many of the pages with these tokens, behind the published ones, the tree has; the path grows over them.

        A path one page longer than the published pages ends with the source of copy_rows; if that is the same page, as
        after the last token of a fully cached prompt, it stays pinned and nothing is split.
        """
        size = self.tree.page_token_bytes
        there = 0
        if seq.depth > seq.published:
            seq.source = -1
            if seq.node.tokens.endswith(tokens[:size]):
                there = 1
            else:
                self.let_go(seq, seq.published)
        children = seq.node.children
        if not children or tokens[there * size : (there + 1) * size] not in children:
            return there
        match = self.tree.match(seq.node, tokens, there * size)
        if match.pages:
            seq.node = self.pin(match, above=seq.node)
            seq.depth += match.pages
        return there + match.pages

    def _raise(self, seq: Sequence, tokens: bytes, packed: bytes) -> int:
        """What the host tier has of these tokens is on the device again, in these pages. Returns how many it had."""
        host = self.host
        assert host is not None
        below = self.tree.match_host(Match(seq.node, 0, None, 0, []), tokens)
        if not below.pages:
            return 0
        above = seq.node
        seq.node, woken = self.tree.pin(below, above=above)
        self.woken(woken)
        end = below.pages * PAGE_ID_BYTES
        self.writes.append(Copied(self.name, host.places(b"".join(below.parts)), packed[:end]))
        for node in self.tree.path(seq.node, above=above):
            begin = end - node.page_count * PAGE_ID_BYTES
            host.surface(node, packed[begin:end])
            end = begin
        return below.pages

    def _sources_published(self, pages: array[int], node: Node) -> None:
        """Others still copy rows from pages that have just entered the tree: from now on they hold them there."""
        for place, page in enumerate(pages):
            for sharer in self.copying.pop(page, ()):
                sharer.source_node = self.tree.node_at(node, len(pages) - 1 - place)
                self.tree.hold(sharer.source_node)
                self.pages.drop(page)

    def close(self, seq: Sequence, quarantine: list[int] | None = None) -> None:
        """The sequence is over. Cached pages stay cached; its own go back, or into quarantine."""
        self._leave(seq, quarantine)
        if len(seq.pages) > seq.published:
            self.drop(seq.pages[seq.published :], PRIVATE, quarantine)
        if seq.shadows:
            self.drop(array("i", seq.shadows), SHADOW, quarantine)

    def close_all(self, sequences: Iterable[Sequence], quarantine: list[int] | None) -> None:
        """The same for many: their own pages go back together, which costs little more than those of one."""
        private, shadows = array("i"), array("i")
        for seq in sequences:
            self._leave(seq, quarantine)
            private += seq.pages[seq.published :]
            shadows.extend(seq.shadows)
        self.drop(private, PRIVATE, quarantine)
        self.drop(shadows, SHADOW, quarantine)

    def _leave(self, seq: Sequence, quarantine: list[int] | None) -> None:
        """All that the sequence holds is let go of, but its own pages."""
        if self.publishing:
            self.settle(seq)
        if seq.load is not None:
            del seq.load.readers[seq]
            seq.load = None
            self.arriving.news = True
        self.let_go(seq, 0, quarantine)
        if self.flights is not None:
            self.flights.over(seq)
        self.sequences -= 1
        namespace = self.namespaces.of(seq.root)
        namespace.users -= 1
        if not namespace.users:
            self.namespaces.note(namespace)

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
