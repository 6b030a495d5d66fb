"""The event stream: which blocks can be found in which tier, for routers. PUB for all, a ROUTER for who missed some.

::

    PUB      [topic, sequence, batch]                                      sequence: 8 bytes, big-endian
    ROUTER   ["", first sequence wanted]  ->  ["", topic, sequence, batch] ...  ["", "", -1, ""]

Frames, batches and the replay are vLLM's (``distributed/kv_events.py``), so that what reads vLLM's stream reads this.
What is in them, and their numbers, is made in ``event_feed.py``; here are the sockets.

Nothing here waits for anybody. A subscriber that does not read loses batches beyond ``hwm`` and sees the hole. Who asks
for a replay and does not read it gets no more than ``_REPLAY_QUEUE`` batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zmq
from numpy.typing import NDArray

from radixkv.commands import Write
from radixkv.config import EventsConfig, PoolConfig
from radixkv.errors import ConfigError
from radixkv.image import TableImage
from radixkv.ipc import event_feed
from radixkv.ipc.endpoint import EndpointInUse, private_files, remove_stale
from radixkv.ipc.event_feed import BOOT_SHIFT, Feed, Message
from radixkv.ipc.event_ledger import Ledger, Sizes

END = b"\xff" * 8
REPLAYS = 256
"""Replays that may be under way, each little more than a number; further ones are dropped."""
REPLAY_PATIENCE_S = 5.0
"""How long one whose peer takes nothing is kept."""

_REPLAY_QUEUE = 64
_REPLAY_BATCHES = 16
"""Sent in one go."""
_REQUESTS = 16
"""Read in one go."""
_RETRY_S = 0.005
_NOBLOCK = int(zmq.NOBLOCK)
_WITH_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)
_LINGER_MS = 200
_HANDSHAKE_MS = 3_000
_REQUEST_BYTES = 64


Found = tuple[TableImage, NDArray[Any]]
"""A table, and which of its places are cached."""


class _Replay:
    """One that is under way, and to whom it goes."""

    def __init__(self, feed: Feed, route: bytes, start: int, now: float) -> None:
        self.route = route
        self.batches = event_feed.Replay(feed, start)
        self.moved = now
        self.retry = now


class Events:
    """Of one pool. Errors: ConfigError (an address that cannot be bound), EndpointInUse."""

    def __init__(self, config: EventsConfig, pool: PoolConfig, found: Found | None, sizes: Sizes | None = None) -> None:
        """``found``: what an earlier daemon left."""
        sizes = sizes or Sizes()
        ledger = Ledger(pool, sizes)
        if found is not None:
            ledger.restore(*found)
        self.feed = Feed(config, pool, ledger, time.time_ns() // 1_000_000 << BOOT_SHIFT, sizes)
        self._pool = pool.name
        self._topic = config.topic.encode()
        self._replays: deque[_Replay] = deque()
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._context = zmq.Context()
        self._files: list[Path] = []
        self._publisher = self._open(zmq.PUB, ("endpoint", config.endpoint), config.hwm)
        self.replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint:
            self.replay = self._open(zmq.ROUTER, ("replay_endpoint", config.replay_endpoint), _REPLAY_QUEUE)

    def _open(self, kind: int, where: tuple[str, str], queue: int) -> zmq.Socket[bytes]:
        """``where``: the key, and its address."""
        key, address = where
        socket = self._context.socket(kind)
        options = [(zmq.LINGER, _LINGER_MS), (zmq.SNDHWM, queue), (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)]
        if kind == zmq.ROUTER:
            options += [(zmq.ROUTER_MANDATORY, 1), (zmq.RCVHWM, _REQUESTS), (zmq.MAXMSGSIZE, _REQUEST_BYTES)]
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
            if isinstance(error, EndpointInUse) or getattr(error, "errno", None) == zmq.EADDRINUSE:
                raise EndpointInUse(f"somebody listens at {address}, which is events.{key}") from error
            why = error.strerror if isinstance(error, zmq.ZMQError) else "something else is there, which is no socket"
            raise ConfigError(f"events.{key} = {address!r} cannot be bound: {why}") from error
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
        self.feed.take(writes)

    def wait_s(self, now: float) -> float:
        """Until there is something to do: 0 if there is now."""
        if not self.feed.is_idle:
            return 0.0
        return min((max(0.0, replay.retry - now) for replay in self._replays), default=float("inf"))

    def work(self, now: float) -> None:
        """Tell a batch, more if too much waits; then go on with a replay. Some milliseconds at most."""
        for sequence, batch in self.feed.turn(time.time()):
            _send(self._publisher, self._topic, sequence, batch)
        if self.replay is not None:
            self._take_replays(self.replay, now)
            if self._replays:
                self._serve_replay(self.replay, now)

    def statistics(self) -> dict[str, int | str]:
        """As ``stats()`` shows it. What a subscriber has lost nobody knows but itself: PUB sockets do not tell."""
        feed = self.feed
        return {
            "pool": self._pool,
            "boot": feed.first >> BOOT_SHIFT,
            "batches": feed.next - feed.first,
            "backlog_bytes": feed.backlog_bytes,
            "ring_batches": feed.next - feed.oldest,
            "ring_bytes": feed.ring_bytes,
            "replays_running": len(self._replays),
            **self._counters,
            "snapshots": feed.wholes,
        }

    # -- replays ----------------------------------------------------------------------------------------------------

    def _take_replays(self, socket: zmq.Socket[bytes], now: float) -> None:
        for _ in range(_REQUESTS):
            if not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return
            frames = socket.recv_multipart(_NOBLOCK)
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                self._counters["replays_malformed"] += 1
                continue
            route = frames[0]
            for replay in [replay for replay in self._replays if replay.route == route]:
                self._replays.remove(replay)
                self._counters["replays_given_up"] += 1
            if len(self._replays) < REPLAYS:
                self._replays.append(_Replay(self.feed, route, int.from_bytes(frames[2], "big"), now))
                self._counters["replays"] += 1
            else:
                self._counters["replays_refused"] += 1

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
            self._counters["replays_given_up"] += over
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            over = True
            self._counters["replays_given_up"] += 1
        if not over:
            self._replays.append(replay)

    def _go_on(self, socket: zmq.Socket[bytes], replay: _Replay) -> bool:
        """Whether it is over. Errors: zmq.Again when the peer's queue is full."""
        for _ in range(_REPLAY_BATCHES):
            message = replay.batches.message()
            if message is None:
                return False
            if message is event_feed.END:
                _answer(socket, replay.route, b"", message)
                return True
            _answer(socket, replay.route, self._topic, message)
            replay.batches.sent()
            self._counters["replayed_batches"] += 1
        return False


_COUNTERS = ("replays", "replayed_batches", "replays_given_up", "replays_refused", "replays_malformed")
"""Of replays: begun; what was sent for them; ended because the peer was gone, took nothing or asked anew; too many at a
time; requests that were none."""


def _answer(socket: zmq.Socket[bytes], route: bytes, topic: bytes, message: Message) -> None:
    """All frames or none. Errors: zmq.Again, or that the peer is gone."""
    socket.send(route, _WITH_MORE)
    socket.send(b"", _WITH_MORE)
    _send(socket, topic, *message)


def _send(socket: zmq.Socket[bytes], topic: bytes, sequence: int, batch: bytes | bytearray) -> None:
    """What may be huge is not copied: a snapshot is the same memory for all who ask, until the last of them has it."""
    socket.send(topic, _WITH_MORE)
    socket.send(sequence.to_bytes(8, "big", signed=sequence < 0), _WITH_MORE)
    socket.send(batch, _NOBLOCK, copy=isinstance(batch, bytes))
