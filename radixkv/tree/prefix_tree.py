"""The token-hash radix tree: compressed edges of full pages, holders counted per node.

Pages ``a b c d``, a letter a page. Before and after (``*`` marks a holder's end of path)::

    insert abcd          root ── abcd*

    reserve abx          root ── ab*  ── cd        split at the pin point: the tail keeps its object, its place in
                                                  the order of eviction and its holders; the head is new and pinned
    commit abx           root ── ab   ┬─ cd
                                      └─ x*

    commit abxy          root ── ab   ┬─ cd        in place: the leaf has one holder, and that is who appends
                                      └─ xy*      (a new node if the policy of eviction has marked x already)

    free, evict 3        root ── ab                leaf first, oldest release first, tail pages first

    merge                root ── ab ── xy          an only child with the same stamp and mark melts into its parent
                         root ── abxy              when both have just been let go together

Who holds what: ``pin`` and ``unpin`` walk from a node to its root. A node without holders has no held descendants,
so all its pages can be evicted. ``idle_pages`` counts them. The tree knows nothing of eviction order: it returns the
nodes that fell idle (leaf to root) or woke up, and the caller keeps the order.

Exact page-granular LRU rests on four rules, see ``evictor/lru.py``.
"""

from __future__ import annotations

from radixkv.errors import BrokenInvariant
from radixkv.tree.node import Node, Root
from radixkv.tree.walk import Match, walk, walk_host
from radixkv.types import PAGE_ID_BYTES, TOKEN_BYTES

MERGE_FANOUT = 16
"""A node with more children is not merged into its parent: all of them would have to be told."""


class PrefixTree:
    """All namespaces' trees of one pool, with their common counts."""

    def __init__(self, page_size: int) -> None:
        self.page_token_bytes = page_size * TOKEN_BYTES
        self.nodes = 0
        self.cached_pages = 0
        self.idle_pages = 0
        self.splits = 0
        self.merges = 0

    # -- reading ------------------------------------------------------------------------------------------------

    def match(self, start: Node, tokens: bytes, offset: int = 0, end: int | None = None) -> Match:
        """How far ``tokens[offset:end]`` (bytes) agrees with what hangs below ``start`` and is on the device."""
        return walk(start, tokens, offset, len(tokens) if end is None else end, self.page_token_bytes)

    def match_host(self, above: Match, tokens: bytes, offset: int = 0) -> Match:
        """How far what follows ``above``, the match of ``tokens[offset:]``, is in the host tier alone."""
        at = offset + above.pages * self.page_token_bytes
        if above.inside is not None:
            return Match(above.node, 0, None, 0, [])
        return walk_host(above.node, tokens, at, self.page_token_bytes)

    def idle_on_path(self, match: Match) -> int:
        """Pages of a matched path that nobody holds now: pinning it takes them from what can be evicted."""
        node, idle = match.node, 0
        if match.inside is not None and match.inside.holders == 0:
            idle = match.inside_pages
        while node.holders == 0 and node.parent is not None:
            idle += node.page_count
            node = node.parent
        return idle

    def sole_pages(self, node: Node, pages: int) -> int:
        """How many of the deepest ``pages`` pages of a held path have one holder only: lifting would free them."""
        sole = 0
        while pages > 0:
            here = min(pages, node.page_count)
            if node.holders == 1:
                sole += here
            pages -= here
            node = _above(node)
        return sole

    def path(self, node: Node, above: Node | None = None) -> list[Node]:
        """The nodes of the path that ends in ``node`` and begins below ``above`` (or a root), leaf to root."""
        nodes = []
        while node is not above and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes

    def path_pages(self, node: Node) -> bytes:
        """Packed page ids of the path from the root to the end of ``node``."""
        parts = []
        while node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        return b"".join(reversed(parts))

    # -- holding ------------------------------------------------------------------------------------------------

    def pin(self, match: Match, above: Node | None = None) -> tuple[Node, list[Node]]:
        """Hold the matched path, from below ``above`` (held already) or from the root.

        Returns its last node (split off where needed) and the nodes that were idle.
        """
        node = match.node
        if match.inside is not None:
            node = self._split(match.inside, match.inside_pages)
            if node.holders == 0:
                self.idle_pages -= len(node.pages) // PAGE_ID_BYTES
                node.holders = 1
                return node, self.hold(_above(node), above=above)
        return node, self.hold(node, above=above)

    def hold(self, node: Node, times: int = 1, above: Node | None = None) -> list[Node]:
        """Count ``times`` more holders on the path that ends in ``node`` and begins below ``above`` (or a root).

        Returns the nodes that were idle.
        """
        woken = []
        packed = 0
        while node is not above and (parent := node.parent) is not None:
            if not node.holders:
                packed += len(node.pages)
                woken.append(node)
            node.holders += times
            node = parent
        self.idle_pages -= packed // PAGE_ID_BYTES
        return woken

    def unpin(self, node: Node, stamp: int) -> tuple[list[Node], Root]:
        """Let go of the path that ends in ``node``. Returns what fell idle, leaf to root, and the root."""
        idle: list[Node] = []
        packed = 0
        only_children = False
        while (parent := node.parent) is not None:
            node.holders = holders = node.holders - 1
            node.stamp = stamp
            if holders <= 0:
                if holders:
                    raise BrokenInvariant("I3", "a path was let go more often than it was held")
                packed += len(node.pages)
                if idle and len(node.children) == 1:  # type: ignore[arg-type]  # the node below is a child
                    only_children = True
                idle.append(node)
            node = parent
        self.idle_pages += packed // PAGE_ID_BYTES
        if only_children:
            idle = self._merge(idle)
        assert type(node) is Root
        return idle, node

    def lift(self, node: Node, back: int, stamp: int) -> tuple[Node, list[Node]]:
        """Shorten a held path by its last ``back`` pages. Returns the new last node and what fell idle."""
        idle = []
        while back > 0:
            pages = node.page_count
            upper = self._split(node, pages - back) if back < pages else _above(node)
            back -= min(back, pages)
            node.holders -= 1
            node.stamp = stamp
            if node.holders == 0:
                self.idle_pages += node.page_count
                idle.append(node)
            node = upper
        return node, idle

    def release(self, node: Node) -> list[Node]:
        """A copy lets go of the path that ends in ``node``: that is no use, stamps stay. Returns what fell idle."""
        idle = []
        while node.parent is not None:
            node.holders -= 1
            if node.holders == 0:
                self.idle_pages += len(node.pages) // PAGE_ID_BYTES
                idle.append(node)
            node = node.parent
        return idle

    def node_at(self, node: Node, back: int) -> Node:
        """The node that ends ``back`` pages before the end of a held path, split off where needed."""
        while back > 0:
            pages = node.page_count
            if back < pages:
                return self._split(node, pages - back)
            back -= pages
            node = _above(node)
        return node

    def stretch(self, node: Node, back: int, pages: int) -> list[Node]:
        """The nodes that are just ``pages`` pages of a held path, up to ``back`` pages before its end: leaf to root."""
        end = self.node_at(node, back)
        return self.path(end, above=self.node_at(end, pages))

    # -- growing and shrinking ----------------------------------------------------------------------------------

    def grow(self, node: Node, tokens: bytes, pages: bytes) -> Node:
        """Add pages at the end of a held path that no child continues in the same way.

        The holder of the path (exactly one of those who hold ``node``) holds the new pages too. Returns the last node.
        """
        self.cached_pages += len(pages) // PAGE_ID_BYTES
        if node.holders == 1 and not (node.children or node.mark or node.host) and node.parent is not None:
            node.append(tokens, pages)
            return node
        child = Node(node, tokens, pages)
        child.holders = 1
        self._hang(node, child)
        self.nodes += 1
        return child

    def restore(self, parent: Node, tokens: bytes, pages: bytes, host: bytes) -> Node | None:
        """Add pages that nobody holds, found after a restart, with their ids on the device and in the host tier.

        None if another child begins with the same page.
        """
        if parent.children is not None and tokens[: self.page_token_bytes] in parent.children:
            return None
        child = Node(parent, tokens, pages)
        child.host = host
        self._hang(parent, child)
        self.nodes += 1
        self.cached_pages += len(child.pages) // PAGE_ID_BYTES
        self.idle_pages += len(child.pages) // PAGE_ID_BYTES
        return child

    def trim(self, leaf: Node, pages: int) -> bytes:
        """Take up to ``pages`` pages from the tail of an idle leaf; an empty leaf leaves the tree.

        Returns their packed ids on the device. What the host tier has of them is the caller's to give back.
        """
        if leaf.holders or leaf.children:
            raise BrokenInvariant("I7", "only a leaf that nobody holds can be evicted")
        packed = leaf.pages
        have = leaf.page_count
        taken = min(have, pages)
        if packed:
            self.cached_pages -= taken
            self.idle_pages -= taken
        if taken < have:
            return leaf.cut_tail(taken, self.page_token_bytes)
        parent = leaf.parent
        assert parent is not None and parent.children is not None
        siblings = parent.children
        del siblings[bytes(leaf.tokens[: self.page_token_bytes])]
        if not siblings:
            parent.children = None
        leaf.parent = None
        self.nodes -= 1
        return bytes(packed)

    # -- two tiers ----------------------------------------------------------------------------------------------

    def cut(self, node: Node, keep: int) -> Node:
        """Cut an idle run after its first ``keep`` pages; it stays this object. Returns the new tail."""
        tokens, ids = keep * self.page_token_bytes, keep * PAGE_ID_BYTES
        tail = Node(node, bytes(node.tokens[tokens:]), bytes(node.pages[ids:]))
        tail.host = bytes(node.host[ids:])
        tail.stamp, tail.mark = node.stamp, node.mark
        tail.children = node.children
        for child in (tail.children or {}).values():
            child.parent = tail
        node.children = None
        node.cut_tail(tail.page_count, self.page_token_bytes)
        self._hang(node, tail)
        self.nodes += 1
        return tail

    def sink(self, leaf: Node, pages: int) -> tuple[bytes, Node, Node | None]:
        """The last ``pages`` pages of an idle run with host copies leave the device and stay in the host tier.

        Below it there is nothing on the device. Returns their packed ids on the device, the run that they are now, and
        the one that has melted into it: what followed them alone and was let go with them.
        """
        if leaf.holders or not leaf.host:
            raise BrokenInvariant("I7", "only what nobody holds and the host tier has can leave the device")
        sunk = leaf if pages >= leaf.page_count else self.cut(leaf, leaf.page_count - pages)
        packed = bytes(sunk.pages)
        sunk.pages = b""
        self.cached_pages -= len(packed) // PAGE_ID_BYTES
        self.idle_pages -= len(packed) // PAGE_ID_BYTES
        return packed, sunk, self._absorb(sunk)

    def _absorb(self, node: Node) -> Node | None:
        below = next(iter(node.children.values())) if node.children and len(node.children) == 1 else None
        if below is None or below.holders or len(below.children or ()) > MERGE_FANOUT:
            return None
        if below.stamp != node.stamp or below.mark != node.mark:
            return None
        node.append(below.tokens, b"")
        node.host = bytes(node.host + below.host)
        self._adopt(node, below)
        below.parent = below.children = None
        self.nodes -= 1
        return below

    def surface(self, node: Node, pages: bytes) -> None:
        """A held run of the host tier is on the device as well, in these pages."""
        node.pages = pages if isinstance(node.tokens, bytes) else bytearray(pages)  # they grow and shrink together
        self.cached_pages += node.page_count

    # -- the shape ----------------------------------------------------------------------------------------------

    def _adopt(self, node: Node, below: Node) -> None:
        """``node`` gets the children of ``below``, which has melted into it."""
        node.children = below.children
        for child in (node.children or {}).values():
            child.parent = node

    def _hang(self, parent: Node, child: Node) -> None:
        key = bytes(child.tokens[: self.page_token_bytes])  # of a one-page node this is the very same object
        if parent.children is None:
            parent.children = {}
        parent.children[key] = child

    def _split(self, node: Node, pages: int) -> Node:
        """Cut ``node`` after its first ``pages`` pages. The tail stays this object; returns the new head."""
        tokens, ids = pages * self.page_token_bytes, pages * PAGE_ID_BYTES
        parent = _above(node)
        head = Node(parent, bytes(node.tokens[:tokens]), bytes(node.pages[:ids]))
        head.holders = node.holders
        head.stamp = node.stamp
        head.mark = node.mark
        if node.host:
            head.host, node.host = bytes(node.host[:ids]), bytes(node.host[ids:])
        self._hang(parent, head)
        node.tokens = bytes(node.tokens[tokens:])
        node.pages = bytes(node.pages[ids:])
        node.parent = head
        self._hang(head, node)
        self.nodes += 1
        self.splits += 1
        return head

    def _merge(self, idle: list[Node]) -> list[Node]:
        """Melt only children into their parents within a chain, leaf to root, that fell idle under one stamp."""
        kept = []
        run = [idle[0]]
        for parent in idle[1:]:
            siblings, below = parent.children, run[0].children
            alone = siblings is not None and len(siblings) == 1 and bool(parent.host) == bool(run[0].host)
            if not alone or parent.mark != run[0].mark or (below and len(below) > MERGE_FANOUT):
                kept.append(self._melt(run))
                run = []
            run.append(parent)
        kept.append(self._melt(run))
        return kept

    def _melt(self, run: list[Node]) -> Node:
        """Make one node of a chain, leaf to root: the top one. Copies each page once, however many nodes there are."""
        top, lower = run[-1], run[-2::-1]
        if not lower:
            return top
        top.append(b"".join([node.tokens for node in lower]), b"".join([node.pages for node in lower]))
        if top.host:
            top.host = b"".join([top.host, *(node.host for node in lower)])
        self._adopt(top, run[0])
        for node in lower:
            node.parent = None
            node.children = None
        self.nodes -= len(lower)
        self.merges += len(lower)
        return top


def _above(node: Node) -> Node:
    if node.parent is None:
        raise BrokenInvariant("I9", "a path is shorter than its holder believes")
    return node.parent
