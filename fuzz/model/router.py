"""A naive router: hears batches of events, as bytes, read with the msgpack package, and believes them.

It is stricter than a real one: a block that comes twice, or that continues what nobody has told of, is a mistake of
whoever tells. What goes without having come is counted: it may be of an epoch that is over.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack

from fuzz.model.mismatch import require

BOOT_SHIFT = 22
END = 2**64 - 1
"""Sequence number of the last message of a replay."""
ORDER = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys")
TIERS = ("GPU", "CPU")


class Block(NamedTuple):
    """``parent``: None where a prompt begins; ``keys``: its entry of extra_keys."""

    parent: Any
    tokens: tuple[int, ...]
    lora: str | None = None
    keys: tuple[str, ...] = ()


class Router:
    """``blocks``: by tier and hash. ``last``: the sequence number up to which it knows all; -1: nothing yet.

    ``unknown``: how many blocks went without having come.
    """

    def __init__(self) -> None:
        self.last = -1
        self.unknown = 0
        self.blocks: dict[str, dict[Any, Block]] = {}
        self.forget()

    def forget(self) -> None:
        self.blocks = {tier: {} for tier in TIERS}

    def take(self, sequence: int, batch: bytes | bytearray) -> bool:
        """A batch that it has not heard yet. False: it cannot be understood, for one before it is missing.

        It can if it is the next one, or if it says AllBlocksCleared first: then nothing before it matters.
        """
        _, events, _ = msgpack.unpackb(batch)
        fields = [_named(event) for event in events]
        if sequence != self.last + 1 and fields[0]["type"] != "AllBlocksCleared":
            return False
        self.last = sequence
        for event in fields:
            self._hear(event)
        return True

    def _hear(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "AllBlocksCleared":
                self.forget()
            case "BlockRemoved":
                for block in event["block_hashes"]:
                    self.unknown += self.blocks[event["medium"]].pop(block, None) is None
            case "BlockStored":
                self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        parent, size, there = event["parent_block_hash"], event["block_size"], self.blocks[event["medium"]]
        hashes, tokens, keys = event["block_hashes"], event["token_ids"], event["extra_keys"]
        known = parent is None or any(parent in tier for tier in self.blocks.values())
        require("I23", known, f"{hashes[0]} continues {parent}, of which nobody has told")
        require("I23", len(tokens) == size * len(hashes), f"{len(tokens)} tokens in {len(hashes)} blocks of {size}")
        for place, block in enumerate(hashes):
            require("I23", block not in there, f"{block} was stored in {event['medium']} twice")
            own = tuple(keys[place] or ()) if keys else ()
            there[block] = Block(parent, tuple(tokens[place * size : (place + 1) * size]), event["lora_name"], own)
            parent = block

    def tokens(
        self, prompt: list[int], page_size: int = 4, lora: str | None = None, salt: str | None = None
    ) -> tuple[int, int]:
        """(device, host): how much is on the device from the beginning, and behind that in the host tier."""
        children = {block: name for tier in reversed(TIERS) for name, block in self.blocks[tier].items()}
        found, parent = dict.fromkeys(TIERS, 0), None
        every = () if lora is None else (lora,)
        for at in range(0, len(prompt) - page_size + 1, page_size):
            keys = every if parent is not None or salt is None else (*every, salt)
            name = children.get(Block(parent, tuple(prompt[at : at + page_size]), lora, keys))
            if name is None:
                break
            found["GPU" if name in self.blocks["GPU"] and not found["CPU"] else "CPU"] += page_size
            parent = name
        return found["GPU"], found["CPU"]


def _named(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    order = ORDER if event[0] == "BlockStored" else ("block_hashes", "medium")
    return {"type": event[0], **dict(zip(order, event[1:], strict=False))}
