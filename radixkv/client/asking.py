"""What verbs are made of: is the sequence ours and whole, send and settle, wait until nothing is on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from radixkv.client.batch import FreeItem, Item, Part, ShareItem, ToldItem, as_error
from radixkv.client.core import Away, Core
from radixkv.client.effects import Ask, NeedQuiet, NeedSession, Synchronize, Verb
from radixkv.client.outbox import Deferred, Event
from radixkv.client.packing import pack
from radixkv.client.sequence import SequenceState
from radixkv.client.session import Session
from radixkv.commands import Body, Failure, Loaded, Reply, WaitLoaded
from radixkv.errors import (
    BadRequest,
    CopyFailed,
    SessionLost,
    StaleHandle,
    Unavailable,
    VersionMismatch,
)

R = TypeVar("R", bound=Reply)

WAIT_MAX_S = 86400.0


def same_session(seq: SequenceState) -> Verb[Session]:
    """The sequence's session, if it is the present one. Errors: SessionLost, Unavailable."""
    session: Session = yield NeedSession()
    if seq.lost:
        seq.closed = True
        raise seq.lost
    if seq.session is not session:
        seq.closed = True
        raise SessionLost("the session in which this sequence was made is over", seq=seq.id)
    return session


def ready(seq: SequenceState) -> Verb[Session]:
    """Before a verb: the sequence is ours, nothing about it is in doubt, no earlier error is untold."""
    if seq.suspended is not None:
        raise BadRequest("suspended: resume it first", seq=seq.id)
    if seq.closed:
        over = SessionLost("the session is over") if seq.session.over else seq.lost
        raise over or StaleHandle("freed or handed off", seq=seq.id)
    session = yield from same_session(seq)
    yield from _settled(seq.pool.core, session, seq)
    if seq.closed:
        raise StaleHandle("handed off", seq=seq.id)
    if seq.broken is not None:
        raise seq.broken
    failure = seq.pool.core.outbox.seen(seq)
    if failure is not None:
        seq.hears(failure)
        raise failure
    return session


def whole(core: Core, seq: SequenceState) -> Verb[Session]:
    """The same before a verb that publishes, cuts or passes pages: all of them are there."""
    session = yield from ready(seq)
    if not seq.has_loaded(None):
        yield from wait_loaded(core, seq, None, None)
        session = yield from ready(seq)
    return session


# -- sending ----------------------------------------------------------------------------------------------------------


def persist(ask: Ask) -> Verb[Any]:
    """Carry it out. If the daemon goes away: what it has not answered, with the next one, once the session has resumed.

    Errors: SessionLost when the next daemon does not know the session; Unavailable when none comes in time.
    """
    while True:
        try:
            return (yield ask)
        except Away:
            session: Session = yield NeedSession(ask.wait_s)
        if session is not ask.session:
            raise SessionLost("the session is over: the next daemon does not know it")


def confirmed(session: Session, sequences: Iterable[SequenceState]) -> Verb[None]:
    """A daemon's last words are good when the next one has confirmed them."""
    if session.away and not all(seq.sound for seq in sequences):
        try:
            yield NeedSession()
        except Unavailable:
            return  # carried out all the same, and valid() says no until then


def deliver(session: Session, items: Sequence[Item]) -> Verb[list[Reply]]:
    """Send items and settle them; one round trip, however many messages it takes."""
    try:
        replies: list[Reply] = yield from persist(Ask(session, pack(items)))
        yield from confirmed(session, [*(item.seq for item in items), *_made(items)])
    except BaseException as error:
        for item in items:
            item.seq.hears(error)
            if isinstance(item, FreeItem) and item.error is None:  # nobody else sees to it
                item.seq.pool.core.outbox.drop(session, item.seq.id)
        for child in _made(items):  # nobody will ever see it
            child.given_up()
            child.pool.core.outbox.drop(session, child.id)
            child.pool.core.outbox.press()
        raise
    return replies


def _made(items: Iterable[Item]) -> list[SequenceState]:
    return [child for item in items if isinstance(item, ShareItem) for child in item.value or ()]


def drain(core: Core, session: Session, seq: SequenceState) -> Verb[None]:
    """Wait until nothing of the sequence is queued or on its way."""
    yield from _synchronize(core.outbox.fenced(seq))
    yield from _quiet(core, session, seq, core.outbox.behind)


def settle_truncates(core: Core, session: Session, seq: SequenceState) -> Verb[None]:
    """An extend or share sees the sequence as truncated: wait for the event, and for the answer."""
    if core.outbox.truncates(seq):
        yield from _synchronize(core.outbox.fenced(seq, before_extend=True))
        yield from _quiet(core, session, seq, core.outbox.truncates)


def copies_told(core: Core, session: Session, seq: SequenceState) -> Verb[list[ToldItem]]:
    """Before pages of a sequence change hands: nobody copies rows from them any more, and the daemon knows it.

    Who has yet to copy from them and has queued something, say the free behind its event, is waited for, the event too.
    Of the library's own copies the daemon is told: of sequences with queued operations here, ahead of those; gives what
    the caller has to send for the others.
    """
    pages = set(seq.page_table.tolist())
    for other in core.outbox.busy(seq.pool):
        if other is not seq and other.session is session and any(row[0] in pages for row in other.copy_rows):
            yield from _synchronize(core.outbox.fenced(other))
            yield from _settled(core, session, other, core.outbox.behind)
    now: list[ToldItem] = []
    ahead: list[ToldItem] = []
    for item in map(ToldItem, seq.pool.untold(seq)):
        (ahead if item.seq.unsettled or core.outbox.behind(item.seq) else now).append(item)
    for item in ahead:
        core.outbox.put_first(item)
    for item in ahead:
        yield from _gone_out(core, session, item)
    return now


def _gone_out(core: Core, session: Session, item: Item) -> Verb[None]:
    yield from _settled(core, session, item.seq, lambda _: core.outbox.holds(item))


def _synchronize(fenced: Sequence[Deferred]) -> Verb[None]:
    for deferred in fenced:
        if deferred.event is not None:
            yield Synchronize(deferred.event)
            deferred.event = None


def _idle(seq: SequenceState) -> bool:  # noqa: ARG001 - nothing else is to be waited for
    return False


def _settled(
    core: Core, session: Session, seq: SequenceState, busy: Callable[[SequenceState], bool] = _idle
) -> Verb[None]:
    """Wait until nothing about the sequence is in doubt, and it is not ``busy``. Any message asks and sends: another
    thread's that is on its way, or else ours."""
    while seq.unsettled or busy(seq):
        if core.on_its_way(seq):
            yield NeedQuiet(seq)
        else:
            try:
                yield from persist(Ask(session))
            except SessionLost as error:
                seq.hears(error)
                raise


def _quiet(core: Core, session: Session, seq: SequenceState, busy: Callable[[SequenceState], bool]) -> Verb[None]:
    yield from _settled(core, session, seq, busy)
    failure = seq.pool.core.outbox.seen(seq)
    if failure is not None:
        seq.hears(failure)
        raise failure


# -- loading ----------------------------------------------------------------------------------------------------------


class _Loading(Part):
    """Asks for pages that are being loaded; the answer says how far that is."""

    __slots__ = ("_layer", "_seq")

    def __init__(self, seq: SequenceState, layer: int | None) -> None:
        self._seq = seq
        self._layer = layer

    def body(self) -> Body:
        return WaitLoaded(self._seq.id, self._layer)

    def settle(self, reply: Reply) -> None:
        if isinstance(reply, Loaded):
            self._seq.loaded(reply)
        elif isinstance(reply, Failure) and isinstance(error := as_error(reply), CopyFailed):
            self._seq.not_loaded(error)


def wait_loaded(core: Core, seq: SequenceState, layer: int | None, timeout: float | None) -> Verb[None]:
    """The daemon is asked only for what is not known to be there. Errors: CopyFailed, Timeout, those of ``ready``."""
    session = yield from ready(seq)
    if seq.has_loaded(layer):
        return
    wait_s = seq.pool.copy_wait_s if timeout is None else timeout - core.timeout
    ask = Ask(session, [_Loading(seq, layer)], wait_s)
    try:
        (reply,) = yield from persist(ask)
        if seq.lost:
            raise seq.lost
        expect(reply, Loaded)
    except BaseException as error:
        core.call_off(ask)
        seq.hears(error)
        raise


# -- values -----------------------------------------------------------------------------------------------------------


def done(event: Event | None) -> bool:
    return event is None or bool(event.query())


def expect(reply: Reply, kind: type[R]) -> R:
    """The reply, if it is what was asked for; the error it stands for, if it is a Failure."""
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, Failure):
        raise as_error(reply)
    raise VersionMismatch(f"the daemon answered {type(reply).__name__} where {kind.__name__} was expected")


def seconds(name: str, value: Any) -> float:
    """A time from 0 to a day. Errors: BadRequest."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= WAIT_MAX_S:
        raise BadRequest(f"{name} is seconds from 0 to {WAIT_MAX_S:g}, not {value!r}")
    return float(value)
