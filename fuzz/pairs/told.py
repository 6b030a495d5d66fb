"""An engine with two tiers and restarts whose events are told: to subscribers that lose some, ask again and come late.

What a subscriber does is all that docs/events.md asks of one: it looks for holes, asks for what it lacks, and takes up
again with whatever can be understood. What it knows once it has heard everything must be what the engine has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from fuzz.model.mismatch import expect, require
from fuzz.model.packing import unpack_tokens
from fuzz.model.router import BOOT_SHIFT, Block, Router
from fuzz.pairs.recovery import Odds
from fuzz.pairs.tiered_recovery import TieredRecovery
from radixkv import Namespace, commands
from radixkv.config import EVENT_FORMATS, EVENT_HASHES, Config, EventsConfig
from radixkv.device.descriptors import CACHED
from radixkv.hashing import chain, namespace_root
from radixkv.ipc.event_feed import END, Feed, Message, Replay
from radixkv.ipc.event_ledger import Ledger, Sizes
from radixkv.tree.node import Node

HASH_BYTES = 16
SPACES = {Namespace("m", lora=lora, salt=salt).canonical: (lora, salt) for lora, salt in (
    (None, None), ("adapter", None), (None, "tenant"), ("adapter", "tenant"))}  # fmt: skip
"""Namespaces, and what routers may know of them."""


class Subscriber:
    def __init__(self, rng: random.Random, losses: float) -> None:
        self.router = Router()
        self.lacks = True
        """Something that it has to ask for."""
        self._rng = rng
        self._losses = losses
        self._replay: Replay | None = None

    def hear(self, message: Message) -> None:
        """What was published, if it arrives."""
        if self._rng.random() >= self._losses and not self._is_old(message[0]):
            self.lacks |= not self.router.take(*message)

    def ask(self, feed: Feed) -> None:
        self._replay = Replay(feed, self.router.last + 1)

    def go_on(self, feed: Feed, losses: float | None = None) -> bool:
        """Ask, or hear one message of the answer. Returns whether an answer has come to its end."""
        if self._replay is None:
            self.ask(feed)
            return False
        message = self._replay.message()
        if message is None:
            return False
        if message == END:
            self._replay, self.lacks = None, False
            return True
        self._replay.sent()
        lost = self._rng.random() < (self._losses if losses is None else losses)
        if not self._is_old(message[0]) and (lost or not self.router.take(*message)):
            self.lost()
        return False

    def lost(self) -> None:
        """The connection, or the daemon."""
        self._replay, self.lacks = None, True

    def _is_old(self, sequence: int) -> bool:
        last = self.router.last
        return last >= 0 and sequence >> BOOT_SHIFT == last >> BOOT_SHIFT and sequence <= last


class ToldRecovery(TieredRecovery):
    def __init__(self, config: Config, rng: random.Random) -> None:
        """With one pool."""
        self._telling: Feed | None = None
        self._invalidated = False
        """Of what is over, some may go that somebody who came late has never heard of."""
        super().__init__(config, rng, Odds(command=0.0))
        self._events = EventsConfig(
            endpoint="tcp://127.0.0.1:1",
            format=rng.choice(EVENT_FORMATS),
            hash=rng.choice(EVENT_HASHES),
            buffer_batches=rng.choice((1, 2, 5, 100)),
        )
        self._sizes = Sizes(*(rng.choice((1, 3, 10, 1000)) for _ in Sizes._fields))
        self._losses = rng.choice((0.0, 0.05, 0.3, 1.0))
        self._boot = rng.randrange(2**40, 2**41)
        self._boots: set[int] = set()
        self.subscribers = [Subscriber(rng, self._losses)]
        self._telling = self._feed(Ledger(self.pool.config, self._sizes))

    @property
    def feed(self) -> Feed:
        assert self._telling is not None
        return self._telling

    def _feed(self, ledger: Ledger) -> Feed:
        return Feed(self._events, self.pool.config, ledger, self._boot << BOOT_SHIFT, self._sizes)

    def written(self, write: commands.Write) -> None:
        super().written(write)
        self._invalidated |= isinstance(write, commands.NamespaceRecord) and write.invalidations > 0
        if self._telling is not None:
            self._telling.take([write])

    def restart(self) -> None:
        """The next daemon tells what it finds in the table. Its clock may have been set back."""
        self._telling = None
        super().restart()
        self._boots.add(self._boot)
        self._boot += self._rng.choice((1, 7, 10_000, -1, -10_000))
        while self._boot in self._boots:
            self._boot += 1
        (pool,) = self.config.pools
        image = self.tables.found(self.tables.raw(), set()).images[pool.name]
        ledger = Ledger(pool, self._sizes)
        ledger.restore(image, image.states == CACHED)
        self._telling = self._feed(ledger)
        for one in self.subscribers:
            one.lost()

    # -- telling ------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        for message in self.feed.turn(0.0):
            self.events["batch"] += 1
            for one in self.subscribers:
                one.hear(message)

    def answer(self) -> None:
        """One who lacks something goes on asking."""
        for one in self._rng.sample(self.subscribers, 1):
            if one.lacks:
                self.events["replay"] += one.go_on(self.feed)

    def newcomer(self) -> None:
        """Somebody who knows nothing; of more than three one leaves."""
        self.subscribers = [*self.subscribers[-2:], Subscriber(self._rng, self._losses)]

    def settle(self) -> None:
        """All is told, and everybody has asked for what is missing, also for what no hole shows."""
        while not self.feed.is_idle:
            self.turn()
        wholes = self.feed.wholes
        for one in self.subscribers:
            one.ask(self.feed)
            for _ in range(100_000):
                if one.go_on(self.feed, losses=0.0):
                    break
                self.turn()
            else:
                require("I10", False, "a replay has no end")
            require("I23", self._invalidated or not one.router.unknown, f"{one.router.unknown} blocks were not there")
            expect("I23", "the last batch", one.router.last, self.feed.next - 1)
            self._compare(one.router)
        self.events["whole"] += self.feed.wholes - wholes
        self.events["settled"] += 1

    def _compare(self, router: Router) -> None:
        wanted = blocks_of(self.pool)
        for tier, blocks in wanted.items():
            named = {self._name(chain): self._block(*block) for chain, block in blocks.items()}
            expect("I23", f"blocks in {tier}", router.blocks[tier], named)

    def _block(self, parent: bytes, tokens: bytes, canonical: bytes) -> Block:
        lora, salt = SPACES[canonical]
        keys = [key for key in (lora, None if parent else salt) if key is not None]
        return Block(self._name(parent) if parent else None, tuple(unpack_tokens(tokens)), lora, tuple(keys))

    def _name(self, chain: bytes) -> Any:
        return int.from_bytes(chain[8:], "big") if self._events.hash == "int64" else chain


# -- what an engine has ---------------------------------------------------------------------------------------------

Blocks = dict[str, dict[bytes, tuple[bytes, bytes, bytes]]]
"""By tier and chain hash: parent, tokens, canonical bytes of the namespace."""


def blocks_of(pool: Any) -> Blocks:
    """What a lookup can find in a pool of an engine."""
    blocks: Blocks = {"GPU": {}, "CPU": {}}
    size = pool.tree.page_token_bytes
    for namespace in pool.namespaces.all():
        seed = namespace_root(namespace.canonical, namespace.invalidations)
        for parent, packed, node in _nodes(namespace.root, seed, size):
            hashes = cut(packed, HASH_BYTES)
            first = b"" if parent == seed else parent
            for before, block, own in zip([first, *hashes], hashes, cut(bytes(node.tokens), size), strict=False):
                for tier, there in (("GPU", node.pages), ("CPU", node.host)):
                    if there:
                        blocks[tier][block] = (before, own, namespace.canonical)
    return blocks


def cut(packed: bytes, size: int) -> list[bytes]:
    return [packed[at : at + size] for at in range(0, len(packed), size)]


def _nodes(top: Node, before: bytes, size: int) -> Iterator[tuple[bytes, bytes, Node]]:
    """Each with the chain hash before it and its own."""
    stack = [(before, child) for child in (top.children or {}).values()]
    while stack:
        parent, node = stack.pop()
        hashes = chain(parent, bytes(node.tokens), size)
        yield parent, hashes, node
        stack += [(hashes[-HASH_BYTES:], child) for child in (node.children or {}).values()]
