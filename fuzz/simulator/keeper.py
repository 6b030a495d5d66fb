"""The keeper's thread of a worker: heartbeats, connecting, rejoining and resuming, as ``client/keeper.py`` and
``client/link.py`` do it, a slice whenever it is chosen.

An attempt to connect is a script too: it yields attach questions (answered, or ended by an error) and, to resume, the
effects of ``client/resume.py``.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from fuzz.simulator.network import AttachPipe
from fuzz.simulator.shell import Thread
from radixkv.client.effects import Ask, Verb
from radixkv.client.resume import resume
from radixkv.client.session import Session
from radixkv.commands import (
    PROTOCOL_VERSION,
    AttachRequest,
    Body,
    Failure,
    Heartbeat,
    Hello,
    MapPool,
    PoolMap,
    Rejoin,
    Welcome,
)
from radixkv.errors import BadRequest, RadixKVError, SessionLost, Unavailable, from_code
from radixkv.ipc import wire

if TYPE_CHECKING:
    from fuzz.simulator.client import Client, Connection

RESUME_S = 86_400.0
Attempt = Generator[AttachRequest, Any, None]


class Keeper:
    def __init__(self, client: Client) -> None:
        self._client = client
        self.thread = Thread(client, f"{client.name}.k")
        self._beat = client.now
        self._attempt: Attempt | None = None
        self._pipe: AttachPipe | None = None
        self._until = 0.0

    def go(self) -> bool:
        """One slice. False: there is nothing to do now."""
        if not self.thread.idle:
            return self.thread.go()
        if self._attempt is not None:
            return self._listen(self._attempt)
        client = self._client
        connection = client.present()
        if connection is None:
            return self._begin()
        if connection.pipe.hung_up:
            client.lose(connection)
            return True
        due = client.now >= self._beat
        if not due and not client.core.ready(connection.session):
            return False
        if due:
            self._beat = client.now + connection.session.welcome.heartbeat_s
        self.thread.begin(ship(connection.session, [Heartbeat()] if due else []), lambda error: None)
        return True

    # -- connecting -----------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        session = self._client.core.session
        self._pipe = self._client.open_pipe()
        self._attempt = self._hello(self._pipe) if session is None else self._rejoin(self._pipe, session)
        self._go_on(next)
        return True

    def _listen(self, attempt: Attempt) -> bool:
        """Is the answer there, or does none come any more?"""
        pipe = self._pipe
        assert pipe is not None
        if pipe.answers:
            answer = wire.decode_attach_reply(pipe.answers.popleft())
            if isinstance(answer, Failure):
                error = from_code(answer.code, answer.message, answer.details)
                self._go_on(lambda attempt: attempt.throw(error))
            else:
                self._go_on(lambda attempt: attempt.send(answer))
        elif pipe.hung_up or self._client.now >= self._until:
            self._go_on(lambda attempt: attempt.throw(Unavailable("the daemon does not answer")))
        else:
            return False
        return True

    def _go_on(self, run: Any) -> None:
        """Until the next question, or to the end. What fails is tried again."""
        attempt, pipe = self._attempt, self._pipe
        assert attempt is not None and pipe is not None
        try:
            question = run(attempt)
        except StopIteration:
            self._attempt = None
        except RadixKVError as error:
            self._client.note("cannot connect", str(error))
            self._attempt = None
            pipe.worker_end = False
        else:
            pipe.packets.append(wire.encode_attach(question))
            self._until = self._client.now + self._client.core.timeout

    def _hello(self, pipe: AttachPipe) -> Attempt:
        client = self._client
        welcome = yield Hello(PROTOCOL_VERSION, client.name)
        assert isinstance(welcome, Welcome)
        connection = client.connect(pipe, Session(welcome))
        connection.enter()
        for pool in client.pools:
            answer = yield MapPool(pool.name)
            assert isinstance(answer, PoolMap)
            client.map_pool(connection.session, answer)
        client.publish(connection)

    def _rejoin(self, pipe: AttachPipe, session: Session) -> Attempt:
        client = self._client
        connection = client.connect(pipe, session)
        try:
            welcome = yield Rejoin(PROTOCOL_VERSION, session.id, session.welcome.token)
            assert isinstance(welcome, Welcome)
            if welcome.cache_id != session.welcome.cache_id:
                raise SessionLost("the daemon has another cache")
        except (SessionLost, BadRequest) as refusal:
            client.note("rejoin refused", str(refusal))
            client.core.ended(session)
            connection.hang_up()
            return
        claimed = client.core.rejoined(session, welcome)
        connection.enter()
        client.stage.events["claims"] += len(claimed)
        self.thread.joining = connection
        asks = resume(client.core, session, claimed)
        self.thread.begin(_resume(asks), lambda error: self._resumed(connection, error), RESUME_S)

    def _resumed(self, connection: Connection, error: RadixKVError | None) -> None:
        client = self._client
        self.thread.joining = None
        if error is None:
            client.note("resumed", f"session {connection.session.id}, epoch {connection.epoch}")
            client.publish(connection)
            return
        client.note("resume failed", str(error))
        if isinstance(error, SessionLost | BadRequest):
            client.core.ended(connection.session)
        connection.hang_up()


def _resume(asks: Any) -> Verb[None]:
    yield from asks


def ship(session: Session, parts: list[Body]) -> Verb[None]:
    """Send these, and what the outbox has ready; no answer is nobody's error."""
    try:
        yield Ask(session, parts)
    except RadixKVError:
        return
