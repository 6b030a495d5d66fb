"""A thread of a worker, without a thread: carries out the effects of one verb at a time, a slice whenever it is chosen.

What ``client/link.py`` and ``client/line.py`` do by blocking, ``go`` does by looking again: nothing is ready, or the
answer is there, or the time is over. Between the arrival of an answer and the verb's going on with it anybody else may
be chosen, as with real threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fuzz.simulator.network import Socket
from radixkv.client.batch import Outgoing
from radixkv.client.core import Away, no_reply
from radixkv.client.effects import Ask, Effect, Linger, NeedQuiet, NeedSession, Synchronize, Verb
from radixkv.client.session import Session
from radixkv.commands import Failure
from radixkv.errors import LimitExceeded, RadixKVError, Unavailable
from radixkv.ipc import wire

if TYPE_CHECKING:
    from fuzz.simulator.client import Client, Connection

LAST_WORDS_S = 0.1
_NOTHING = object()

Done = Callable[[RadixKVError | None], None]


class Thread:
    """``client``: whose; ``name``: for the history. Idle until ``begin``."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = name
        self._socket: Socket | None = None
        self._connected: Connection | None = None
        self.joining: Connection | None = None
        """The keeper's: in which the session is about to go on."""
        self._verb: Verb[Any] | None = None
        self._done: Done = lambda error: None
        self._effect: Effect | None = None
        self._answer: Any = _NOTHING
        self._error: RadixKVError | None = None
        self._until = 0.0
        self._exchange: _Exchange | None = None

    @property
    def idle(self) -> bool:
        return self._verb is None

    def begin(self, verb: Verb[Any], done: Done, patience_s: float = 0.0) -> None:
        """``done`` is called with the verb's error, or None, when it has ended; 0: the client's own patience."""
        self._verb, self._done = verb, done
        self._until = self._client.now + (patience_s or self._client.core.timeout)
        self._continue(lambda: next(verb))

    def end(self) -> None:
        """The process is dead: nothing more runs, not even what would clean up."""
        self._effect = self._exchange = None
        if self._verb is not None:
            self._verb.close()
            self._verb = None

    def go(self) -> bool:
        """One slice. False: nothing can be done now."""
        if self._verb is None:
            return False
        if self._error is not None or self._answer is not _NOTHING:
            self._hand_in(self._verb)
            return True
        return self._look()

    def _hand_in(self, verb: Verb[Any]) -> None:
        answer, error = self._answer, self._error
        self._answer, self._error = _NOTHING, None
        if isinstance(self._effect, Synchronize | Linger):
            self._until = self._client.now + self._client.core.timeout
        self._continue((lambda: verb.throw(error)) if error is not None else (lambda: verb.send(answer)))

    def _continue(self, run: Callable[[], Effect]) -> None:
        self._effect = None
        try:
            self._effect = run()
        except StopIteration:
            self._finish(None)
        except RadixKVError as error:
            self._finish(error.with_traceback(None))

    def _finish(self, error: RadixKVError | None) -> None:
        self._verb = None
        done, self._done = self._done, lambda error: None
        done(error)

    # -- waiting --------------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Is what the verb waits for there, or the time over?"""
        effect, client = self._effect, self._client
        late = client.now >= self._until
        match effect:
            case NeedSession():
                late = client.now >= self._until + effect.wait_s
                connection = client.present()
                if connection is not None:
                    self._answer = connection.session
                elif late:
                    self._error = Unavailable("no daemon answers")
            case Ask():
                return self._trade(effect)
            case Synchronize():
                if effect.event.query():
                    self._answer = effect.event.synchronize()
            case Linger():
                if effect.event is None or effect.event.query() or (effect.until or client.now) > client.now:
                    self._answer = None
            case NeedQuiet():
                if not client.core.on_its_way(effect.seq):
                    self._answer = None
                elif late:
                    self._error = no_reply(client.core)
        return self._answer is not _NOTHING or self._error is not None

    def _trade(self, ask: Ask) -> bool:
        try:
            if self._exchange is None:
                self._exchange = self._open_exchange(ask)
            moved = self._exchange.go()
            if self._exchange.complete:
                self._answer = ask.answers()
        except RadixKVError as error:
            self._error = error.with_traceback(None)
            moved = True
        if self._error is not None or self._answer is not _NOTHING:
            connection = self._exchange.connection if self._exchange else self._client.connection
            self._exchange = None
            if self.joining is None and connection is not None:
                self._look_after(connection, ask.session)
        return moved

    def _open_exchange(self, ask: Ask) -> _Exchange:
        """Errors: Unavailable."""
        connection = self.joining or self._client.connection
        if connection is None or connection.session is not ask.session or connection.over:
            raise Unavailable("the session ended")
        return _Exchange(self._client, connection, self._line(connection), ask, self._until + ask.wait_s)

    def _look_after(self, connection: Connection, session: Session) -> None:
        """What ``Link.exchange`` makes of an end: the session may be away, or over."""
        gone = session.away or session.epoch != connection.epoch
        if isinstance(self._error, Unavailable) and gone:
            self._error = Away(self._error.message)
        if gone or session.over:
            self._client.lose(connection)

    def _line(self, connection: Connection) -> Socket:
        """A socket of this connection's own."""
        if self._socket is None or self._connected is not connection or self._socket.closed:
            self.hang_up()
            self._socket = self._client.open_socket(self.name)
            self._socket.keeps = self.joining is not None
            self._connected = connection
        return self._socket

    def hang_up(self) -> None:
        if self._socket is not None:
            self._socket.closed = True


class _Exchange:
    """One question on its way: wait until somebody accepts us, send, take in replies until all are there."""

    def __init__(self, client: Client, connection: Connection, socket: Socket, ask: Ask, until: float) -> None:
        self._client = client
        self.connection = connection
        self._socket = socket
        self._ask = ask
        self._until = until
        self._sent: list[Outgoing] | None = None
        self._ended = False

    @property
    def complete(self) -> bool:
        return self._sent is not None and all(out.reply is not None for out in self._sent)

    def go(self) -> bool:
        """False: nothing has moved. Errors: Timeout, Unavailable, Away."""
        core = self._client.core
        if self._sent is None:
            if not self._client.writable(self._socket):
                return self._wait(Unavailable("no daemon answers"))
            self._sent = core.envelop(self._ask, self._until, self.connection.epoch)
            for out in self._sent:
                if out.repeated:
                    self._client.note("repeat", f"#{out.request.id}")
            move = self._send
        else:
            move = self._receive
        try:
            return move()
        except RadixKVError as error:
            core.abandon(self._sent, self.connection.session, error)
            raise

    def _send(self) -> bool:
        limit = self.connection.session.welcome.message_bytes
        self._socket.full = False
        for out in self._sent or ():
            frame = wire.encode_request(out.request)
            if len(frame) <= limit:
                self._socket.requests.append(frame)
            else:
                refusal = Failure(LimitExceeded.code, "too many bytes in a message")
                self._client.core.receive(out.request.id, refusal, self.connection.session)
        return True

    def _receive(self) -> bool:
        if not self._socket.replies:
            return self._wait(no_reply(self._client.core))
        request, reply = wire.decode_reply(self._socket.replies.popleft())
        if request != wire.UNREADABLE:
            self._client.core.receive(request, reply, self.connection.session)
        return True

    def _wait(self, late: RadixKVError) -> bool:
        if not self._ended and self.connection.pipe.hung_up:
            self._ended = True
            self._client.core.left(self.connection.session, self.connection.epoch)
            self._until = min(self._until, self._client.now + LAST_WORDS_S)
            return True
        if self._client.now >= self._until:
            raise Unavailable("the session ended") if self._ended else late
        return False
