"""The verbs, as generators over ``effects``: what each sends, and what it makes of the answer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from radixkv.client.asking import (
    confirmed,
    copies_told,
    deliver,
    done,
    drain,
    expect,
    persist,
    ready,
    same_session,
    seconds,
    settle_truncates,
    whole,
)
from radixkv.client.batch import (
    CommitItem,
    CompactItem,
    CopiedItem,
    ExtendItem,
    FreeItem,
    HandoffItem,
    Item,
    Part,
    ShareItem,
    TruncateItem,
    lost,
)
from radixkv.client.core import Away, Core
from radixkv.client.effects import Ask, Linger, NeedSession, Verb
from radixkv.client.namespace import Canonical, Namespace
from radixkv.client.outbox import Deferred, Event
from radixkv.client.packing import pack
from radixkv.client.pool import PoolState
from radixkv.client.sequence import Grant, SequenceState
from radixkv.client.session import Session
from radixkv.client.snapshot import Snapshot
from radixkv.commands import (
    Adopt,
    Adopted,
    Body,
    Done,
    Failure,
    Heartbeat,
    Invalidate,
    Invalidated,
    LookedUp,
    Lookup,
    Prefetch,
    Reply,
    Reserve,
    Reserved,
    Retain,
    Statistics,
    Stats,
)
from radixkv.errors import (
    BadRequest,
    RadixKVError,
    SessionLost,
    Timeout,
    Unavailable,
    VersionMismatch,
)

TICKET_BYTES = 16
SESSIONS_TRIED = 3
"""How often a request that needs no particular session is asked anew when its session turns out to be over."""


@dataclass(frozen=True, slots=True)
class Want:
    """What a reserve asks for; ``tokens`` packed."""

    namespace: Namespace | Canonical
    tokens: bytes
    headroom: int
    last_page: str
    wait_s: float
    copy: bool
    retain: list[Retain] = field(default_factory=list)
    join_s: float = 0.0
    early: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """How many leading tokens of a prompt are cached, in full pages, per tier."""

    device_tokens: int
    host_tokens: int


# -- verbs of a pool ----------------------------------------------------------------------------------------------


def reserve(core: Core, pool: PoolState, want: Want) -> Verb[SequenceState]:
    identity = core.sequence_ids(1)
    asked = itertools.count()
    until = core.clock() + want.wait_s

    def body() -> Reserve:
        wait_s = min(want.wait_s, max(0.0, until - core.clock())) if next(asked) else want.wait_s
        return Reserve(
            pool.name, identity, want.namespace.canonical, want.tokens, want.headroom, want.last_page, wait_s,
            pool.prefill_tokens_per_s, want.retain, want.join_s, want.early,
        )  # fmt: skip

    def grant(reply: Reply) -> Grant:
        got = expect(reply, Reserved)
        return Grant(
            id=identity,
            namespace=want.namespace.canonical,
            tokens=want.tokens,
            page_table=got.page_table,
            committed_tokens=got.cached_tokens,
            cached_tokens=got.cached_tokens,
            writable_from_tokens=got.writable_from_tokens,
            copy_rows=got.copy_rows,
            copy=want.copy,
            loading=got.loading,
        )

    return (yield from _obtain(pool, _Obtain(identity, body, grant), want.join_s + want.wait_s + pool.copy_wait_s))


def adopt(core: Core, pool: PoolState, ticket: Any, copy: bool) -> Verb[SequenceState]:
    if not isinstance(ticket, bytes) or len(ticket) != TICKET_BYTES:
        raise BadRequest(f"a ticket is {TICKET_BYTES} bytes, as handoff() gave it")
    identity = core.sequence_ids(1)

    def grant(reply: Reply) -> Grant:
        got = expect(reply, Adopted)
        return Grant(
            id=identity,
            namespace=got.namespace,
            tokens=got.tokens,
            page_table=got.page_table,
            committed_tokens=got.committed_tokens,
            cached_tokens=got.cached_tokens,
            writable_from_tokens=got.writable_from_tokens,
            copy_rows=got.copy_rows,
            copy=copy,
        )

    return (yield from _obtain(pool, _Obtain(identity, lambda: Adopt(pool.name, ticket, identity), grant)))


class _Obtain(NamedTuple):
    """What is asked for a sequence, and what the answer grants."""

    identity: int
    body: Callable[[], Body]
    grant: Callable[[Reply], Grant]


class _Obtaining(Part):
    """A request for a sequence. The sequence is made by the reply, not by the verb later on: what exists is claimed."""

    __slots__ = ("_how", "_pool", "_session", "error", "seq")

    def __init__(self, pool: PoolState, session: Session, how: _Obtain) -> None:
        self._pool = pool
        self._session = session
        self._how = how
        self.seq: SequenceState | None = None
        self.error: RadixKVError | None = None

    def body(self) -> Body:
        return self._how.body()

    def settle(self, reply: Reply) -> None:
        try:
            self.seq = self._pool.make(self._session, self._how.grant(reply))
        except RadixKVError as error:
            self.error = error

    def makes(self) -> list[int]:
        return [self._how.identity]

    def outcome(self) -> SequenceState:
        if self.seq is None:
            raise self.error or VersionMismatch("no answer")
        return self.seq


def _obtain(pool: PoolState, how: _Obtain, wait_s: float = 0.0) -> Verb[SequenceState]:
    """Ask for a sequence. Whatever goes wrong on this side, nothing is left behind for it in the daemon."""
    for _ in range(SESSIONS_TRIED):
        session: Session = yield NeedSession()
        session.memory(pool.name)
        part = _Obtaining(pool, session, how)
        ask = Ask(session, [part], wait_s)
        try:
            (reply,) = yield from persist(ask)
            if not lost(reply):
                seq = part.outcome()
                yield from confirmed(session, [seq])
                return seq
        except (Unavailable, SessionLost):
            if not session.over:
                raise
        except BaseException:
            if not _refused(ask):
                pool.core.give_up(ask, how.identity)
            if part.seq is not None:
                part.seq.closed = True
            raise
        # The session is over, and with it whatever this may have led to. Once more, in the next session.
    raise SessionLost("the daemon ends each session at once")


def _refused(ask: Ask) -> bool:
    return any(isinstance(reply, Failure) for reply in ask.answers())


def lookup(pool: PoolState, namespace: Namespace, prompts: Sequence[bytes]) -> Verb[list[Found]]:
    got = expect((yield from _ask_anyone(Lookup(pool.name, namespace.canonical, list(prompts)))), LookedUp)
    return [Found(*tokens) for tokens in zip(got.device_tokens, got.host_tokens, strict=True)]


def prefetch(core: Core, pool: PoolState, namespace: Namespace, tokens: bytes, timeout: float | None) -> Verb[Found]:
    wait_s = pool.copy_wait_s if timeout is None else timeout - core.timeout
    got = expect((yield from _ask_anyone(Prefetch(pool.name, namespace.canonical, tokens), wait_s)), LookedUp)
    return Found(got.device_tokens[0], got.host_tokens[0])


def invalidate(pool: PoolState, namespace: Namespace) -> Verb[int]:
    return expect((yield from _ask_anyone(Invalidate(pool.name, namespace.canonical))), Invalidated).epoch


def heartbeat() -> Verb[None]:
    expect((yield from _ask_anyone(Heartbeat())), Done)


def stats() -> Verb[Snapshot]:
    return Snapshot(expect((yield from _ask_anyone(Stats())), Statistics).snapshot)


def _ask_anyone(body: Body, wait_s: float = 0.0) -> Verb[Reply]:
    """Ask whichever daemon there is. ``wait_s``: how much longer than the client's timeout the reply may take."""
    for _ in range(SESSIONS_TRIED):
        session: Session = yield NeedSession()
        try:
            (reply,) = yield from persist(Ask(session, [body], wait_s))
        except (Unavailable, SessionLost):
            if not session.over:
                raise
            continue
        if not lost(reply):
            return reply  # type: ignore[no-any-return]
    raise SessionLost("the daemon ends each session at once")


def flush(core: Core, pool: PoolState, timeout: float | None) -> Verb[None]:
    """Wait until nothing of this pool is fenced or on its way, then raise the first error that nobody has seen.

    Errors: Timeout when events are not done in time.
    """
    until = None if timeout is None else core.clock() + seconds("timeout", timeout)
    while waiting := core.outbox.unfinished(pool):
        session: Session = yield NeedSession()
        yield from persist(Ask(session))
        waiting = core.outbox.unfinished(pool)
        if not waiting:
            break
        if until is not None and core.clock() >= until:
            raise Timeout(f"{len(waiting)} sequences still wait for their events", timeout_s=float(timeout or 0))
        front = next((one for one in waiting if isinstance(one, Deferred) and not one.done()), None)
        yield Linger(None if front is None else front.event, until)
    failure = core.outbox.failure(pool)
    if failure is not None:
        raise failure


# -- verbs of a sequence ------------------------------------------------------------------------------------------


def commit(core: Core, seq: SequenceState, n: int, after: Event | None) -> Verb[None]:
    yield from _change(core, CommitItem(seq, n), after)


def truncate(core: Core, item: TruncateItem, after: Event | None) -> Verb[None]:
    yield from _change(core, item, after)


def copied(core: Core, seq: SequenceState, after: Event | None) -> Verb[None]:
    yield from _change(core, CopiedItem(seq), after)


def extend(core: Core, seq: SequenceState, tokens: bytes, headroom: int) -> Verb[None]:
    item = ExtendItem(seq, tokens, headroom)  # also while pages are loading
    session = yield from ready(seq)
    yield from settle_truncates(core, session, seq)
    yield from deliver(session, [item])
    item.outcome()


def share(core: Core, item: ShareItem) -> Verb[list[SequenceState]]:
    session = yield from whole(core, item.seq)
    yield from settle_truncates(core, session, item.seq)
    item.first_child = core.sequence_ids(item.count)
    yield from deliver(session, [item])
    return item.outcome()  # type: ignore[no-any-return]


def compact(core: Core, seq: SequenceState) -> Verb[None]:
    session = yield from whole(core, seq)
    yield from drain(core, session, seq)
    item = CompactItem(seq)
    yield from deliver(session, [item])
    item.outcome()


def free(core: Core, seq: SequenceState, after: Event | None, commit: int = 0) -> Verb[None]:
    """Freeing twice is a no-op, and so is to free what the caller knows to be lost. An error of an earlier deferred
    operation is raised after the free has been sent.

    Waits for no daemon that is yet to come: the outbox will tell it.
    """
    seq.suspended = None
    if seq.closed:
        return
    item = FreeItem(seq, commit)
    if commit and not seq.has_loaded(None) and seq.broken is None:
        yield from whole(core, seq)
    if seq.lost or not seq.session.away:
        yield from same_session(seq)
    seq.closed = True
    if seq.session.away or core.outbox.behind(seq) or not done(after):
        core.outbox.defer(item, after)
        return
    try:
        yield Ask(seq.session, pack([item]))
    except Away:
        core.outbox.defer(item, None)
        return
    except Unavailable:
        if seq.session.over and not commit:
            return  # the daemon ended, perhaps because this was the last free it was waiting for: nothing is held
        raise
    failure = seq.pool.core.outbox.seen(seq)
    item.outcome()
    if failure is not None:
        raise failure


def handoff(core: Core, seq: SequenceState, ttl: float, after: Event | None) -> Verb[bytes]:
    """With an event that is not done the ticket comes at once and is good from when the message has gone out.

    The daemon hands off nothing whose private pages are still to be copied from, or to (``copies_told``).
    """
    item = HandoffItem(seq, os.urandom(TICKET_BYTES), seconds("ttl", ttl))
    session = yield from whole(core, seq)
    if not done(after):
        told = yield from copies_told(core, session, seq)
        if told:
            yield from deliver(session, told)
        seq.closed = True
        core.outbox.defer(item, after)
        return item.ticket
    yield from drain(core, session, seq)
    told = yield from copies_told(core, session, seq)
    yield from deliver(session, [*told, item])
    return item.outcome()  # type: ignore[no-any-return]


def _change(core: Core, item: Item, after: Event | None) -> Verb[None]:
    """Now, if nothing is in the way; else behind its own event and behind what the sequence has queued already."""
    session = yield from whole(core, item.seq)
    if core.outbox.behind(item.seq) or not done(after):
        core.outbox.defer(item, after)
        return
    yield from deliver(session, [item])
    item.outcome()
