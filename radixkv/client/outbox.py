"""What is to be sent without a caller waiting for it: fenced operations, forgotten sequences, cancelled requests.

::

    seq.commit(16, after=e1)   queue of seq:  [commit 16 | e1] [commit 32 | e2] [free | -]
    seq.commit(32, after=e2)                   front: goes out when e1 is done, e2 not before it
    seq.free()                                 no fence of its own: goes out behind the others

Any thread's next message, and the heartbeat, takes along what is ready. A sequence with operations on their way
(``flying``) sends nothing more until they are answered, however long that takes and how often they have to be asked
about (``Core.envelop``): messages of different threads may overtake each other, and answers may be lost one by one. For
the same reason they all leave in one message, but for a free, after which no answer matters. Those that a daemon did
not answer before it went away come back to the front of their queues (``recall``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from radixkv.client.batch import Batch, CommitItem, FreeItem, HandoffItem, Item, TruncateItem
from radixkv.client.packing import pack
from radixkv.client.sequence import SequenceState
from radixkv.client.session import Session
from radixkv.commands import Cancel
from radixkv.errors import RadixKVError, SessionLost, Unavailable

ITEMS_A_MESSAGE = 1024
FAILED_KEPT = 1024
"""Sequences whose deferred errors wait for a flush; those before them are forgotten."""


class Event(Protocol):
    """A fence: something on a device that is done or not yet. ``torch.cuda.Event`` is one.

    ``query`` has to answer at once and must not call radixkv: it runs inside whatever call comes next.
    """

    def query(self) -> bool: ...

    def synchronize(self) -> Any: ...


class Deferred:
    """An operation behind its fence."""

    __slots__ = ("event", "failure", "item", "recalled")

    def __init__(self, item: Item, event: Event | None, recalled: bool = False) -> None:
        self.item = item
        self.event = event
        self.recalled = recalled
        """It has been sent to a daemon that went away."""
        self.failure: RadixKVError | None = None

    def done(self) -> bool:
        """Has the device finished? An event that fails is ``failure``: what it fenced is not known to be good."""
        event = self.event  # whoever has waited for it takes it away
        if event is None:
            return True
        try:
            return bool(event.query())
        except Exception as error:  # noqa: BLE001 - foreign code; its failure belongs to whoever gave us the event
            self.failure = Unavailable(f"the event of a fenced operation failed: {error!r}")
            return True

    def executed(self) -> bool:
        """It need not be sent again: the next daemon knew more to be complete than this commit says."""
        return self.recalled and isinstance(self.item, CommitItem) and self.item.n < self.item.seq.committed_tokens


class Drop:
    """The id of a sequence that nobody holds, to be freed from a monotonic time on."""

    __slots__ = ("not_before", "sequence", "session")

    def __init__(self, session: Session, sequence: int, not_before: float) -> None:
        self.session = session
        self.sequence = sequence
        self.not_before = not_before


class Outbox:
    def __init__(self) -> None:
        self.changed: Callable[[], None] = _nothing
        """Called when operations on their way have been answered (a shell wakes those that wait for it)."""
        self.stirred: Callable[[], None] = _nothing
        """Called when there is something to look after, or to send soon."""
        self.pressing = False
        """There is something that should not wait for the next message: pages that nobody holds, as far as is known
        here, a request that waits for nobody."""
        self._lock = threading.Lock()
        self._dropped: deque[Drop] = deque()
        self._cancels: deque[tuple[Session, int]] = deque()
        self._queues: dict[SequenceState, deque[Deferred]] = {}
        self._flying: dict[SequenceState, list[Item]] = {}
        self._failed: dict[SequenceState, None] = {}

    def detach(self) -> None:
        """Nobody is to be called any more."""
        self.changed = self.stirred = _nothing

    # -- putting in -----------------------------------------------------------------------------------------------

    def drop(self, session: Session, sequence: int, not_before: float = 0.0) -> Drop:
        """Free an id that nobody holds. Safe in a finaliser: it takes no lock.

        ``not_before``: the deadline of the request that may still create it.
        """
        drop = Drop(session, sequence, not_before)
        if not session.over:
            self._dropped.append(drop)
        return drop

    def press(self) -> None:
        """What is ready should go out soon."""
        self.pressing = True
        self.stirred()

    def cancel(self, session: Session, request: int) -> None:
        self._cancels.append((session, request))

    def defer(self, item: Item, event: Event | None) -> None:
        with self._lock:
            first = not self._queues
            self._queues.setdefault(item.seq, deque()).append(Deferred(item, event))
        if first:
            self.stirred()

    def put_first(self, item: Item) -> None:
        """It goes out before whatever the sequence has queued."""
        with self._lock:
            self._queues.setdefault(item.seq, deque()).appendleft(Deferred(item, None))

    # -- asking ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Fenced operations that have not gone out yet."""
        with self._lock:
            return sum(len(queue) for queue in self._queues.values())

    def ready(self) -> bool:
        """Has the device finished what any of them waits for, and nothing else holds it up?"""
        with self._lock:
            return any(queue[0].done() for seq, queue in self._queues.items() if not self._held(seq))

    def behind(self, seq: SequenceState) -> bool:
        """Has the next operation of this sequence to queue?"""
        return seq in self._queues or seq in self._flying

    def flying(self, seq: SequenceState) -> bool:
        """Has some operation of this sequence gone out that is not answered yet?"""
        return seq in self._flying

    def holds(self, item: Item) -> bool:
        """Is this operation queued, or on its way?"""
        with self._lock:
            queued = [deferred.item for deferred in self._queues.get(item.seq, ())]
            return item in queued or item in self._flying.get(item.seq, ())

    def busy(self, pool: Any) -> list[SequenceState]:
        """Sequences of one pool that have operations queued or on their way."""
        with self._lock:
            return [seq for seq in {**self._queues, **self._flying} if seq.pool is pool]

    def _held(self, seq: SequenceState) -> bool:
        return seq in self._flying or bool(seq.unsettled)

    def fenced(self, seq: SequenceState, before_extend: bool = False) -> list[Deferred]:
        """What to synchronize before all queued operations (or, before an extend, the last truncate) are ready."""
        with self._lock:
            queue = list(self._queues.get(seq, ()))
        if before_extend:
            while queue and not isinstance(queue[-1].item, TruncateItem):
                queue.pop()
        return [deferred for deferred in queue if deferred.event is not None]

    def truncates(self, seq: SequenceState) -> bool:
        """Is a truncate of this sequence queued or on its way?"""
        if not self.behind(seq):
            return False
        with self._lock:
            items = [deferred.item for deferred in self._queues.get(seq, ())] + self._flying.get(seq, [])
        return any(isinstance(item, TruncateItem) for item in items)

    def truncates_after(self, item: Item) -> bool:
        """Has another truncate of the item's sequence been sent after it?"""
        with self._lock:
            flying = self._flying.get(item.seq, [])
            later = flying[flying.index(item) + 1 :] if item in flying else []
        return any(isinstance(other, TruncateItem) for other in later)

    def unfinished(self, pool: Any) -> list[Deferred | SequenceState]:
        """Of one pool: the operation at the front of each queue, and sequences with operations on their way."""
        with self._lock:
            fronts = [queue[0] for seq, queue in self._queues.items() if seq.pool is pool and queue]
            return [*fronts, *(seq for seq in self._flying if seq.pool is pool)]

    def failure(self, pool: Any) -> RadixKVError | None:
        """The first deferred error of a pool that nobody has seen; it counts as seen."""
        for seq in list(self._failed):
            if seq.pool is pool:
                return self.seen(seq)
        return None

    def seen(self, seq: SequenceState) -> RadixKVError | None:
        """The sequence's deferred error, if it has one; it is told now."""
        error, seq.deferred_error = seq.deferred_error, None
        self._failed.pop(seq, None)
        return error

    # -- taking out -----------------------------------------------------------------------------------------------

    def take(self, session: Session, now: float) -> tuple[list[Batch], list[Cancel]]:
        """All that is ready. Each batch must come back by ``landed``."""
        self.pressing = False
        if not (self._dropped or self._queues or self._cancels):
            return [], []
        with self._lock:
            dropped = self._ready_drops(session, now)
            cancels = self._ready_cancels(session)
            items = self._ready_items(session)
            batches = _with_drops(pack(items, ITEMS_A_MESSAGE), dropped)
        return batches, cancels

    def _ready_drops(self, session: Session, now: float) -> list[int]:
        ready = []
        for _ in range(len(self._dropped)):
            drop = self._dropped.popleft()
            if drop.session is not session:
                continue
            if drop.not_before > now:
                self._dropped.append(drop)
            else:
                ready.append(drop.sequence)
        return ready

    def _ready_cancels(self, session: Session) -> list[Cancel]:
        ready = []
        while self._cancels:
            owner, request = self._cancels.popleft()
            if owner is session:
                ready.append(Cancel(request))
        return ready

    def _ready_items(self, session: Session) -> list[Item]:
        items: list[Item] = []
        for seq, queue in list(self._queues.items()):
            if seq.session is not session or seq.lost:
                self._lose(seq)
                continue
            if self._held(seq):
                continue
            if seq.broken is not None and not isinstance(queue[0].item, FreeItem):
                self._distrust(seq, queue, seq.broken)
            self._go(seq, queue, items)
            if not queue:
                del self._queues[seq]
        return items

    def _go(self, seq: SequenceState, queue: deque[Deferred], items: list[Item]) -> None:
        """What of one sequence may leave together, if there is room for it."""
        sent: list[Item] = []
        while queue and len(items) < ITEMS_A_MESSAGE and queue[0].done():
            front = queue[0]
            if front.failure is not None:
                front.event = None
                self._distrust(seq, queue, front.failure)
            elif front.executed():
                queue.popleft()
            elif _goes_with(front.item, sent):
                sent.append(queue.popleft().item)
                items.append(front.item)
            else:
                break
        if sent:
            self._flying[seq] = sent

    def _distrust(self, seq: SequenceState, queue: deque[Deferred], why: RadixKVError) -> None:
        """Nothing of the sequence is published or passed on any more; giving it up is still right."""
        ends = [one for one in queue if isinstance(one.item, FreeItem | HandoffItem)]
        queue.clear()
        queue.extend(Deferred(FreeItem(seq), one.event) for one in ends)
        self._note(seq, why)

    def _lose(self, seq: SequenceState) -> None:
        queue = self._queues.pop(seq)
        if any(not isinstance(deferred.item, FreeItem | HandoffItem) for deferred in queue):
            self._note(seq, SessionLost("the session ended before a fenced operation went out"))

    # -- coming back ----------------------------------------------------------------------------------------------

    def landed(self, batch: Batch, session: Session, refused: bool = False) -> None:
        """A batch of ours was answered, or never will be. ``refused``: as a whole; then what it was to free is freed
        again later."""
        with self._lock:
            for item in batch.items:
                flying = self._flying.get(item.seq, [])
                if item in flying:
                    flying.remove(item)
                if not flying:
                    self._flying.pop(item.seq, None)
                if item.error is not None:
                    self._note(item.seq, item.error)
        if refused and batch.dropped:
            for sequence in batch.dropped:
                self.drop(session, sequence)
            self.press()
        self.changed()

    def recall(self, batch: Batch, session: Session) -> None:
        """The daemon went away before it answered: these operations are the first to go to the next one."""
        with self._lock:
            for item in reversed(batch.items):
                flying = self._flying.get(item.seq, [])
                if item in flying:
                    flying.remove(item)
                    self._queues.setdefault(item.seq, deque()).appendleft(Deferred(item, None, recalled=True))
                if not flying:
                    self._flying.pop(item.seq, None)
        for sequence in batch.dropped:
            self.drop(session, sequence)
        self.changed()

    def _note(self, seq: SequenceState, error: RadixKVError) -> None:
        if seq.deferred_error is None:
            seq.deferred_error = error
        self._failed[seq] = None
        if len(self._failed) > FAILED_KEPT:
            del self._failed[next(iter(self._failed))]


def _goes_with(item: Item, sent: list[Item]) -> bool:
    """May it leave when these of its sequence do? In their message: then one answer is for all of them. Or as a free:
    whatever is heard after that is nothing to anybody."""
    return not sent or isinstance(item, FreeItem) or (bool(item.field) and sent[-1].rank <= item.rank)


def _with_drops(batches: list[Batch], dropped: list[int]) -> list[Batch]:
    """Frees of forgotten ids ride in the first Step that has room, the rest in messages of their own."""
    room = 0
    if batches and batches[0].items[0].field:
        room = ITEMS_A_MESSAGE - len(batches[0].items)
        batches[0].dropped = dropped[:room]
    rest = dropped[room:]
    own = [Batch(rest[i : i + ITEMS_A_MESSAGE]) for i in range(0, len(rest), ITEMS_A_MESSAGE)]
    return own + batches


def _nothing() -> None:
    pass
