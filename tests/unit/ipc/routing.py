"""A naive router: what it is told, and nothing else. And what an engine really has, to compare it with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from radixkv.ipc.event_ledger import DEVICE, HOST, Cleared, Event, Removed, Stored
from radixkv.tree.node import Node

HASH_BYTES = 16
Blocks = dict[str, dict[bytes, tuple[bytes, bytes, bytes]]]
"""By tier and chain hash: parent, tokens, canonical bytes of the namespace."""


def cut(packed: bytes, size: int) -> list[bytes]:
    return [packed[at : at + size] for at in range(0, len(packed), size)]


class Router:
    def __init__(self) -> None:
        self.blocks: Blocks = {DEVICE: {}, HOST: {}}

    def hear(self, events: Iterable[Event]) -> None:
        """Fails when a block comes twice, goes without having come, or comes before the one that it continues."""
        for event in events:
            match event:
                case Cleared():
                    self.blocks = {DEVICE: {}, HOST: {}}
                case Removed():
                    for block in cut(event.hashes, HASH_BYTES):
                        assert self.blocks[event.tier].pop(block, None), "removed, and was not there"
                case Stored():
                    self._store(event)

    def _store(self, event: Stored) -> None:
        hashes = cut(event.hashes, HASH_BYTES)
        tokens = cut(event.tokens, len(event.tokens) // len(hashes))
        parent = event.parent
        assert not parent or any(parent in tier for tier in self.blocks.values()), "continues what is not there"
        for block, own in zip(hashes, tokens, strict=True):
            assert block not in self.blocks[event.tier], "stored twice"
            self.blocks[event.tier][block] = (parent, own, event.canonical)
            parent = block


def blocks_of(pool: Any) -> Blocks:
    """What a lookup can find in a pool of an engine."""
    blocks: Blocks = {DEVICE: {}, HOST: {}}
    for namespace in pool.namespaces.all():
        for parent, node in _nodes(namespace.root, b""):
            hashes = cut(bytes(node.hashes), HASH_BYTES)
            tokens = cut(bytes(node.tokens), pool.tree.page_token_bytes)
            for before, block, own in zip([parent, *hashes], hashes, tokens, strict=False):
                for tier, there in ((DEVICE, node.pages), (HOST, node.host)):
                    if there:
                        blocks[tier][block] = (before, own, namespace.canonical)
    return blocks


def _nodes(top: Node, before: bytes) -> Iterator[tuple[bytes, Node]]:
    stack = [(before, child) for child in (top.children or {}).values()]
    while stack:
        parent, node = stack.pop()
        yield parent, node
        stack += [(bytes(node.hashes[-HASH_BYTES:]), child) for child in (node.children or {}).values()]
