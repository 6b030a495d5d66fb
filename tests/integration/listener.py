"""A router by hand: subscribes, asks for what it missed, and knows what it was told."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from fuzz.model.router import END, Router

WAIT_MS = 10_000


class Listener(Router):
    """``tokens(prompt)`` is how much of a prompt it believes to be cached, per tier."""

    def __init__(self, endpoint: str, replay_endpoint: str, queue: int = 100_000) -> None:
        super().__init__()
        self._context = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._asker = self._context.socket(zmq.DEALER)
        for socket in (self._subscriber, self._asker):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, queue)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        self._subscriber.connect(endpoint)
        self._asker.connect(replay_endpoint)
        self.holes = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    # -- hearing --------------------------------------------------------------------------------------------------

    def listen(self, wait_ms: int = WAIT_MS) -> bool:
        """One message. False: none came."""
        if not self._subscriber.poll(wait_ms):
            return False
        _, number, batch = self._subscriber.recv_multipart()
        sequence = int.from_bytes(number, "big")
        self._believe(sequence, batch)
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
            self._believe(sequence, batch)

    def _believe(self, sequence: int, batch: bytes) -> None:
        """Also behind a hole, which is counted; behind one, blocks may go of which it has never heard."""
        if sequence > self.last:
            if sequence != self.last + 1:
                self.holes += 1
                self.last = sequence - 1
            assert self.take(sequence, batch) and (self.holes or not self.unknown)
