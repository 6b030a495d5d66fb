"""The batches of one pool: numbered, as bytes, the last of them kept. No sockets and no clock: ``events.py`` has those.

::

    take(writes) ──> backlog ──> ledger ──slices──> codec ──> a batch: into the ring, and to whoever listens
                                   │
    Replay <── the ring's batches, if need be behind one with everything (Whole)

A sequence number is the daemon's start in milliseconds, shifted left by ``BOOT_SHIFT``, plus the number of the batch.
So numbers never return and always rise; within a daemon's life they have no holes; after a restart there is one that
anybody sees who looks for holes. The first batch of a daemon says AllBlocksCleared; all that is cached follows.

A replay begins with the batch asked for. If that is not there any more (or of an earlier daemon), it begins with one
batch that says AllBlocksCleared and then all that was cached up to its sequence number: what was missed is not told,
but nothing is wrong afterwards. That batch is made once for all who need it at the time.

Work comes in bounded pieces, whatever the size of the pool: a ``turn`` is a slice of a sweep and about a batch; if too
much waits, more, but no more than twice what requests have brought since the last turn. A replay's step is one slice.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator

from radixkv.commands import Assign, Copied, NamespaceRecord, Publish, Retire, Write
from radixkv.config import EventsConfig, PoolConfig
from radixkv.ipc.event_codec import EventCodec, tokens_in
from radixkv.ipc.event_ledger import Ledger, Sizes, Slice
from radixkv.types import PAGE_ID_BYTES

BOOT_SHIFT = 22
BUFFER_BYTES = 64 * 2**20
"""What is kept for replays is bounded by this too."""
BACKLOG_BYTES = 4 * 2**20
"""What may wait to be told, unless the daemon has just begun. Beyond, a turn does more."""
TURN_LOOKS = 2048
"""Places and writes that a turn looks at if it finds hardly anything to tell."""
_WRITE_BYTES = 128

Message = tuple[int, bytes | bytearray]
"""Sequence number and batch."""
END: Message = (-1, b"")


class Feed:
    def __init__(self, config: EventsConfig, pool: PoolConfig, ledger: Ledger, first: int, sizes: Sizes) -> None:
        """``first``: the sequence number of the first batch, which tells what ``ledger`` knows already."""
        self.first = self.next = first
        self.backlog_bytes = 0
        self.ring_bytes = 0
        self.wholes = 0
        """How often everything has been encoded for replays."""
        self._ledger = ledger
        self._codec = EventCodec(config, pool.spec.page_size)
        self._tokens = sizes.tokens
        self._ring: deque[bytes] = deque()
        """The batches before ``next``."""
        self._ring_batches = config.buffer_batches
        self._backlog: deque[tuple[Write, int]] = deque()
        """Writes and their sizes."""
        self._debt = 0
        """Places and writes taken since the last turn."""
        self._folding: Iterator[Slice] | None = ledger.everything()
        """Of what is being told, the rest. What the daemon has found comes before all else."""
        self._wanted = False
        """Somebody needs everything: it is begun between two writes, when no path is half gone."""
        self._fresh: Whole | None = None
        """Begun, and nobody has it yet."""
        self._whole: weakref.ref[Whole] | None = None

    # -- batches ----------------------------------------------------------------------------------------------------

    def take(self, writes: Iterable[Write]) -> None:
        """Remember what has happened; it is told later."""
        for write in writes:
            measured = _measure(write)
            if measured is not None and write.pool == self._ledger.pool:  # type: ignore[union-attr]
                places, size = measured
                self._backlog.append((write, size))
                self.backlog_bytes += size
                self._debt += 1 + places

    @property
    def is_idle(self) -> bool:
        """Whether all is told."""
        return self._folding is None and not self._backlog and not self._ledger.sweeping

    def turn(self, timestamp: float) -> list[Message]:
        """Tell what is to be told next: mostly one batch, or none."""
        owed, self._debt = 2 * self._debt, 0
        messages, done = [], 0
        while True:
            encoded, looked = self._some()
            done += looked
            if encoded:
                messages.append(self._publish(self._codec.batch(timestamp, encoded)))
            if self._wanted and self._folding is None:
                self._begin_whole(timestamp)
            if self.backlog_bytes <= BACKLOG_BYTES or done >= owed:
                return messages

    def _some(self) -> tuple[list[bytes], int]:
        """The events of about a batch, and how many places and writes have been looked at, not counting sweeps."""
        encoded: list[bytes] = []
        tokens, before = 0, self._ledger.looked
        while tokens < self._tokens and self._ledger.looked - before < TURN_LOOKS:
            if self._folding is None and (self._wanted or not self._backlog):
                break
            tokens += self._encode(self._step(), encoded)
        looked = self._ledger.looked - before
        if self._ledger.sweeping:
            self._encode(self._ledger.sweep(), encoded)
        return encoded, looked

    def _step(self) -> Slice:
        if self._folding is None:
            write, size = self._backlog.popleft()
            self.backlog_bytes -= size
            self._folding = self._ledger.fold(write)
        found = next(self._folding, None)
        if found is None:
            self._folding = None
        return found or []

    def _encode(self, events: Slice, encoded: list[bytes]) -> int:
        """Returns a measure of how much it was, in tokens."""
        encoded += [self._codec.event(event) for event in events]
        return sum(map(tokens_in, events))

    def _publish(self, batch: bytes) -> Message:
        self.next += 1
        self._ring.append(batch)
        self.ring_bytes += len(batch)
        while len(self._ring) > self._ring_batches or (self.ring_bytes > BUFFER_BYTES and len(self._ring) > 1):
            self.ring_bytes -= len(self._ring.popleft())
        if self._fresh is not None and self._fresh.at + 1 < self.oldest:
            self._fresh = None  # who asked for it is gone
        return self.next - 1, batch

    # -- what replays need --------------------------------------------------------------------------------------------

    @property
    def oldest(self) -> int:
        """The first batch that is still in the ring."""
        return self.next - len(self._ring)

    def batch(self, sequence: int) -> bytes:
        return self._ring[sequence - self.oldest]

    def reaches(self, sequence: int) -> bool:
        """Whether the ring has all that a subscriber lacks from here on: also if that is all since the beginning."""
        return (self.oldest <= sequence or self.oldest == self.first) and sequence <= self.next

    def whole(self) -> Whole | None:
        """Everything, for who needs it now: the one that others are waiting for or are being sent, if the ring has what
        follows it. None: it is begun with a coming turn."""
        found = self._fresh or (self._whole() if self._whole is not None else None)
        if found is not None and found.at + 1 < self.oldest:
            found = None
        self._fresh, self._wanted = None, found is None
        return found

    def _begin_whole(self, timestamp: float) -> None:
        self._fresh = Whole(self.next - 1, self._ledger.everything(), self._codec, timestamp)
        self._whole = weakref.ref(self._fresh)
        self._wanted = False
        self.wholes += 1


class Whole:
    """One batch that says AllBlocksCleared, and then all that is cached after batch ``at``."""

    def __init__(self, at: int, slices: Iterator[Slice], codec: EventCodec, timestamp: float) -> None:
        self.at = at
        self.batch: bytearray | None = None
        """None: there are slices left."""
        self._slices = slices
        self._codec = codec
        self._growing = codec.long_batch(timestamp)
        self.go_on()  # the first slice says what is part of it

    def go_on(self) -> None:
        """A slice."""
        found = next(self._slices, None)
        if found is None:
            self.batch = self._growing.end()
        else:
            self._growing.add([self._codec.event(event) for event in found])


class Replay:
    """One asker's way through the batches, from ``start`` on."""

    def __init__(self, feed: Feed, start: int) -> None:
        self._feed = feed
        self._at = start
        self._begun = False
        self._whole: Whole | None = None

    def message(self) -> Message | None:
        """What is to be sent next, the same until ``sent``; END: nothing more. None: not known yet, ask again.

        Who is slower than the ring gets what is left of it, and sees the hole.
        """
        feed = self._feed
        if not self._begun and self._whole is None and not feed.reaches(self._at):
            self._whole = feed.whole()
            if self._whole is None:
                return None
        if self._whole is not None:
            if self._whole.batch is not None:
                return self._whole.at, self._whole.batch
            self._whole.go_on()
            return None
        self._at = max(self._at, feed.oldest)
        return (self._at, feed.batch(self._at)) if self._at < feed.next else END

    def sent(self) -> None:
        self._begun = True
        self._at, self._whole = (self._at if self._whole is None else self._whole.at) + 1, None


def _measure(write: Write) -> tuple[int, int] | None:
    """Places and bytes; None: it does not matter to routers."""
    match write:
        case Publish():
            pages, more = write.pages, len(write.tokens)
        case Assign() | Retire():
            pages, more = write.pages, 0
        case Copied():
            pages, more = write.sources, len(write.targets)
        case NamespaceRecord():
            pages, more = b"", len(write.canonical)
        case _:
            return None
    return len(pages) // PAGE_ID_BYTES, _WRITE_BYTES + len(pages) + more
