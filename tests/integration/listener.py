"""A router by hand: subscribes, asks for what it missed, and knows what it was told, read with the msgpack package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import zmq

END = 2**64 - 1
ORDER = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys")
WAIT_MS = 10_000


class Listener:
    """``tokens(prompt, medium)`` is how much of a prompt it believes to be cached there."""

    def __init__(self, endpoint: str, replay_endpoint: str, queue: int = 100_000) -> None:
        self._context = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._asker = self._context.socket(zmq.DEALER)
        for socket in (self._subscriber, self._asker):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, queue)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        self._subscriber.connect(endpoint)
        self._asker.connect(replay_endpoint)
        self.last = -1
        self.holes = 0
        self.blocks: dict[str, dict[Any, tuple[Any, tuple[int, ...]]]] = {}
        self.forget()

    def forget(self) -> None:
        self.blocks = {"GPU": {}, "CPU": {}}

    def close(self) -> None:
        self._context.destroy(linger=0)

    # -- hearing --------------------------------------------------------------------------------------------------

    def listen(self, wait_ms: int = WAIT_MS) -> bool:
        """One message. False: none came."""
        if not self._subscriber.poll(wait_ms):
            return False
        _, number, batch = self._subscriber.recv_multipart()
        sequence = int.from_bytes(number, "big")
        if sequence > self.last:
            self.holes += sequence != self.last + 1
            self._take(sequence, batch)
        return True

    def ask(self, start: int) -> None:
        self._asker.send_multipart((b"", start.to_bytes(8, "big")))

    def replay(self, start: int | None = None) -> list[int]:
        """Hear what was missed (from ``start`` on). Returns the sequence numbers that came."""
        self.ask(self.last + 1 if start is None else start)
        return self.hear_replay()

    def hear_replay(self, meanwhile: Callable[[], None] | None = None) -> list[int]:
        """The answer to ``ask``. ``meanwhile``: for a publisher that lives in this thread."""
        came: list[int] = []
        while True:
            for _ in range(WAIT_MS // 5 if meanwhile else 0):
                if self._asker.poll(5):
                    break
                meanwhile()  # type: ignore[misc]
            assert self._asker.poll(WAIT_MS), f"no end of the replay came, but {len(came)} batches"
            empty, _, number, batch = self._asker.recv_multipart()
            assert empty == b""
            sequence = int.from_bytes(number, "big")
            if sequence == END:
                assert batch == b""
                return came
            came.append(sequence)
            if sequence > self.last:
                self._take(sequence, batch)

    def _take(self, sequence: int, batch: bytes) -> None:
        self.last = sequence
        _, events, _ = msgpack.unpackb(batch)
        for event in events:
            fields = (
                event if isinstance(event, dict) else {"type": event[0], **dict(zip(ORDER, event[1:], strict=False))}
            )
            if fields["type"] == "AllBlocksCleared":
                self.forget()
            elif fields["type"] == "BlockRemoved":
                medium = event["medium"] if isinstance(event, dict) else event[2]
                for block in fields["block_hashes"]:
                    del self.blocks[medium][block]
            else:
                self._store(fields)

    def _store(self, fields: dict[str, Any]) -> None:
        parent, size, medium = fields["parent_block_hash"], fields["block_size"], fields["medium"]
        for place, block in enumerate(fields["block_hashes"]):
            assert block not in self.blocks[medium]
            self.blocks[medium][block] = parent, tuple(fields["token_ids"][place * size : (place + 1) * size])
            parent = block

    # -- believing ------------------------------------------------------------------------------------------------

    def tokens(self, prompt: list[int], page_size: int = 4) -> tuple[int, int]:
        """(device, host): found on the device from the beginning, and behind that in the host tier."""
        children = {key: block for tier in ("CPU", "GPU") for block, key in self.blocks[tier].items()}
        found, parent = {"GPU": 0, "CPU": 0}, None
        for at in range(0, len(prompt) - page_size + 1, page_size):
            block = children.get((parent, tuple(prompt[at : at + page_size])))
            if block is None:
                break
            tier = "GPU" if block in self.blocks["GPU"] and not found["CPU"] else "CPU"
            found[tier] += page_size
            parent = block
        return found["GPU"], found["CPU"]
