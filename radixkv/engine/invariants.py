"""What must always be true, checked by counting again from the ground. Numbers as in ARCHITECTURE.md.

Nothing here trusts a counter: holders are counted from the sequences' paths, states from the page tables and the
trees, idle pages from the holders. Runs after every step in tests and fuzz and with ``--paranoid``, every few
seconds in the daemon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from radixkv.allocator.page_states import State
from radixkv.engine.engine import Engine
from radixkv.engine.flights import would_be_waited_for
from radixkv.engine.host import HostTier
from radixkv.engine.pool import Pool, namespace_of
from radixkv.engine.sequence import Sequence
from radixkv.errors import BrokenInvariant
from radixkv.sessions.window import SPAN
from radixkv.tree.node import Node, Root
from radixkv.types import PAGE_ID_BYTES


def check(engine: Engine) -> None:
    """Raises BrokenInvariant with the first one that does not hold."""
    sequences = engine.live_sequences()
    for pool in engine.pools.values():
        own = [seq for seq in sequences if seq.pool == pool.name]
        trees = _Trees(pool, own)
        _conservation(engine, pool, own, trees)
        _holders(pool, own, trees)
        _tree_shape(pool, trees)
        _contents(pool, trees)
        _shares(pool, own, trees)
        _eviction_order(pool, trees)
        _tables(pool, own)
        _charges(engine, pool)
        _waiting(engine, pool)
        _flights(engine, pool, own)
        _metrics(pool, own, trees)
        if pool.host is not None:
            _host(pool.host, trees)
    _sessions(engine, sequences)
    queued = sum(len(pool.all_waiting()) for pool in engine.pools.values())
    need(engine.queued == queued, "I24", f"{engine.queued} requests wait, counted {queued}")


def need(true: bool, name: str, message: str) -> None:
    if not true:
        raise BrokenInvariant(name, message)


class _Trees:
    """All nodes of a pool, walked from the roots: current ones, and retired ones that something still refers to."""

    def __init__(self, pool: Pool, sequences: list[Sequence]) -> None:
        roots: dict[int, Root] = {id(space.root): space.root for space in pool.namespaces.all()}
        for seq in sequences:
            roots.setdefault(id(seq.root), seq.root)
        held = [end for copying in (pool.host.copies.values() if pool.host else ()) for end in copying.ends]
        for node in [*held, *(node for node, _ in pool.retired)]:
            top = _top(node)
            if isinstance(top, Root):
                roots.setdefault(id(top), top)
        self.roots = list(roots.values())
        self.nodes: list[Node] = []
        stack: list[Node] = [*self.roots]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                self.nodes.append(node)
            for child in (node.children or {}).values():
                need(child.parent is node, "I9", "a child does not know its parent")
                stack.append(child)
            most = pool.pages.size + (pool.host.pages.size if pool.host else 0)
            need(len(self.nodes) <= most, "I9", "the tree has more nodes than there are pages")


def _top(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


def _ids(packed: bytes | bytearray) -> Iterator[int]:
    for at in range(0, len(packed), PAGE_ID_BYTES):
        yield int.from_bytes(packed[at : at + PAGE_ID_BYTES], "little")


def _conservation(engine: Engine, pool: Pool, sequences: list[Sequence], trees: _Trees) -> None:
    """I1: each page is in one state, in the place that belongs to it, once; the counts add up. I3: none twice."""
    pages = pool.pages
    need(sum(pages.counts) == pages.size, "I1", f"the states' counts {pages.counts} do not add up to {pages.size}")
    tally = Counter(pages.states)
    for state in State:
        need(
            pages.counts[state] == tally[state], "I1", f"{pages.counts[state]} {state.name} counted, {tally[state]} are"
        )
    free = pages.free.ids()
    need(len(free) == len(set(free)), "I3", "a page is twice in the free list")
    saving, loading = _copied_pages(pool)
    cached = [page for node in trees.nodes for page in _ids(node.pages)]
    need(saving <= set(cached), "I11", f"pages {sorted(saving - set(cached))[:4]} left the tree while they were copied")
    places: dict[State, list[int]] = {
        State.FREE: free,
        State.CACHED: [page for page in cached if page not in saving],
        State.SAVING: sorted(saving),
        State.LOADING: sorted(loading),
        State.QUARANTINED: _quarantined(engine, pool),
        State.PRIVATE: sorted({page for seq in sequences for page in _private(pool, seq)}),
        State.SHADOW: sorted({page for seq in sequences for page in _shadows(pool, seq)}),
    }
    for state, found in places.items():
        need(len(found) == len(set(found)), "I1", f"a {state.name} page is in two places")
        need(len(found) == tally[state], "I1", f"{tally[state]} pages are {state.name}, {len(found)} have their place")
        wrong = [page for page in found if pages.states[page] != state]
        need(not wrong, "I1", f"pages {wrong[:4]} are not {state.name}, but kept as such")


def _copied_pages(pool: Pool) -> tuple[set[int], set[int]]:
    """Device pages that are being read, and being filled, by copies."""
    copies = pool.host.copies.values() if pool.host else ()
    saving = {page for copying in copies if copying.to_host for run in copying.runs for page in run.device}
    return saving, {page for copying in copies if not copying.to_host for run in copying.runs for page in run.device}


def _quarantined(engine: Engine, pool: Pool) -> list[int]:
    """Pages of ended sessions, and pages that wait for claims after a restart."""
    found = [page for held in engine.quarantine.values() for page in held.get(pool.name, [])]
    if pool.lineage is not None:
        found += [page for waiting in pool.lineage.unclaimed.values() for page in waiting]
    return found


def _private(pool: Pool, seq: Sequence) -> list[int]:
    own = seq.pages[seq.published :].tolist()
    if seq.counts_source and pool.pages.states[seq.source] == State.PRIVATE:
        own.append(seq.source)
    return own


def _shadows(pool: Pool, seq: Sequence) -> list[int]:
    own = list(seq.shadows)
    if seq.counts_source and pool.pages.states[seq.source] == State.SHADOW:
        own.append(seq.source)
    return own


def _holders(pool: Pool, sequences: list[Sequence], trees: _Trees) -> None:
    """I2: holders of a node are the sequences whose pinned path has it; of other pages, the tables that have them."""
    held: Counter[int] = Counter()
    for seq in sequences:
        need(_path_pages(seq.node) == seq.depth, "I2", f"sequence {seq.id} pins another path than it believes")
        for end in (seq.node, seq.source_node):
            node = end
            while node is not None and node.parent is not None:
                held[id(node)] += 1
                node = node.parent
            need(node is None or node is seq.root, "I2", f"sequence {seq.id} pins a path of another namespace")
    live = set(map(id, sequences))
    for one in pool.host.copies.values() if pool.host else ():
        for end in one.ends:
            held.update(map(id, pool.tree.path(end)))
        told = {id(seq) for seq in one.readers if seq.load is one}
        need(live >= told and len(told) == len(one.readers), "I11", "a copy has readers that are over")
    for node in trees.nodes:
        need(node.holders == held[id(node)], "I2", f"a node counts {node.holders} holders, {held[id(node)]} hold it")
    outside: Counter[int] = Counter()
    for seq in sequences:
        outside.update(_private(pool, seq))
        outside.update(_shadows(pool, seq))
    extra = {page: count - 1 for page, count in outside.items() if count > 1}
    need(extra == pool.pages.extra_holders, "I2", f"extra holders {pool.pages.extra_holders}, counted {extra}")
    copying = {(page, id(seq)) for page, sharers in pool.copying.items() for seq in sharers}
    expected = {
        (seq.source, id(seq)) for seq in sequences
        if seq.counts_source and pool.pages.states[seq.source] == State.PRIVATE
    }  # fmt: skip
    copying = {(page, who) for page, who in copying if pool.pages.states[page] == State.PRIVATE}
    need(copying == expected, "I2", "who copies from a private page is not known")


def _path_pages(node: Node) -> int:
    pages = 0
    while node.parent is not None:
        pages += node.page_count
        node = node.parent
    return pages


def _tree_shape(pool: Pool, trees: _Trees) -> None:
    """I9: keys, sizes and parents agree. I7: an idle node has no held child."""
    size = pool.tree.page_token_bytes
    for node in trees.nodes:
        pages = max(len(node.pages), len(node.host)) // PAGE_ID_BYTES
        need(pages > 0, "I9", "a node without pages")
        other = min(len(node.pages), len(node.host)) // PAGE_ID_BYTES
        need(other in (0, pages), "I9", "a node is partly in one tier and partly in both")
        need(len(node.tokens) == pages * size, "I9", "a node's tokens and pages differ in number")
        parent = node.parent
        assert parent is not None and parent.children is not None
        need(bool(node.host) <= (pool.host is not None), "I9", "a node is in a host tier that does not exist")
        on_device = bool(parent.pages) or parent.parent is None or not node.pages
        need(on_device, "I7", "a node is on the device and what comes before it is not")
        need(parent.children.get(bytes(node.tokens[:size])) is node, "I9", "a child is filed under another key")
        need(
            parent.parent is None or parent.holders >= node.holders, "I7", "a node is held more often than its ancestor"
        )
        need(node.children is None or len(node.children) > 0, "I9", "an empty dict of children")
    for root in trees.roots:
        need(root.holders == 0 and not root.tokens, "I9", "a root is no node")


def _contents(pool: Pool, trees: _Trees) -> None:
    """I5: what is in the tree has been committed (CACHED)."""
    for node in trees.nodes:
        uncommitted = [page for page in _ids(node.pages) if pool.pages.states[page] not in (State.CACHED, State.SAVING)]
        need(not uncommitted, "I5", f"pages {uncommitted[:4]} are visible without being complete")


def _eviction_order(pool: Pool, trees: _Trees) -> None:
    """I7: exactly the idle nodes are in the order, and the policy's own recount agrees."""
    known = {id(node) for node in pool.order}
    idle = {id(node) for node in trees.nodes if node.holders == 0 and node.pages}
    need(known == idle, "I7", f"{len(idle)} nodes are idle, {len(known)} are in the order of eviction")
    pool.order.check()
    need(max((node.stamp for node in pool.order), default=0) <= pool.stamp, "I27", "a stamp from the future")


def _tables(pool: Pool, sequences: list[Sequence]) -> None:
    """I12 sizes, I13 nobody writes what others read, I8, I5 committed only in what is there."""
    writers: Counter[int] = Counter()
    for seq in sequences:
        size = pool.page_size
        need(len(seq.pages) * size >= seq.length, "I12", f"sequence {seq.id}: {seq.length} tokens do not fit its table")
        need(seq.committed <= seq.length, "I5", f"sequence {seq.id}: more committed than known")
        published = pool.publishing.get(seq, seq.published)
        need(seq.committed // size <= published, "I5", f"sequence {seq.id}: a committed page is not published")
        need(seq.published * size <= seq.length, "I5", f"sequence {seq.id}: published beyond its length")
        need(seq.cached <= seq.committed, "I8", f"sequence {seq.id}: counts tokens as cached that are not complete")
        need(seq.depth <= seq.published + (seq.source >= 0), "I2", f"sequence {seq.id}: pins more than it has")
        need(len(set(seq.pages)) == len(seq.pages), "I3", f"sequence {seq.id}: a page is twice in its table")
        need(0 <= seq.shared <= len(seq.pages), "I2", f"sequence {seq.id}: shares more than it has")
        states = [pool.pages.states[page] for page in seq.pages]
        _loading(pool, seq, states)
        immutable = {state for at, state in enumerate(states[: seq.published]) if at not in seq.loading}
        need(
            immutable <= {State.CACHED, State.SHADOW, State.SAVING}, "I13", f"sequence {seq.id}: shares what is written"
        )
        need(set(states[seq.published :]) <= {State.PRIVATE}, "I13", f"sequence {seq.id}: would write what is shared")
        shadows = {page for page in seq.pages[: seq.published] if pool.pages.states[page] == State.SHADOW}
        need(shadows == seq.shadows, "I2", f"sequence {seq.id}: does not know its shadows")
        writers.update(seq.pages[seq.published :])
    need(all(count == 1 for count in writers.values()), "I13", "a private page has two writers")
    for seq in sequences:
        _same_content(pool, seq)


def _loading(pool: Pool, seq: Sequence, states: list[int]) -> None:
    """I11: pages of a table that are being loaded are those that a copy fills which knows it, and nothing else is."""
    loading = [at for at, state in enumerate(states) if state == State.LOADING]
    need(loading == list(seq.loading), "I11", f"sequence {seq.id} loads entries {loading}, and knows {seq.loading}")
    copies = list(pool.host.copies.values()) if pool.host else []
    if seq.load is None:
        need(not seq.loading, "I11", f"sequence {seq.id}: no copy fills its pages")
        return
    known = any(copying is seq.load for copying in copies) and seq in seq.load.readers
    need(known, "I11", f"sequence {seq.id}: the copy that fills its pages is over, or will not tell it of its end")
    filled = set(seq.load.runs[0].device)
    need(filled.issuperset(seq.pages[at] for at in loading), "I11", f"sequence {seq.id}: another copy fills its pages")


def _same_content(pool: Pool, seq: Sequence) -> None:
    """I4, I6: the pinned path says the same tokens as the sequence, and its cached pages are the path's."""
    size = pool.tree.page_token_bytes
    at, node = seq.depth, seq.node
    while node.parent is not None:
        pages = node.page_count
        at -= pages
        need(
            bool(node.pages) or at in seq.loading,
            "I7",
            f"sequence {seq.id} pins what is not on the device and not loading",
        )
        here = bytes(seq.tokens[at * size : (at + pages) * size])
        beyond_source = seq.source >= 0 and at + pages > seq.published
        need(here == node.tokens or beyond_source, "I6", f"sequence {seq.id} pins other tokens than its own")
        for offset, page in enumerate(_ids(node.pages)):
            place = at + offset
            cached = place < seq.published and seq.pages[place] not in seq.shadows and place not in seq.loading
            need(not cached or seq.pages[place] == page, "I4", f"sequence {seq.id}: page {place} is not the path's")
        node = node.parent
    need(at == 0, "I4", f"sequence {seq.id}: its path has another length")
    cached_pages = sum(1 for page in seq.pages[: seq.published] if page not in seq.shadows)
    need(cached_pages <= seq.depth, "I2", f"sequence {seq.id}: cached pages are not on its path")


def _charges(engine: Engine, pool: Pool) -> None:
    """I14, I24: what a session is charged is what its sequences have; floors count what is missing."""
    missing = 0
    for session in engine.sessions.all():
        own = sum(seq.charged for seq in session.sequences.values() if seq.pool == pool.name)
        charged = session.charged.get(pool.name, 0)
        need(charged == own, "I24", f"session {session.id} is charged {charged} pages and has {own}")
        missing += max(0, pool.config.session_floor_pages - own)
    need(pool.floors_missing == missing, "I24", f"floors lack {pool.floors_missing} pages, counted {missing}")


def _shares(pool: Pool, sequences: list[Sequence], trees: _Trees) -> None:
    """I24: each page counts for the namespace that has it."""
    shares = pool.shares
    if shares is None:
        return
    owners = {page: namespace_of(node) for node in trees.nodes for page in _ids(node.pages)}
    for seq in sequences:
        owners |= dict.fromkeys([*seq.pages, *([seq.source] if seq.source >= 0 else [])], seq.root.namespace)
    for page, space in owners.items():
        need(shares.owner(page) == space, "I24", f"page {page} counts for namespace {shares.owner(page)}, not {space}")
    for page in pool.pages.free.ids():
        need(shares.owner(page) < 0, "I24", f"page {page} is free and counts for namespace {shares.owner(page)}")


def _waiting(engine: Engine, pool: Pool) -> None:
    """I10: whoever waits is known, once, with an end; I19: bounded."""
    line = pool.all_waiting()
    need(len(line) <= engine.config.limits.queued, "I19", "more wait than may")
    known = {(session.id, request) for session in engine.sessions.all() for request, name in session.waiting.items()
             if name == pool.name}  # fmt: skip
    need(known == {(entry.session, entry.request) for entry in line}, "I10", "the line and the sessions disagree")
    for lined in pool.lines:
        earliest = min((entry.until for entry in lined.all()), default=None)
        need(lined.next_end() == earliest, "I10", "nobody would wake those who wait when their time is over")


def _flights(engine: Engine, pool: Pool, sequences: list[Sequence]) -> None:
    """I10: who waits for another's commits is woken by them, and of sessions none waits for itself through others."""
    flights = pool.flights
    keys = {(entry.session, entry.request) for entry in pool.joining.all()}
    if flights is None:
        need(not keys, "I10", "somebody waits for what others compute, which nobody knows")
        return
    starts = {seq: start for seq in sequences if (start := flights.start_of(seq)) is not None}
    need(flights.starts == starts, "I10", "it is not known who computes what")
    need(keys == flights.waits_for.keys(), "I10", "who waits for what is being computed would never be woken")
    need(all(seq in starts for seq in flights.waits_for.values()), "I10", "somebody waits for what nobody computes")
    all_flights = [other.flights for other in engine.pools.values() if other.flights is not None]
    for (session, _), seq in flights.waits_for.items():
        circle = would_be_waited_for(session, seq.session, all_flights)
        need(not circle, "I10", f"sessions {session} and {seq.session} wait for one another")


def _metrics(pool: Pool, sequences: list[Sequence], trees: _Trees) -> None:
    """I24: every counter equals the recount."""
    cached = sum(len(node.pages) // PAGE_ID_BYTES for node in trees.nodes)
    idle = sum(len(node.pages) // PAGE_ID_BYTES for node in trees.nodes if node.holders == 0)
    need(pool.tree.cached_pages == cached, "I24", f"{pool.tree.cached_pages} cached pages, counted {cached}")
    need(pool.tree.idle_pages == idle, "I24", f"{pool.tree.idle_pages} idle pages, counted {idle}")
    need(pool.tree.nodes == len(trees.nodes), "I24", f"{pool.tree.nodes} nodes, counted {len(trees.nodes)}")
    need(pool.sequences == len(sequences), "I24", f"{pool.sequences} sequences, counted {len(sequences)}")
    need(min(pool.counters.values(), default=0) >= 0, "I24", "a counter is negative")
    users: Counter[int] = Counter(seq.root.namespace for seq in sequences)
    users.update(root.namespace for root in trees.roots if root.retired and root.children)
    for space in pool.namespaces.all():
        need(
            space.users == users[space.id],
            "I24",
            f"namespace {space.id}: {space.users} users, {users[space.id]} counted",
        )


def _host(host: HostTier, trees: _Trees) -> None:
    """I1, I3, I11, I24 of the host tier: each of its pages is in one place, counters equal the recount."""
    tally = Counter(host.pages.states)
    for state in State:
        need(host.pages.counts[state] == tally[state], "I1", f"{host.pages.counts[state]} host pages {state.name}")
    copies = list(host.copies.values())
    free = host.pages.free.ids()
    filling = [page for copying in copies if copying.to_host for run in copying.runs for page in run.host]
    reading = {page for copying in copies if not copying.to_host for run in copying.runs for page in run.host}
    kept = [page for node in trees.nodes for page in _ids(node.host)]
    places = free + filling + kept
    size = host.pages.size
    need(len(places) == len(set(places)) == size, "I1", f"{len(places)} places, {size} host pages")
    need(reading <= set(kept), "I11", "host pages left the tree while they were being read")
    wanted = [(free, State.FREE), (filling, State.LOADING), (sorted(reading), State.SAVING)]
    wanted.append(([page for page in kept if page not in reading], State.CACHED))
    for pages, state in wanted:
        need(all(host.pages.states[page] == state for page in pages), "I1", f"a host page is not {state.name}")
    only = [node for node in trees.nodes if not node.pages]
    known = {id(node) for node in host.order}
    need(known == {id(node) for node in only if node.holders == 0}, "I7", "the host tier's order lacks a node")
    host.order.check()
    counted = sum(node.page_count for node in only)
    need(host.only_pages == counted, "I24", f"{host.only_pages} pages in the host tier alone, counted {counted}")
    need(host.saving_pages == len(filling), "I24", f"{host.saving_pages} pages to be filled, counted {len(filling)}")
    need(host.leaving_pages == len(reading), "I24", f"{host.leaving_pages} pages leave, counted {len(reading)}")
    excess = 0 if copies else counted - host.limit  # a copy may make room first for what follows it
    need(excess <= 0, "I24", f"{excess} pages too many are in the host tier alone")
    for node in trees.nodes:
        unknown = node.pages and node.host and node.holders == 0 and node not in host.clean
        need(not unknown, "I24", "nobody knows of a host copy that could be dropped")


def _sessions(engine: Engine, sequences: list[Sequence]) -> None:
    """I14: only live sessions hold anything; I18, I19: their memory of replies is bounded; I15: one owner each."""
    need(len(sequences) == len({id(seq) for seq in sequences}), "I15", "a sequence belongs to two holders")
    sessions = engine.sessions.all()
    for session in sessions:
        need(len(session.window) <= engine.config.server.keep_replies, "I19", "too many replies are kept")
        need(session.window.missing() < SPAN, "I18", "the window of request ids is wider than it may be")
        for identity, seq in session.sequences.items():
            need(seq.id == identity, "I15", f"sequence {seq.id} is filed under {identity}")
            need(seq.session == session.id, "I15", f"sequence {seq.id} believes in another session")
    for seq in engine.transit.sequences():
        need(seq.session == 0, "I15", f"sequence {seq.id} is in transit and still owned")
    slots = [session.slot for session in sessions]
    need(len(slots) == len(set(slots)), "I14", "two sessions share a slot")
