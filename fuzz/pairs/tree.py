"""``tree.PrefixTree`` with a policy of eviction beside a dict of token tuples: same matches, holders, exact victims."""

from __future__ import annotations

from collections import Counter

from fuzz.model.mismatch import expect, require
from fuzz.model.packing import pack_pages, pack_tokens, unpack_pages, unpack_tokens
from fuzz.model.tree import Path, TreeModel
from radixkv.engine.pool import scope_of
from radixkv.evictor import policies
from radixkv.evictor.policy import Policy
from radixkv.tree.node import Node, Root
from radixkv.tree.prefix_tree import PrefixTree


class Holder:
    """One holder of a path: the node in the real tree, the path in the model."""

    def __init__(self, node: Node, path: Path) -> None:
        self.node, self.path = node, path


class TreePair:
    def __init__(self, page_size: int, policy: str = "lru", pool_pages: int = 16) -> None:
        """``pool_pages``: what ``room`` and ``free`` go by, and policies that measure their queues by it."""
        self.page_size = page_size
        self.pool_pages = pool_pages
        self.policy = policy
        self.real = PrefixTree(page_size)
        self.order: Policy[Node] = policies.make(policy, pool_pages, scope_of)
        self.model = TreeModel(page_size, policy, pool_pages)
        self.roots: list[Root] = []
        self.model.seed_of = lambda root: scope_of(self.roots[root])
        self.holders: list[Holder] = []
        self.events: Counter[str] = Counter()
        self._next_page = 0

    # -- operations ---------------------------------------------------------------------------------------------

    def add_root(self) -> int:
        number = len(self.roots)
        self.roots.append(Root(number, number + 1))
        return number

    def look(self, root: int, tokens: list[int], lead: int = 0) -> None:
        """Match tokens, behind ``lead`` bytes of others in the same buffer, and count idle pages on the way."""
        packed = bytes(lead) + pack_tokens(tokens)
        match = self.real.match(self.roots[root], packed, lead)
        path = self.model.match(root, tuple(tokens))
        found = [self.model.pages[page] for page in self.model.upward(path)]
        expect("I6", "matched pages", unpack_pages(b"".join(match.parts)), found)
        expect("I6", "matched page count", match.pages, len(found))
        idle = sum(1 for page in self.model.upward(path) if self.model.holders(page) == 0)
        expect("I24", "idle pages on the path", self.real.idle_on_path(match), idle)

    def hold(self, root: int, tokens: list[int]) -> Holder:
        """Pin the longest cached prefix, as a reserve does."""
        match = self.real.match(self.roots[root], pack_tokens(tokens))
        node, woken = self.real.pin(match)
        self._wake(woken)
        holder = Holder(node, self.model.match(root, tuple(tokens)))
        self.model.held.append(holder.path)
        self.holders.append(holder)
        return holder

    def publish(self, holder: Holder, tokens: list[int]) -> None:
        """Lengthen a held path by full pages of tokens: over what is there already, then by new pages."""
        root, before = holder.path
        longer = (root, before + tuple(tokens))
        packed = pack_tokens(tokens)
        match = self.real.match(holder.node, packed)
        there = self.model.match(*longer)
        expect("I6", "pages there already", match.pages, (len(there[1]) - len(before)) // self.page_size)
        if match.pages:
            holder.node, woken = self.real.pin(match, above=holder.node)
            self._wake(woken)
        missing = [page for page in self.model.upward(longer) if page not in self.model.pages]
        if missing:
            fresh = list(range(self._next_page, self._next_page + len(missing)))
            self._next_page += len(missing)
            rest = packed[match.pages * self.page_size * 4 :]
            holder.node = self.real.grow(holder.node, rest, pack_pages(fresh))
            self.model.pages.update(zip(missing, fresh, strict=True))
        self.model.held.remove(holder.path)
        self.model.held.append(longer)
        holder.path = longer

    def release(self, holder: Holder) -> None:
        """Let go of everything."""
        self.holders.remove(holder)
        self._say(holder, 0)
        self.model.let_go(holder.path, None)
        if holder.path[1]:
            if self.order.counts_uses:
                self.order.used(self.real.path(holder.node))
            idle, root = self.real.unpin(holder.node, self.model.stamps)
            expect("I6", "root of a path", root is self.roots[holder.path[0]], True)
            self._idle(idle)

    def _say(self, holder: Holder, depth: int) -> None:
        """What a holder says of the pages beyond ``depth`` as it lets go of them."""

    def lift(self, holder: Holder, back: int) -> None:
        """Let go of the last ``back`` pages."""
        root, tokens = holder.path
        self._say(holder, len(tokens) // self.page_size - back)
        kept = (root, tokens[: len(tokens) - back * self.page_size])
        self.model.let_go(holder.path, kept)
        if self.order.counts_uses:
            self.order.used(self.real.path(holder.node, above=self.real.node_at(holder.node, back)))
        holder.node, idle = self.real.lift(holder.node, back, self.model.stamps)
        self._idle(idle)
        holder.path = kept

    def fork(self, holder: Holder, back: int, times: int) -> None:
        """``times`` more holders of the path without its last ``back`` pages."""
        root, tokens = holder.path
        path = (root, tokens[: len(tokens) - back * self.page_size])
        node = self.real.node_at(holder.node, back)
        expect("I2", "nodes that were idle on a held path", self.real.hold(node, times), [])
        for _ in range(times):
            self.model.held.append(path)
            self.holders.append(Holder(node, path))

    def evict(self, pages: int) -> None:
        """Take up to ``pages`` pages in order."""
        expected = self.model.evict(pages)
        gone: list[int] = []
        while len(gone) < len(expected):
            left = len(expected) - len(gone)
            gone += reversed(unpack_pages(self.real.trim(self.order.victim(left), left)))
        expect("I7", "evicted pages", gone, expected)
        self.events["evict"] += len(gone)

    def free(self) -> int:
        """Pages of the pool that are not cached."""
        return self.pool_pages - self.real.cached_pages

    def room(self) -> int:
        """Pages that are free or could be."""
        return self.free() + self.real.idle_pages

    def clear_away(self, number: int) -> None:
        """Take an idle leaf out of the tree that it is not the turn of, as clearing an invalidated tree does."""
        leaves = [node for node in self._walk() if not node.holders and not node.children]
        if not leaves:
            return
        leaf = leaves[number % len(leaves)]
        self.order.remove(leaf)
        gone = set(unpack_pages(self.real.trim(leaf, leaf.page_count)))
        for path in [path for path, page in self.model.pages.items() if page in gone]:
            self.model.order.forget(path)
            del self.model.pages[path]

    def mark(self, node: Node) -> tuple[int, ...]:
        return node.mark

    def _wake(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.order.remove(node)

    def _idle(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.order.add(node)

    # -- comparing ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.events["split"], self.events["merge"] = self.real.splits, self.real.merges
        nodes = self._walk()
        expect("I24", "nodes", self.real.nodes, len(nodes))
        expect("I24", "cached pages", self.real.cached_pages, len(self.model.pages))
        expect("I24", "idle pages", self.real.idle_pages, len(self.model.idle()))
        for holder in self.holders:
            path = [self.model.pages[page] for page in self.model.upward(holder.path)]
            expect("I6", "pages of a held path", unpack_pages(self.real.path_pages(holder.node)), path)
        self.order.check()
        expect("I7", "idle nodes", {id(node) for node in self.order}, {id(node) for node in nodes if not node.holders})
        expect("I24", "length of the order", len(self.order), sum(1 for node in nodes if not node.holders))
        if self.policy == "lru":  # of the others, which do not know the order beforehand, the victims are compared
            order = [page for node in self.order for page in reversed(unpack_pages(bytes(node.pages)))]
            expect("I7", "order of eviction", order, [self.model.pages[path] for path in self.model.ranking()])

    def check_queries(self, holder: Holder, back: int) -> None:
        """The questions that plans ask about a held path."""
        pages = self.model.upward(holder.path)
        sole = sum(1 for page in pages[len(pages) - back :] if self.model.holders(page) == 1)
        expect("I2", "pages held once", self.real.sole_pages(holder.node, back), sole)

    def _walk(self) -> list[Node]:
        """Every node, each looked at: keys, parents, sizes, holders, and each page against the dict."""
        nodes: list[Node] = []
        seen: dict[Path, int] = {}
        stack: list[tuple[Node, Path]] = [(root, (root.namespace, ())) for root in self.roots]
        while stack:
            node, (root, before) = stack.pop()
            for key, child in (node.children or {}).items():
                require("I9", child.parent is node, "a child that does not know its parent")
                require("I9", key == bytes(child.tokens[: self.page_size * 4]), "a child under another page's key")
                tokens = unpack_tokens(bytes(child.tokens))
                pages = unpack_pages(bytes(child.pages))
                require("I9", len(tokens) == len(pages) * self.page_size and pages != [], "an edge of odd length")
                expect("I9", "pages of an edge", child.page_count, len(pages))
                for number, page in enumerate(pages, 1):
                    path = (root, before + tuple(tokens[: number * self.page_size]))
                    seen[path] = page
                    expect("I2", f"holders of page {page}", child.holders, self.model.holders(path))
                    expect("I7", f"the policy's mark of page {page}", self.mark(child), self.model.order.mark(path))
                nodes.append(child)
                stack.append((child, (root, before + tuple(tokens))))
        expect("I6", "pages by content", seen, self.model.pages)
        return nodes
