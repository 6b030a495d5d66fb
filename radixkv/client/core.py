"""The client without its sockets: numbers requests, matches replies, knows the session, keeps the outbox.

A shell does the rest: it connects (``opened``), asks for messages (``envelop``), hands in what it receives
(``receive``), and says what never came (``abandon``). All methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import count
from weakref import WeakValueDictionary

from radixkv.client.batch import Batch, FreeItem, Outgoing, ShareItem, lost
from radixkv.client.effects import Ask, Repeat
from radixkv.client.outbox import Outbox
from radixkv.client.session import Session
from radixkv.commands import Body, Reply, Request
from radixkv.errors import RadixKVError, Timeout


class Core:
    """One client's state. ``clock`` is CLOCK_MONOTONIC in seconds; ``timeout`` is how long a reply may take."""

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        self.timeout = timeout
        self.clock = clock
        self.outbox = Outbox()
        self.session: Session | None = None
        self._lock = threading.Lock()
        self._settling = threading.RLock()
        self._request_ids = count(1)
        self._next_sequence = 1
        self._pending: dict[int, Outgoing] = {}
        self._late: WeakValueDictionary[int, Outgoing] = WeakValueDictionary()
        """Abandoned, but their sequences would still like to know."""

    # -- the session ----------------------------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """Connected: from now on verbs work in this session."""
        self.session = session

    def ended(self, session: Session) -> bool:
        """The session is over, its sequences are lost. False if that was known."""
        with self._lock:
            known = session.over
            session.over = True
            if self.session is session:
                self.session = None
        return not known

    # -- ids ------------------------------------------------------------------------------------------------------

    def sequence_ids(self, n: int) -> int:
        """The first of n consecutive ids that no other sequence of this client ever has."""
        with self._lock:
            first = self._next_sequence
            self._next_sequence += n
        return first

    # -- out ------------------------------------------------------------------------------------------------------

    def envelop(self, ask: Ask, until: float) -> list[Outgoing]:
        """The messages to send for an Ask, in order: what the outbox has ready, then its own parts.

        ``until``: monotonic; later than this the caller does not want it any more. Ids are given here and the shell
        sends at once, so that they arrive nearly in order.
        """
        now = self.clock()
        batches, cancels = self.outbox.take(ask.session, now)
        soon = min(until, now + self.timeout)
        carried = [self._number(ask.session, soon, cancel) for cancel in cancels]
        carried += [self._number(ask.session, soon, batch, deferred=True) for batch in batches]
        own = [self._number(ask.session, until, part) for part in ask.parts]
        ask.sent.extend(own)
        return carried + own

    def _number(self, session: Session, deadline: float, part: Body | Batch, deferred: bool = False) -> Outgoing:
        batch = part if isinstance(part, Batch) else None
        body = part.body() if isinstance(part, Batch) else part
        request = Request(session.id, session.epoch, next(self._request_ids), deadline, body)
        out = Outgoing(request, batch, deferred)
        self._pending[request.id] = out
        return out

    def again(self, repeat: Repeat) -> list[Outgoing]:
        """The same request is about to be sent a second time."""
        out = repeat.outgoing
        out.repeated = True
        self._pending[out.request.id] = out
        return [out]

    # -- in -------------------------------------------------------------------------------------------------------

    def receive(self, request: int, reply: Reply, session: Session) -> None:
        """A reply arrived, on whatever socket. One that nobody waits for any longer is dropped."""
        out = self._pending.pop(request, None) or self._late.pop(request, None)
        if out is None:
            return
        try:
            with self._settling:
                out.settle(reply)
        finally:
            if out.deferred and out.batch is not None:
                self.outbox.landed(out.batch, session)
        if lost(reply):
            self.ended(session)

    def abandon(self, outgoing: Iterable[Outgoing], session: Session, error: RadixKVError) -> None:
        """No reply came to these in time, or none can come any more.

        What they would have made is freed later; sequences they would have changed are asked about (``Repeat``)
        before their next verb, unless a late reply settles them first.
        """
        for out in outgoing:
            if out.reply is not None:
                continue
            self._pending.pop(out.request.id, None)
            if out.batch is None:
                continue
            self._late[out.request.id] = out
            for item in out.batch.items:
                item.error = error
                if isinstance(item, ShareItem):
                    self.drop_children(session, item, out.request.deadline)
                if isinstance(item, FreeItem):
                    self.outbox.drop(session, item.seq.id)
                elif out not in item.seq.unsettled:
                    item.seq.unsettled.append(out)
            if out.deferred:
                self.outbox.landed(out.batch, session, unanswered=True)

    def drop_children(self, session: Session, item: ShareItem, not_before: float) -> None:
        for child in range(item.first_child, item.first_child + item.count):
            self.outbox.drop(session, child, not_before)
        item.count = 0

    def give_up(self, ask: Ask, sequence: int) -> None:
        """The caller of a reserve or an adopt no longer waits: nothing may be left behind for it.

        Until its deadline the request may still be executed, so the free goes out after that; one that waits in the
        daemon's queue is taken out at once.
        """
        for out in ask.sent:
            not_before = out.request.deadline if out.reply is None else 0.0
            self.outbox.drop(ask.session, sequence, not_before)
            if ask.wait_s > 0 and out.reply is None:
                self.outbox.cancel(ask.session, out.request.id)


def no_reply(core: Core, wait_s: float = 0.0) -> Timeout:
    limit = core.timeout + wait_s
    return Timeout(f"no reply within {limit:g} s", limit_s=limit)
