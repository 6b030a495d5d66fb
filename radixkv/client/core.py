"""The client without its sockets: numbers requests, matches replies, knows the session, keeps the outbox.

A shell does the rest: it connects (``opened``, or ``rejoined`` and ``resumed``, see ``resume.py``), asks for messages
(``envelop``), hands in what it receives (``receive``), and says what never came (``abandon``). All methods may be
called from any thread.

**What is known of a sequence changes in one place**, ``receive``, and only by a reply whose request is still pending.
Requests become pending in ``_number`` under the session's present epoch; ``rejoined``, which begins another epoch,
takes all of them back. All three hold ``_settling``. So from the moment at which the claims of a resume are made, no
reply of the old daemon can change what they say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count, takewhile
from weakref import WeakValueDictionary

from radixkv.client.batch import Batch, FreeItem, Outgoing, Part, ShareItem, lost
from radixkv.client.effects import Ask, Repeat
from radixkv.client.outbox import Drop, Outbox
from radixkv.client.sequence import SequenceState
from radixkv.client.session import Session
from radixkv.commands import Body, Reply, Request, Welcome
from radixkv.errors import RadixKVError, Timeout, Unavailable


class Away(Unavailable):
    """The daemon went away, and the session may go on with the next one: nothing of this message counts until then."""


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
        """By request id, in the order of numbering."""
        self._late: WeakValueDictionary[int, Outgoing] = WeakValueDictionary()
        """Abandoned, but their sequences would still like to know."""
        self._unwanted: dict[int, list[Drop]] = {}
        """What abandoned requests may still make, by request id: it can be freed as soon as they are answered."""

    # -- the session ----------------------------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """Connected: from now on verbs work in this session."""
        self.session = session

    def left(self, session: Session, epoch: int) -> None:
        """The daemon of this epoch went away, or says that it does not know the session.

        If the next one may know it, the session is away until then; else it is over.
        """
        with self._settling:
            if epoch != session.epoch:
                return
            if session.welcome.resumes and not session.over:
                session.away = True
            else:
                self.ended(session)

    def ended(self, session: Session) -> bool:
        """The session is over, its sequences are lost. False if that was known."""
        with self._lock:
            known = session.over
            session.over = True
            session.away = False
            if self.session is session:
                self.session = None
        return not known

    def rejoined(self, session: Session, welcome: Welcome) -> list[SequenceState]:
        """Another daemon knows the session. Whatever the former one still says is nothing to us any more.

        Gives the sequences to be claimed. What is known of them stays as it is until ``resumed``.
        """
        with self._settling:
            self._take_back([out for out in self._pending.values() if out.request.session == session.id], session)
            for request, out in list(self._late.items()):
                if out.request.session == session.id:
                    del self._late[request]
            session.welcome = welcome
            claimed = sorted(session.sequences, key=lambda seq: seq.id)
            for seq in claimed:
                seq.unsettled.clear()
        return claimed

    def resumed(self, session: Session, epoch: int) -> None:
        """Everything has been claimed: verbs go on."""
        with self._settling:
            if epoch == session.epoch and not session.over:
                session.away = False

    # -- ids ------------------------------------------------------------------------------------------------------

    def sequence_ids(self, n: int) -> int:
        """The first of n consecutive ids that no other sequence of this client ever has."""
        with self._lock:
            first = self._next_sequence
            self._next_sequence += n
        return first

    # -- out ------------------------------------------------------------------------------------------------------

    def envelop(self, ask: Ask, until: float, epoch: int) -> list[Outgoing]:
        """The messages to send for an Ask, in order: what the outbox has ready, then its own parts without an answer.

        ``until``: monotonic; later than this the caller does not want it any more. ``epoch``: that of the daemon they
        will be sent to. Ids are given here and the shell sends at once, so that they arrive nearly in order.
        Errors: Away, when the session goes on with another daemon.
        """
        now = self.clock()
        session = ask.session
        with self._settling:
            if epoch != session.epoch:
                raise Away("the session goes on with another daemon")
            batches, cancels = ([], []) if ask.alone else self.outbox.take(session, now)
            soon = min(until, now + self.timeout)
            carried = [self._number(session, soon, cancel) for cancel in cancels]
            carried += [self._number(session, soon, batch, deferred=True) for batch in batches]
            answered = {place: out for place, out in enumerate(ask.sent) if out.reply is not None}
            ask.sent = [answered.get(i) or self._number(session, until, part) for i, part in enumerate(ask.parts)]
        return carried + [out for out in ask.sent if out.reply is None]

    def _number(self, session: Session, deadline: float, part: Body | Part, deferred: bool = False) -> Outgoing:
        body = part.body() if isinstance(part, Part) else part
        if isinstance(part, Batch):
            for item in part.items:
                item.leaves()
        request = Request(session.id, session.epoch, next(self._request_ids), deadline, body)
        out = Outgoing(request, part if isinstance(part, Part) else None, deferred)
        self._pending[request.id] = out
        return out

    def again(self, repeat: Repeat, epoch: int) -> list[Outgoing]:
        """The same request is about to be sent a second time; not to another daemon, which would execute it anew."""
        out = repeat.outgoing
        with self._settling:
            if epoch != repeat.session.epoch or out.request.epoch != epoch:
                return []
            out.repeated = True
            self._pending[out.request.id] = out
        return [out]

    # -- in -------------------------------------------------------------------------------------------------------

    def receive(self, request: int, reply: Reply, session: Session) -> None:
        """A reply arrived, on whatever socket. One that nobody waits for any longer is dropped.

        Errors: Away, when the daemon does not know the session but another one may.
        """
        with self._settling:
            out = self._pending.get(request) or self._late.get(request)
            self._late_grant(request)
            if out is None:
                return
            if lost(reply):
                self.left(session, session.epoch)
                if session.away:
                    raise Away("the daemon does not know the session")
            self._pending.pop(request, None)
            self._late.pop(request, None)
            try:
                out.settle(reply)
            finally:
                if out.deferred and out.batch is not None:
                    self.outbox.landed(out.batch, session)

    def abandon(self, outgoing: Iterable[Outgoing], session: Session, error: RadixKVError) -> None:
        """No reply came to these in time, or none can come any more.

        What they would have made is freed later; sequences they would have changed are asked about (``Repeat``)
        before their next verb, unless a late reply settles them first. When the daemon went away, there is nothing to
        be asked: what it executed and did not answer, the next one will not know of.
        """
        with self._settling:
            unanswered = [out for out in outgoing if self._pending.get(out.request.id) is out]
            if session.away:
                self._take_back(unanswered, session)
                return
            for out in unanswered:
                del self._pending[out.request.id]
                self._give_back(out, session)
                if out.batch is not None:
                    self._late[out.request.id] = out
                    self._doubt(out, out.batch, session, error)

    def _doubt(self, out: Outgoing, batch: Batch, session: Session, error: RadixKVError) -> None:
        for item in batch.items:
            item.error = error
            if isinstance(item, ShareItem):
                item.count = 0  # the children are given back
            if isinstance(item, FreeItem):
                self.outbox.drop(session, item.seq.id)
            elif out not in item.seq.unsettled:
                item.seq.unsettled.append(out)
        if out.deferred:
            self.outbox.landed(batch, session, unanswered=True)

    def _take_back(self, outgoing: Sequence[Outgoing], session: Session) -> None:
        """These count as never sent. Who waits for one asks the next daemon; the outbox's go to it before others."""
        for out in sorted(outgoing, key=lambda out: out.request.id, reverse=True):
            del self._pending[out.request.id]
            if out.deferred and out.batch is not None:
                self.outbox.recall(out.batch, session)

    def give_up(self, ask: Ask, sequence: int) -> None:
        """The caller of a reserve or an adopt no longer waits: nothing may be left behind for it.

        What a request without an answer may make is freed as ``abandon`` says; one that waits in the daemon's queue is
        taken out at once.
        """
        self.abandon(ask.sent, ask.session, Timeout("the call was interrupted"))
        for out in ask.sent:
            if out.reply is not None:
                self.outbox.drop(ask.session, sequence)
            elif ask.wait_s > 0:
                self.outbox.cancel(ask.session, out.request.id)
        self.outbox.press()

    def call_off(self, ask: Ask) -> None:
        """The caller of a request that waits in the daemon and makes nothing is no longer there."""
        self.abandon(ask.sent, ask.session, Timeout("the call was interrupted"))
        for out in ask.sent:
            if out.reply is None:
                self.outbox.cancel(ask.session, out.request.id)

    def _give_back(self, out: Outgoing, session: Session) -> None:
        """Until its deadline the request may still be executed: what it makes is freed after that, or a late reply."""
        made = out.part.makes() if out.part is not None else ()
        if not made:
            return
        deadline, now = out.request.deadline, self.clock()
        for request in list(takewhile(lambda earlier: _over(self._unwanted[earlier], now), self._unwanted)):
            del self._unwanted[request]
        self._unwanted[out.request.id] = [self.outbox.drop(session, sequence, deadline) for sequence in made]

    def _late_grant(self, request: int) -> None:
        """It has been executed, or never will be: what it made need not wait for its deadline any more."""
        drops = self._unwanted.pop(request, ())
        for drop in drops:
            drop.not_before = 0.0
        if drops:
            self.outbox.press()


def _over(drops: Sequence[Drop], now: float) -> bool:
    return all(drop.not_before <= now for drop in drops)


def no_reply(core: Core, wait_s: float = 0.0) -> Timeout:
    limit = core.timeout + wait_s
    return Timeout(f"no reply within {limit:g} s", limit_s=limit)
