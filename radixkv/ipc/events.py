"""The event stream: which blocks can be found in which tier, for routers. PUB for all, a ROUTER for who missed some.

::

    PUB      [topic, sequence, batch]                                      sequence: 8 bytes, big-endian
    ROUTER   ["", first sequence wanted]  ->  ["", topic, sequence, batch] ...  ["", "", -1, ""]

Frames, batches and the replay are vLLM's (``distributed/kv_events.py``), so that what reads vLLM's stream reads this.

A sequence number is the daemon's start in milliseconds, shifted left by ``BOOT_SHIFT``, plus the number of the batch.
So numbers never return and always rise; within a daemon's life they have no holes; after a restart there is one that
anybody sees who looks for holes. The first batch of a daemon says AllBlocksCleared and then all that is cached.

A replay begins with the batch asked for. If that is not there any more (or of an earlier daemon), it begins with one
batch that says AllBlocksCleared and then all that was cached up to its sequence number: what was missed is not told,
but nothing is wrong afterwards.

Nothing here waits for anybody. A subscriber that does not read loses batches beyond ``hwm`` and sees the hole. Who asks
for a replay and does not read it gets no more than ``_REPLAY_QUEUE`` batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import zmq
from numpy.typing import NDArray

from radixkv.commands import Publish, Write
from radixkv.config import EventsConfig, PoolConfig
from radixkv.errors import ConfigError
from radixkv.image import TableImage
from radixkv.ipc.endpoint import EndpointInUse, private_files, remove_stale
from radixkv.ipc.event_codec import EventCodec, tokens_in
from radixkv.ipc.event_ledger import EVENT_TOKENS, FOLDED, Event, Ledger

BOOT_SHIFT = 22
END = b"\xff" * 8
BUFFER_BYTES = 64 * 2**20
"""What is kept for replays is bounded by this too."""
BACKLOG_BYTES = 4 * 2**20
"""Tokens and hashes that wait to be told. Beyond, they are told before another request is looked at."""
REPLAYS = 16
"""Replays that may be under way; further ones are dropped, and asked for again."""
REPLAY_PATIENCE_S = 5.0
"""How long one whose peer takes nothing is kept."""

_REPLAY_QUEUE = 64
_REPLAY_BATCHES = 16
"""Sent in one go."""
_RETRY_S = 0.005
_WRITE_BYTES = 128
_NOBLOCK = int(zmq.NOBLOCK)
_WITH_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)
_LINGER_MS = 200
_HANDSHAKE_MS = 3_000
_REQUEST_BYTES = 64


Found = tuple[TableImage, NDArray[Any]]
"""A table, and which of its places are cached."""


class _Replay:
    """One that is under way. ``at``: the sequence number that comes next."""

    def __init__(self, route: bytes, at: int, now: float) -> None:
        self.route = route
        self.at = at
        self.moved = now
        self.retry = now
        self.whole: Iterator[Event] | None = None
        """Everything, of which ``parts`` is encoded already."""
        self.parts: list[bytes] = []
        self.message: tuple[int, bytes] | None = None
        """Everything, encoded."""


class Events:
    """Of one pool. Errors: ConfigError (an address that cannot be bound), EndpointInUse."""

    def __init__(self, config: EventsConfig, pool: PoolConfig, found: Found | None) -> None:
        """``found``: what an earlier daemon left."""
        self.pool = pool.name
        self._config = config
        self._ledger = Ledger(pool)
        if found is not None:
            self._ledger.restore(*found)
        self._codec = EventCodec(config, pool.spec.page_size)
        self._topic = config.topic.encode()
        self.first = self._next = time.time_ns() // 1_000_000 << BOOT_SHIFT
        self._backlog: deque[Write] = deque()
        self._backlog_bytes = 0
        self._folded: Iterator[Event] | None = self._ledger.everything()
        """What is being told; None: all that has been folded is told."""
        self._buffer: deque[bytes] = deque()
        """The batches before ``_next``."""
        self._buffer_bytes = 0
        self._replays: deque[_Replay] = deque()
        self._context = zmq.Context()
        self._files: list[Path] = []
        self._publisher = self._open(zmq.PUB, config.endpoint, config.hwm)
        self.replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint:
            self.replay = self._open(zmq.ROUTER, config.replay_endpoint, _REPLAY_QUEUE)

    def _open(self, kind: int, address: str, queue: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        options = [(zmq.LINGER, _LINGER_MS), (zmq.SNDHWM, queue), (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)]
        if kind == zmq.ROUTER:
            options += [(zmq.ROUTER_MANDATORY, 1), (zmq.RCVHWM, REPLAYS), (zmq.MAXMSGSIZE, _REQUEST_BYTES)]
        for option, value in options:
            socket.setsockopt(option, value)
        try:
            if address.startswith("ipc://"):
                path = Path(address.removeprefix("ipc://"))
                remove_stale(path)
                self._files.append(path)
            with private_files():
                socket.bind(address)
        except (zmq.ZMQError, EndpointInUse, ConfigError) as error:
            socket.close(0)
            self.close()
            if not isinstance(error, zmq.ZMQError):
                raise
            if error.errno == zmq.EADDRINUSE:
                raise EndpointInUse(f"somebody listens at {address}") from error
            raise ConfigError(f"events: {address!r} cannot be bound: {error.strerror}") from error
        return socket

    def close(self) -> None:
        for socket in (getattr(self, "_publisher", None), getattr(self, "replay", None)):
            if socket is not None:
                socket.close()
        self._context.term()
        for path in self._files:
            path.unlink(missing_ok=True)

    # -- what the daemon calls --------------------------------------------------------------------------------------

    def take(self, writes: Iterable[Write]) -> None:
        """Remember what has happened; it is told later."""
        for write in writes:
            if type(write) in FOLDED and write.pool == self.pool:  # type: ignore[union-attr]
                self._backlog.append(write)
                self._backlog_bytes += _size(write)

    def wait_s(self, now: float) -> float:
        """Until there is something to do: 0 if there is now."""
        if self._backlog or self._folded is not None:
            return 0.0
        return min((max(0.0, replay.retry - now) for replay in self._replays), default=float("inf"))

    def work(self, now: float) -> None:
        """Tell a batch, more if too much waits; then go on with replays. Some milliseconds at most."""
        self._tell()
        while self._backlog_bytes > BACKLOG_BYTES:
            self._tell()
        if self.replay is not None:
            self._take_replays(self.replay, now)
            if self._replays:
                self._serve_replay(self.replay, now)

    # -- batches ----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        encoded, tokens = [], 0
        for event in self._events():
            encoded.append(self._codec.event(event))
            tokens += tokens_in(event)
            if tokens >= EVENT_TOKENS:
                break
        if encoded:
            self._publish(self._codec.batch(time.time(), encoded))

    def _events(self) -> Iterator[Event]:
        """What has not been told, as long as there is something."""
        while self._folded is not None or self._backlog:
            if self._folded is None:
                write = self._backlog.popleft()
                self._backlog_bytes -= _size(write)
                self._folded = iter(self._ledger.fold(write))
            for event in self._folded:  # noqa: UP028 ("yield from" would end it with whoever stops listening)
                yield event
            self._folded = None

    def _publish(self, batch: bytes) -> None:
        _send(self._publisher, self._topic, self._next, batch)
        self._next += 1
        self._buffer.append(batch)
        self._buffer_bytes += len(batch)
        while len(self._buffer) > self._config.buffer_batches or (
            self._buffer_bytes > BUFFER_BYTES and len(self._buffer) > 1
        ):
            self._buffer_bytes -= len(self._buffer.popleft())

    # -- replays ----------------------------------------------------------------------------------------------------

    def _take_replays(self, socket: zmq.Socket[bytes], now: float) -> None:
        for _ in range(REPLAYS):
            if not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return
            frames = socket.recv_multipart(_NOBLOCK)
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                continue
            route = frames[0]
            for replay in [replay for replay in self._replays if replay.route == route]:
                self._replays.remove(replay)
            if len(self._replays) < REPLAYS:
                self._replays.append(_Replay(route, int.from_bytes(frames[2], "big"), now))

    def _serve_replay(self, socket: zmq.Socket[bytes], now: float) -> None:
        """Go on with one, and look after another the next time."""
        replay = self._replays.popleft()
        if replay.retry > now:
            self._replays.append(replay)
            return
        try:
            over = self._go_on(socket, replay)
            replay.moved = now
        except zmq.Again:
            replay.retry = now + _RETRY_S
            over = now - replay.moved > REPLAY_PATIENCE_S
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            over = True
        if not over:
            self._replays.append(replay)

    def _go_on(self, socket: zmq.Socket[bytes], replay: _Replay) -> bool:
        """Whether it is over. Errors: zmq.Again when the peer's queue is full."""
        oldest = self._next - len(self._buffer)
        if replay.message is None and (replay.whole is not None or not self._reaches(replay.at, oldest)):
            self._encode_everything(replay)
            return False
        if replay.message is not None:
            _answer(socket, replay.route, self._topic, *replay.message)
            replay.at, replay.message = replay.message[0] + 1, None
        replay.at = max(replay.at, oldest)  # of an earlier daemon's time; or a hole, for the peer to see
        for _ in range(_REPLAY_BATCHES):
            if replay.at >= self._next:
                _answer(socket, replay.route, b"", -1, b"")
                return True
            _answer(socket, replay.route, self._topic, replay.at, self._buffer[replay.at - oldest])
            replay.at += 1
        return False

    def _reaches(self, at: int, oldest: int) -> bool:
        """Whether the buffer has all that a subscriber lacks: also if that is all since the daemon's start."""
        return (oldest <= at or oldest == self.first) and at <= self._next

    def _encode_everything(self, replay: _Replay) -> None:
        """A slice. What has been folded must have been told, or it would be told with the wrong number."""
        if replay.whole is None:
            if self._folded is not None:
                return
            replay.at = self._next - 1
            replay.whole = self._ledger.everything()
        tokens = 0
        for event in replay.whole:
            replay.parts.append(self._codec.event(event))
            tokens += tokens_in(event)
            if tokens >= EVENT_TOKENS:
                return
        replay.message = (replay.at, self._codec.batch(time.time(), replay.parts))
        replay.whole, replay.parts = None, []


def _answer(socket: zmq.Socket[bytes], route: bytes, topic: bytes, sequence: int, batch: bytes) -> None:
    """All frames or none. Errors: zmq.Again, or that the peer is gone."""
    socket.send(route, _WITH_MORE)
    socket.send(b"", _WITH_MORE)
    _send(socket, topic, sequence, batch)


def _send(socket: zmq.Socket[bytes], topic: bytes, sequence: int, batch: bytes) -> None:
    socket.send(topic, _WITH_MORE)
    socket.send(sequence.to_bytes(8, "big", signed=sequence < 0), _WITH_MORE)
    socket.send(batch, _NOBLOCK)


def _size(write: Any) -> int:
    return _WRITE_BYTES + (len(write.tokens) + len(write.hashes) if type(write) is Publish else 0)
