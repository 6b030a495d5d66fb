"""A naive router: what it is told, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from fuzz.pairs.told import HASH_BYTES, Blocks, cut
from radixkv.ipc.event_ledger import DEVICE, HOST, Cleared, Event, Removed, Stored


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
