"""The client's core without sockets: a hand-driven shell, a clock that stands still, memory that is two arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest

from radixkv.client.core import Away, Core, no_reply
from radixkv.client.effects import Ask, Linger, NeedQuiet, NeedSession, Synchronize, Verb
from radixkv.client.pool import PoolState
from radixkv.client.resume import resume
from radixkv.client.sequence import Grant, SequenceState
from radixkv.client.session import Session
from radixkv.commands import CopyRow, Reply, Request, Welcome
from radixkv.config import KVSpec
from radixkv.errors import RadixKVError, Unavailable

T = TypeVar("T")
Answer = Callable[[Request], Reply | None]
PAGES = 32
EFFECTS_MAX = 1000
SPEC = KVSpec(layers=1, kv_heads=1, head_dim=4, page_size=4)


class TwoArrays:
    """``session.Memory`` without a mapping: generations, and the copies that were asked for."""

    spec = SPEC
    pages = PAGES
    host_pages = 0

    def __init__(self, copies: bool = True) -> None:
        self.counts = np.zeros(PAGES, np.uint64)
        self.copies = copies
        self.copied: list[CopyRow] = []
        self.known = True

    def generations(self, pages: Any) -> Any:
        return self.counts[pages]

    def knows(self, session: Session) -> bool:
        return self.known

    def copy_rows(self, rows: Iterable[CopyRow]) -> bool:
        if self.copies:
            self.copied += rows
        return self.copies


class Event:
    """A fence that is done when the test says so."""

    def __init__(self, done: bool = False) -> None:
        self.done = done
        self.waited = 0
        self.broken = False

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("device lost")
        return self.done

    def synchronize(self) -> None:
        self.waited += 1
        self.done = True


class KeepingPool(PoolState):
    """Holds its sequences, so that none is collected before the test is over."""

    def __init__(self, core: Core, name: str) -> None:
        super().__init__(core, name)
        self.held: list[SequenceState] = []

    def make(self, session: Session, grant: Grant) -> SequenceState:
        seq = super().make(session, grant)
        self.held.append(seq)
        return seq


def welcome(session: int, epoch: int = 1, resumes: bool = False) -> Welcome:
    return Welcome(1, session, epoch, 0, b"t" * 16, f"boot {epoch}", "cache", ["p"], 5.0, 60.0, resumes=resumes)


class Desk:
    """Runs verbs; ``answer`` gives the reply to each request, or None for silence."""

    def __init__(self) -> None:
        self.now = 100.0
        self.core = Core(5.0, lambda: self.now)
        self.memory = TwoArrays()
        self.pool = KeepingPool(self.core, "p")
        self.answer: Answer = lambda request: None
        self.seen: list[Request] = []
        self.while_away: Callable[[], Any] = lambda: None
        """What happens while a verb waits for the session to come back."""
        self.sessions = 0
        self.connect()

    def connect(self, resumes: bool = False) -> Session:
        """``resumes``: the daemon has a keeper."""
        self.sessions += 1
        session = Session(welcome(70 + self.sessions, resumes=resumes))
        self.daemon_lives = True
        session.memories["p"] = self.memory
        session.daemon_lives = lambda: self.daemon_lives
        self.pool.current = self.memory
        self.epoch = session.epoch
        self.core.opened(session)
        return session

    def die(self) -> None:
        """The daemon: nothing comes from it any more, and whoever looks notices."""
        self.daemon_lives = False
        self.core.left(self.session, self.epoch)

    def come_back(self) -> None:
        """The next daemon: rejoin, and all claims to it."""
        for _ in self.coming_back():
            pass

    def coming_back(self) -> Iterator[Ask]:
        """The same, with a halt before each message."""
        session = self.session
        claimed = self.core.rejoined(session, welcome(session.id, session.epoch + 1, resumes=True))
        self.epoch, self.daemon_lives = session.epoch, True
        for ask in resume(self.core, session, claimed):
            yield ask
            self._carry_out(ask)
        self.core.resumed(session, self.epoch)

    @property
    def session(self) -> Session:
        assert self.core.session is not None
        return self.core.session

    @property
    def bodies(self) -> list[Any]:
        """What has been sent since the last look."""
        bodies = [request.body for request in self.seen]
        self.seen.clear()
        return bodies

    def sequence(self, tokens: int = 8, pages: Iterable[int] = (0, 1, 2), **facts: Any) -> SequenceState:
        given = {"committed_tokens": 0, "cached_tokens": 0, "writable_from_tokens": 0, "copy_rows": [], "copy": True}
        table = np.array(list(pages), np.int32).tobytes()
        packed = np.arange(tokens, dtype=np.uint32).tobytes()
        grant = Grant(self.core.sequence_ids(1), b"ns", packed, table, **{**given, **facts})
        return self.pool.make(self.session, grant)

    def run(self, verb: Verb[T]) -> T:
        try:
            effect = next(verb)
            for _ in range(EFFECTS_MAX):
                try:
                    answer = self._carry_out(effect)
                except RadixKVError as error:
                    effect = verb.throw(error)
                else:
                    effect = verb.send(answer)
        except StopIteration as end:
            return end.value
        raise AssertionError(f"a verb that asks for more than {EFFECTS_MAX} things never ends")

    def ship(self) -> None:
        """What a heartbeat does: send what is ready."""
        self._carry_out(Ask(self.session))

    def _carry_out(self, effect: Any) -> Any:
        match effect:
            case NeedSession():
                if self.core.session is not None and self.core.session.away:
                    self.while_away()
                if self.core.session is None or self.core.session.away:
                    raise Unavailable("nobody there")
                return self.core.session
            case Ask():
                self._exchange(self.core.envelop(effect, self.now + 5.0 + effect.wait_s, self.epoch), effect.session)
                return effect.answers()
            case Synchronize():
                return effect.event.synchronize()
            case Linger():
                self.now += 1.0
                if effect.event is not None and effect.until is None:
                    effect.event.synchronize()
            case NeedQuiet():
                raise AssertionError("nothing is on its way here")
        return None

    def _exchange(self, outgoing: Any, session: Session) -> None:
        for out in outgoing:
            self.seen.append(out.request)
            reply = self.answer(out.request)
            if reply is not None:
                self.core.receive(out.request.id, reply, session)
        if session.away and any(out.reply is None for out in outgoing):
            self.core.abandon(outgoing, session, Unavailable("the daemon went away"))
            raise Away("the daemon went away")
        if any(out.reply is None for out in outgoing):
            self.now = max(out.request.deadline for out in outgoing)
            error = no_reply(self.core)
            self.core.abandon(outgoing, session, error)
            raise error


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    for seq in desk.pool.held:
        seq.session.over = True


@pytest.fixture(name="new_event")
def _event() -> type[Event]:
    return Event


def good(request: Request) -> Reply | None:
    """A daemon that agrees to everything: one new page per extend, nothing cut off by a truncate."""
    from radixkv import commands as c

    body = request.body
    match body:
        case c.Step():
            return c.Stepped(
                free=[None] * len(body.free),
                truncate=[c.Truncated(-(-item.n // 4)) for item in body.truncate],
                commit=[None] * len(body.commit),
                extend=[np.array([9], np.int32).tobytes()] * len(body.extend),
                share=[c.Shared(4, 1) for _ in body.share],
                copied=[None] * len(body.copied),
            )
        case c.Reserve():
            pages = -(-(len(body.tokens) // 4 + body.headroom) // 4)
            return c.Reserved(np.arange(pages, dtype=np.int32).tobytes(), 0, 0)
        case c.Adopt():
            return c.Adopted(bytes(24), np.array([4, 5], np.int32).tobytes(), 4, 0, 4, [], b"ns")
        case c.Compact():
            return c.Compacted(np.array([7, 8, 9], np.int32).tobytes())
        case c.Resume():
            return c.Resumed([c.Kept(claim.committed, claim.committed // 4 * 4) for claim in body.claims])
    return c.Done()


@pytest.fixture(name="good")
def _good() -> Answer:
    return good


@pytest.fixture
def kept(desk: Desk) -> Desk:
    """A desk whose daemon has a keeper."""
    desk.core.ended(desk.session)
    desk.connect(resumes=True)
    desk.answer = good
    return desk
