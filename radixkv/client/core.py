"""The client without its sockets: numbers requests, matches replies, knows the session, keeps the outbox.

A shell does the rest: it connects (``opened``, or ``rejoined`` and ``resumed``, see ``resume.py``), asks for messages
(``envelop``), hands in what it receives (``receive``), and says what never came (``abandon``). All methods may be
called from any thread.

**A request without an answer is in doubt** until it has one: the next message of any thread, and the heartbeat, takes
it along once more, under the same id, and the daemon executes it once. Until then nothing else is sent for its
sequences: what a sequence is told, it is told in the order in which it happened.

**What is known of a sequence changes in one place**, ``receive``, and only by a reply whose request is still pending.
Requests become pending in ``_number`` under the session's present epoch; ``rejoined``, which begins another epoch,
takes all of them back. All three hold ``_settling``. So from the moment at which the claims of a resume are made, no
reply of the old daemon can change what they say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count, takewhile

from radixkv.client.batch import Batch, FreeItem, Outgoing, Part, ShareItem, lost, not_executed
from radixkv.client.effects import Ask
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
        with self._settling:
            known = session.over
            session.over = True
            session.away = False
            if self.session is session:
                self.session = None
            self._give_up_asking(session)
        return not known

    def rejoined(self, session: Session, welcome: Welcome) -> list[SequenceState]:
        """Another daemon knows the session. Whatever the former one still says is nothing to us any more.

        Gives the sequences to be claimed. What is known of them stays as it is until ``resumed``.
        """
        with self._settling:
            pending = {out.request.id: out for out in self._pending.values() if out.request.session == session.id}
            self._take_back((pending | session.doubts).values(), session)
            session.welcome = welcome
            return sorted(session.sequences, key=lambda seq: seq.id)

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
        """The messages to send for an Ask, in order: what is in doubt, what the outbox has ready, then its own parts
        without an answer.

        ``until``: monotonic; later than this the caller does not want it any more. ``epoch``: that of the daemon they
        will be sent to. Ids are given here and the shell sends at once, so that they arrive nearly in order.
        Errors: Away, when the session goes on with another daemon.
        """
        session = ask.session
        with self._settling:
            if epoch != session.epoch:
                raise Away("the session goes on with another daemon")
            carried = [] if ask.alone else [*self._again(session), *self._deferred(session, until)]
            answered = {place: out for place, out in enumerate(ask.sent) if out.reply is not None}
            ask.sent = [answered.get(i) or self._number(session, until, part) for i, part in enumerate(ask.parts)]
        return carried + [out for out in ask.sent if out.reply is None]

    def _again(self, session: Session) -> list[Outgoing]:
        """What is in doubt and not being asked by another thread at this moment."""
        doubts = [out for request, out in session.doubts.items() if request not in self._pending]
        for out in doubts:
            out.repeated = True
            self._pending[out.request.id] = out
        return doubts

    def _deferred(self, session: Session, until: float) -> list[Outgoing]:
        now = self.clock()
        batches, cancels = self.outbox.take(session, now)
        soon = min(until, now + self.timeout)
        carried = [self._number(session, soon, cancel) for cancel in cancels]
        return carried + [self._number(session, soon, batch, deferred=True) for batch in batches]

    def _number(self, session: Session, deadline: float, part: Body | Part, deferred: bool = False) -> Outgoing:
        body = part.body() if isinstance(part, Part) else part
        if isinstance(part, Batch):
            for item in part.items:
                item.leaves()
        request = Request(session.id, session.epoch, next(self._request_ids), deadline, body)
        out = Outgoing(request, part if isinstance(part, Part) else None, deferred)
        self._pending[request.id] = out
        return out

    def unfinished(self, session: Session) -> bool:
        """Is anything fenced, or in doubt? Then somebody has to look after it, although nobody waits."""
        return len(self.outbox) > 0 or bool(session.doubts)

    def ready(self, session: Session) -> bool:
        """Would a message take something along that nobody waits for?"""
        return self.outbox.ready() or any(request not in self._pending for request in list(session.doubts))

    def on_its_way(self, seq: SequenceState) -> bool:
        """Does some thread wait for an answer that concerns this sequence, to a fenced operation or to what is in
        doubt? Takes no lock."""
        doubts = list(seq.unsettled)
        return any(out.request.id in self._pending for out in doubts) if doubts else self.outbox.flying(seq)

    # -- in -------------------------------------------------------------------------------------------------------

    def receive(self, request: int, reply: Reply, session: Session) -> None:
        """A reply arrived, on whatever socket. One that nobody waits for any longer is dropped.

        Errors: Away, when the daemon does not know the session but another one may.
        """
        with self._settling:
            out = self._pending.get(request) or session.doubts.get(request)
            self._late_grant(request)
            if out is None:
                return
            if lost(reply):
                self.left(session, session.epoch)
                if session.away:
                    raise Away("the daemon does not know the session")
            self._pending.pop(request, None)
            session.doubts.pop(request, None)
            try:
                out.settle(reply)
            finally:
                if out.deferred and out.batch is not None:
                    self.outbox.landed(out.batch, session, not_executed(reply))
                elif out.repeated:
                    self.outbox.changed()

    def abandon(self, outgoing: Iterable[Outgoing], session: Session, error: RadixKVError) -> None:
        """No reply came to these in time, or none can come any more.

        What they would have made is freed later; what they would have changed is in doubt, unless a late reply comes.
        When the daemon went away, there is nothing to be asked: what it executed and did not answer, the next one will
        not know of.
        """
        with self._settling:
            unanswered = [out for out in outgoing if self._pending.get(out.request.id) is out]
            if session.away:
                self._take_back(unanswered, session)
                return
            for out in unanswered:
                del self._pending[out.request.id]
                if out.request.id not in session.doubts:
                    self._give_back(out, session)
                    if out.batch is not None:
                        self._doubt(out, out.batch, session, error)
            if session.over:
                self._give_up_asking(session)
            self.outbox.changed()

    def _doubt(self, out: Outgoing, batch: Batch, session: Session, error: RadixKVError) -> None:
        for item in batch.items:
            item.error = error
            if isinstance(item, ShareItem):
                item.count = 0  # the children are given back
            if isinstance(item, FreeItem) and not out.deferred:
                self.outbox.drop(session, item.seq.id)
        if out.deferred or not all(isinstance(item, FreeItem) for item in batch.items):
            session.doubts[out.request.id] = out
            out.doubtful()
            self.outbox.stirred()

    def _give_up_asking(self, session: Session) -> None:
        """It is over: nobody answers any more. Errors of fenced operations are told as they are."""
        for out in list(session.doubts.values()):
            self._pending.pop(out.request.id, None)
            session.doubts.pop(out.request.id, None)
            out.certain()
            if out.deferred and out.batch is not None:
                self.outbox.landed(out.batch, session)

    def _take_back(self, outgoing: Iterable[Outgoing], session: Session) -> None:
        """These count as never sent. Who waits for one asks the next daemon; the outbox's go to it before others."""
        for out in sorted(outgoing, key=lambda out: out.request.id, reverse=True):
            self._pending.pop(out.request.id, None)
            session.doubts.pop(out.request.id, None)
            out.certain()
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
