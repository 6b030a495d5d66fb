"""A prefix cache without a tree: one dict from (root, all tokens so far) to a page, and the list of who holds what.

The order of eviction is found by playing it: again and again, of the pages which nobody holds and nothing cached
continues, one leaves; which one is said by ``orders.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from fuzz.model.orders import ORDERS, Order
from fuzz.model.packing import pack_tokens

Path = tuple[int, tuple[int, ...]]
"""Root number and all tokens from the first to the last of a full page."""


class TreeModel:
    def __init__(self, page_size: int, policy: str, pool_pages: int) -> None:
        self.page_size = page_size
        self.pages: dict[Path, int] = {}
        self.held: list[Path] = []
        """One entry a holder; an empty path holds nothing."""
        self.order: Order[Path] = ORDERS[policy](self, pool_pages)
        self.stamps = 0
        self.seed_of: Callable[[int], int] = lambda root: root
        """What the policy takes for the number of a root."""

    def upward(self, path: Path) -> list[Path]:
        """The path's pages, first to last."""
        root, tokens = path
        return [(root, tokens[:end]) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def match(self, root: int, tokens: tuple[int, ...]) -> Path:
        """The longest cached prefix in full pages."""
        found: Path = (root, ())
        for path in self.upward((root, tokens)):
            if path not in self.pages:
                break
            found = path
        return found

    def holders(self, path: Path) -> int:
        """How many hold this page: those whose held path goes through it."""
        root, tokens = path
        return sum(1 for other, longer in self.held if other == root and longer[: len(tokens)] == tokens)

    def idle(self) -> list[Path]:
        held = {page for path in set(self.held) for page in self.upward(path)}
        return [path for path in self.pages if path not in held]

    def let_go(self, path: Path, kept: Path | None) -> None:
        """One holder of ``path`` now holds only ``kept``, a part of it, or nothing. What nobody holds is stamped."""
        self.held.remove(path)
        still = self.upward(kept) if kept is not None else []
        if kept is not None:
            self.held.append(kept)
        self.stamps += 1
        gone = self.upward(path)[len(still) :]
        self.order.let_go(gone, [page for page in gone if self.holders(page) == 0], self.stamps)

    def evict(self, pages: int) -> list[int]:
        """Play it: as many pages leave, if there are as many. Returns them."""
        gone: list[int] = []
        while len(gone) < pages and (idle := set(self.idle())):
            path = self.order.victim(idle)
            self.order.evicted(path)
            self.order.forget(path)
            gone.append(self.pages.pop(path))
        return gone

    def ranking(self) -> list[Path]:
        """All pages that can be evicted, next victim first, for policies whose ranks do not change by evicting."""
        left = set(self.idle())
        children: dict[Path, int] = {}
        for root, tokens in self.pages:
            above = (root, tokens[: -self.page_size])
            children[above] = children.get(above, 0) + 1
        ranking: list[Path] = []
        while left:
            leaves = [path for path in left if not children.get(path)]
            victim = min(leaves, key=lambda path: (*self.order.rank(path), -len(path[1])))
            ranking.append(victim)
            left.discard(victim)
            children[victim[0], victim[1][: -self.page_size]] -= 1
        return ranking

    # -- what an order asks -------------------------------------------------------------------------------------

    def parent(self, page: Path) -> Path | None:
        above = (page[0], page[1][: -self.page_size])
        return above if above[1] else None

    def children(self, page: Path) -> list[Path]:
        return [path for path in self.pages if self.parent(path) == page]

    def depth(self, page: Path) -> int:
        return len(page[1])

    def prefix(self, page: Path) -> tuple[int, bytes]:
        return self.seed_of(page[0]), pack_tokens(page[1])
