"""The pages of one pool, one entry a page: what state each is in, and which content the cache knows.

::

    free -> private -> cached -> free            the cache: {(namespace, epoch, all tokens up to here): page}
                    -> shadow -> free            same content as a cached page, outside the cache
            private | shadow -> quarantined -> free      the session that could write to it has ended

Nothing is counted by hand. Who holds a page is found anew each time by looking at every sequence; a page of the cache
is also held by whoever holds a page below it, and by whoever has committed the same tokens. Of the cached pages which
nobody holds and which have no cached page below them one goes first; which one is said by ``orders.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fuzz.model.orders import ORDERS, Order, Priorities
from fuzz.model.packing import pack_tokens
from radixkv.commands import Retain

FREE, PRIVATE, CACHED, SHADOW, QUARANTINED = "free", "private", "cached", "shadow", "quarantined"

Tokens = tuple[int, ...]
Key = tuple[bytes, int, Tokens]
"""Namespace, epoch and all tokens from the first to the last of the page."""


@dataclass
class Sequence:
    """One sequence: its tokens, its table, and the numbers the protocol gives it.

    ``depth``: so many leading pages of the cache, the ones with these tokens, are held besides the table: they differ
    from the table's where that has shadows.
    """

    pool: str
    namespace: bytes
    epoch: int
    tokens: list[int]
    pages: list[int]
    published: int
    depth: int
    committed: int
    cached: int
    born_shared: int
    copy_rows: list[tuple[int, int, int]] = field(default_factory=list)
    retain: list[Retain] = field(default_factory=list)

    @property
    def charged(self) -> int:
        return max(0, len(self.pages) - self.born_shared)

    def sources(self) -> list[int]:
        return [source for source, _, _ in self.copy_rows]


class PoolModel:
    """All pages of one pool."""

    def __init__(self, name: str, pages: int, page_size: int, policy: str = "lru") -> None:
        self.name = name
        self.page_size = page_size
        self.state: dict[int, str] = dict.fromkeys(range(pages), FREE)
        self.cache: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.policy = policy
        self.order: Order[int] = ORDERS[policy](self, pages)
        self.root_of: Callable[[int], int] = lambda _page: 0
        """By the table: the namespace and epoch of a page, as one number."""
        self.roots: dict[int, int] = {}
        self.epoch: dict[bytes, int] = {}
        self.blamed: dict[int, int] = {}
        """Quarantined page -> the ended session that could still write to it."""
        self.stamps_given = 0
        self.now = 0.0

    # -- looking ------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        found = Counter(self.state.values())
        return {state: found[state] for state in (FREE, PRIVATE, CACHED, SHADOW, "loading", "saving", QUARANTINED)}

    def dead(self, held: set[int]) -> list[int]:
        """Cached pages of invalidated epochs that nobody holds: the engine may take them back whenever it likes."""
        return [
            page
            for page, (namespace, epoch, _) in self.key_of.items()
            if epoch != self.epoch_of(namespace) and page not in held
        ]

    def epoch_of(self, namespace: bytes) -> int:
        return self.epoch.get(namespace, 1)

    def key(self, sequence: Sequence, index: int) -> Key:
        return sequence.namespace, sequence.epoch, tuple(sequence.tokens[: (index + 1) * self.page_size])

    def match(self, namespace: bytes, tokens: list[int]) -> list[int]:
        """The pages that hold the leading full pages of these tokens, as far as they are cached."""
        found: list[int] = []
        size = self.page_size
        while (len(found) + 1) * size <= len(tokens):
            key = (namespace, self.epoch_of(namespace), tuple(tokens[: (len(found) + 1) * size]))
            if key not in self.cache:
                break
            found.append(self.cache[key])
        return found

    def parent(self, page: int) -> int | None:
        """The cached page before this one, or None for a first page."""
        namespace, epoch, tokens = self.key_of[page]
        before = tokens[: -self.page_size]
        return self.cache[namespace, epoch, before] if before else None

    def children(self, page: int) -> list[int]:
        """The cached pages right behind this one."""
        return [other for other in self.key_of if self.parent(other) == page]

    def depth(self, page: int) -> int:
        return len(self.key_of[page][2])

    def prefix(self, page: int) -> tuple[int, bytes]:
        return self.roots[page], pack_tokens(self.key_of[page][2])

    def held(self, sequences: Iterable[Sequence], also: Iterable[int] = ()) -> set[int]:
        """Every page somebody holds: in a table, as the source of copy_rows, or above a cached page that is held."""
        wanted = list(also)
        for sequence in sequences:
            if sequence.pool == self.name:
                wanted += sequence.pages + sequence.sources()
                wanted += [self.cache[self.key(sequence, index)] for index in range(sequence.depth)]
        held: set[int] = set()
        while wanted:
            page = wanted.pop()
            if page in held:
                continue
            held.add(page)
            above = self.parent(page) if self.state[page] == CACHED else None
            if above is not None:
                wanted.append(above)
        return held

    def evictable(self, held: set[int]) -> int:
        return sum(1 for page, state in self.state.items() if state == CACHED and page not in held)

    def free(self) -> int:
        return sum(1 for state in self.state.values() if state == FREE)

    # -- changing -----------------------------------------------------------------------------------------------

    def evict(self, held: set[int]) -> None:
        """The page that has to leave next does. One must exist."""
        page = self.order.victim({page for page in self.key_of if page not in held})
        self.order.evicted(page)
        self.forget(page)

    def forget(self, page: int) -> None:
        """A cached page leaves the cache and is free."""
        del self.cache[self.key_of.pop(page)]
        self.order.forget(page)
        self.state[page] = FREE

    def recovered(self, stamps: dict[int, int]) -> None:
        """A new daemon knows only this of the cached pages."""
        self.order = ORDERS[self.policy](self, len(self.state))
        for page, stamp in stamps.items():
            self.order.recovered(page, stamp)
        self.stamps_given = max(stamps.values(), default=0)

    def publish(self, sequence: Sequence, index: int) -> str:
        """Page ``index`` of the sequence is complete: into the cache if it is the first with this content."""
        page, key = sequence.pages[index], self.key(sequence, index)
        live = sequence.epoch == self.epoch_of(sequence.namespace)
        if live and key not in self.cache:
            self.cache[key] = page
            self.key_of[page] = key
            self.roots[page] = self.root_of(page)
            self.state[page] = CACHED
        else:
            self.state[page] = SHADOW
        if live:
            sequence.depth = index + 1
        return self.state[page]

    def settle(
        self,
        before: dict[int, set[int]],
        after: dict[int, set[int]],
        blame: int | None,
        said: dict[int, list[Retain]],
    ) -> None:
        """What each sequence (any number for it) held and no longer holds: cached pages go by the policy, others that
        nobody holds are free again.

        ``blame``: the ended session that can still write to private and shadow pages, so they are quarantined.
        """
        held = set().union(*after.values())
        self.stamps_given += 1
        for sequence, pages in before.items():
            path = sorted((page for page in pages - after.get(sequence, set()) if page in self.key_of), key=self.depth)
            if path:
                self._say(said[sequence], path)
                self.order.let_go(path, [page for page in path if page not in held], self.stamps_given)
        for page in set().union(*before.values()) - held:
            if self.state[page] in (PRIVATE, SHADOW):
                self.state[page] = FREE if blame is None else QUARANTINED
                if blame is not None:
                    self.blamed[page] = blame

    def _say(self, retain: list[Retain], path: list[int]) -> None:
        for page in path:
            first_token = self.depth(page) - self.page_size
            for one in retain:
                if one.start <= first_token and (one.end is None or first_token < one.end):
                    assert isinstance(self.order, Priorities)
                    ends = 2**62 if one.for_s is None else round((self.now + one.for_s) * 1000)
                    self.order.say(page, one.priority, ends)

    def pinned(self, held: set[int]) -> int:
        """Pages that nobody holds and that are pinned."""
        return sum(1 for page in self.key_of if page not in held and self.order.mark(page)[:1] == (Priorities.PIN,))

    def release_quarantine(self, session: int) -> None:
        for page in [page for page, blamed in self.blamed.items() if blamed == session]:
            del self.blamed[page]
            self.state[page] = FREE
