"""The connected client behind ``Client``, ``Pool`` and ``Sequence``: connects, runs verbs, heals after a restart.

::

    calling thread          its own Line (DEALER) ──── request, reply ────────────── daemon
    calling thread          its own Line (DEALER) ──── request, reply ────────────── daemon
    keeper thread           its own Line (DEALER) ──── heartbeats, what is left ──── daemon
                            Connection (attach) ─────── its end is the session's end

What the keeper does is in ``keeper.py``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

import zmq

from radixkv.client import forks, verbs
from radixkv.client.connection import ENDED, Connection
from radixkv.client.core import Away, Core, no_reply
from radixkv.client.effects import Ask, Effect, Linger, NeedQuiet, NeedSession, Synchronize, Verb
from radixkv.client.keeper import BYE_S, FAREWELL_S, Keeper
from radixkv.client.line import Line
from radixkv.client.mapping import map_pool
from radixkv.client.outbox import Event
from radixkv.client.pool import PoolState
from radixkv.client.resume import resume
from radixkv.client.session import Session
from radixkv.commands import PROTOCOL_VERSION
from radixkv.errors import (
    BadRequest,
    Forked,
    PermissionDenied,
    RadixKVError,
    SessionLost,
    Unavailable,
    VersionMismatch,
)
from radixkv.ipc.attach import NOBODY_THERE, Attachment
from radixkv.ipc.endpoint import Endpoint

T = TypeVar("T")

RETRY_FIRST_S, RETRY_MAX_S = 0.02, 0.5
LINGER_S = 0.001
RESUME_S = 86400.0
"""The keeper waits for the answer to a claim as long as the daemon lives: to hang up would end the session."""

_log = logging.getLogger("radixkv.client")


class Locked(Protocol):
    lock: Any


class Link:
    """One client's connection. Thread-safe. ``timeout``: seconds a reply may take."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self.endpoint = endpoint
        self.core = Core(timeout, time.monotonic)
        self.pools: weakref.WeakValueDictionary[str, PoolState] = weakref.WeakValueDictionary()
        self.forked = False
        self.closed = False
        self._pid = os.getpid()
        self._connection: Connection | None = None
        self._joining: Connection | None = None
        """In which the session may go on: for nobody to use, but to hang up on."""
        self._failure: RadixKVError | None = None
        self._changed = threading.Condition()
        self._attaching = threading.RLock()
        """Held while a question is asked on an attach connection, and until its answer is noted."""
        self._local = threading.local()
        self._lines: weakref.WeakSet[Line] = weakref.WeakSet()
        self._sockets: set[zmq.Socket[bytes]] = set()
        self._keeper = Keeper(self)
        self.core.outbox.changed = self._notify
        self.core.outbox.stirred = self._keeper.stir
        forks.register(self)

    # -- running verbs --------------------------------------------------------------------------------------------

    def run(self, verb: Verb[T], locks: Iterable[Locked] = ()) -> T:
        """Carry out a verb's effects one after the other, holding the locks of the sequences it changes."""
        self.check()
        with ExitStack() as held:
            for one in locks:
                held.enter_context(one.lock)
            until = self.core.clock() + self.core.timeout
            try:
                effect = next(verb)
                while True:
                    try:
                        answer = self._carry_out(effect, until)
                    except BaseException as error:  # noqa: BLE001 - the verb decides what it means
                        effect = verb.throw(error)
                        continue
                    if isinstance(effect, Synchronize | Linger):
                        until = self.core.clock() + self.core.timeout
                    effect = verb.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def check(self) -> None:
        """Errors: Forked in a child of the process that connected; Unavailable when closed."""
        if self.forked or self._pid != os.getpid():
            raise Forked("this client was opened before fork(); open another one in the child")
        if self.closed:
            raise _closed()

    def _carry_out(self, effect: Effect, until: float) -> Any:
        match effect:
            case NeedSession():
                return self.connection(until + effect.wait_s).session
            case Ask():
                self.exchange(effect, until + effect.wait_s)
                return effect.answers()
            case Synchronize():
                return effect.event.synchronize()
            case Linger():
                return self._linger(effect.event, effect.until)
            case NeedQuiet():
                return self._wait_for_quiet(effect, until)

    def exchange(self, ask: Ask, until: float) -> None:
        """Carry a question to the daemon and its answers back. Errors: Timeout, Unavailable, Away."""
        line = self._line()
        try:
            with self.conversation(ask.session) as connection:
                line.exchange(connection, ask, until)
        finally:
            if self.closed:
                line.close()

    @contextmanager
    def conversation(self, session: Session) -> Iterator[Connection]:
        """The connection to ask in. Says what its end means, and sees to it that everybody notices.

        Errors: Unavailable, Away.
        """
        connection = self._connection
        if connection is None or connection.session is not session:
            raise _closed() if self.closed else Unavailable(ENDED)
        try:
            yield connection
        except Unavailable as error:
            if self.closed:
                raise _closed() from None
            raise (Away(error.message) if session.away or session.epoch != connection.epoch else error) from None
        finally:
            if session.over or session.away or session.epoch != connection.epoch:
                self.lose(connection)

    def _line(self) -> Line:
        line: Line | None = getattr(self._local, "line", None)
        if line is None:
            line = Line(self.core, self.endpoint, self._sockets)
            self._local.line = line
            with self._changed:
                self._lines.add(line)
        return line

    def _linger(self, event: Event | None, until: float | None) -> None:
        if event is not None and until is None:
            event.synchronize()
            return
        while event is not None and not event.query():
            if until is not None and self.core.clock() >= until:
                return
            time.sleep(LINGER_S)
        if event is None:
            with self._changed:
                self._changed.wait(LINGER_S)

    def _wait_for_quiet(self, effect: NeedQuiet, until: float) -> None:
        with self._changed:
            while self.core.on_its_way(effect.seq):
                left = until - self.core.clock()
                if left <= 0:
                    raise no_reply(self.core)
                self.check()
                self._changed.wait(left)

    # -- the session ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect, trying until the timeout. Errors: Unavailable, VersionMismatch, PermissionDenied, ..."""
        began = self.core.clock()
        until = began + self.core.timeout
        pause = RETRY_FIRST_S
        while True:
            self.check()
            left = until - self.core.clock()
            try:
                self.connect(max(0.001, left))
                break
            except Unavailable as error:
                tried_s = self.core.clock() - began
                if tried_s + pause >= self.core.timeout:
                    hint = "; start one with `radixkv serve`" if isinstance(error.__cause__, NOBODY_THERE) else ""
                    raise Unavailable(f"{error.message} (tried for {tried_s:.3g} s){hint}") from None
            time.sleep(pause)
            pause = min(2 * pause, RETRY_MAX_S)
        self._keeper.start()

    def connection(self, until: float) -> Connection:
        """The present connection; waits for the keeper to make one. Errors: Unavailable, and what keeps it out."""
        connection = self.present()
        if connection is not None:
            return connection
        with self._changed:
            while (connection := self.expected()) is None:
                left = until - self.core.clock()
                if left <= 0:
                    raise self.absent()
                self._changed.wait(left)
        return connection

    def expected(self) -> Connection | None:
        """The present connection; None while it is worth waiting for one. Errors: Unavailable, what keeps it out."""
        self.check()
        connection = self.present()
        if connection is None and isinstance(self._failure, VersionMismatch | PermissionDenied):
            raise self._failure
        return connection

    def absent(self) -> RadixKVError:
        """Why there is no connection, as far as is known."""
        return self._failure or Unavailable(f"no daemon answers at {self.endpoint.address}")

    def attach_pool(self, pool: PoolState) -> PoolState:
        """Map a pool's memory, unless it is mapped; gives the pool that is mapped.

        An attach connection that waits in vain is over, and with it the session; so the daemon is asked first, in a way
        that costs nothing, whether it answers at all.
        Errors: BadRequest (no such pool), Timeout, Unavailable.
        """
        until = self.core.clock() + self.core.timeout
        attached = None
        while attached is None:
            self.run(verbs.heartbeat())
            attached = self.try_to_attach(pool, until)
        return attached

    def try_to_attach(self, pool: PoolState, until: float) -> PoolState | None:
        """Blocks as long as it takes. None: the daemon went away, and the next one may be asked."""
        connection = self.connection(until)
        with self._attaching:
            known = self.pools.get(pool.name)
            if known is not None:
                return known
            try:
                with connection:
                    self._map(connection, pool)
            except Unavailable:
                self.lose(connection)
                if connection.session.over or self.core.clock() >= until:
                    raise
                return None
            if connection.session.over:
                return None
            self.pools[pool.name] = pool
            return pool

    def _map(self, connection: Connection, pool: PoolState) -> None:
        memory = map_pool(connection.attachment.map_pool(pool.name), pool.current)
        connection.session.memories[pool.name] = memory
        pool.current = memory

    def connect(self, timeout: float) -> None:
        """One attempt: to go on with the session that is away, or else to open another one."""
        session = self.core.session
        if session is not None:
            try:
                self._rejoin(session, timeout)
                return
            except (SessionLost, BadRequest) as refusal:
                _log.info("session %d is over: %s", session.id, refusal)
                self.core.ended(session)
                self._notify()
        self._hello(timeout)

    def _rejoin(self, session: Session, timeout: float) -> None:
        """Errors: SessionLost, BadRequest (a daemon that cannot); Unavailable and others: to be tried again."""
        connection = Connection(Attachment(self.endpoint, timeout), session)
        try:
            self._join(connection)
            welcome = connection.rejoin()
            claimed = self.core.rejoined(session, welcome)
            connection.enter()
            line = self._line()
            for ask in resume(self.core, session, claimed):
                line.exchange(connection, ask, self.core.clock() + RESUME_S)
            self._publish(connection)
        except BaseException:
            connection.hang_up()
            raise
        finally:
            self._joining = None

    def _join(self, connection: Connection) -> None:
        """Whoever closes the client does not wait for a daemon that does not come. Errors: Unavailable when closed."""
        with self._changed:
            if self.closed:
                raise _closed()
            self._joining = connection

    def _hello(self, timeout: float) -> None:
        """The session is there for others once every known pool is mapped again."""
        attachment = Attachment(self.endpoint, timeout)
        try:
            welcome = attachment.hello()
            if welcome.version != PROTOCOL_VERSION:
                raise VersionMismatch(
                    "the daemon speaks another protocol", daemon=welcome.version, ours=PROTOCOL_VERSION
                )
            connection = Connection(attachment, Session(welcome))
            connection.enter()
        except BaseException:
            attachment.close()
            raise
        try:
            with self._attaching:
                for pool in list(self.pools.values()):
                    self._map_again(connection, pool)
                self._publish(connection)
        except BaseException:
            connection.hang_up()
            raise

    def _map_again(self, connection: Connection, pool: PoolState) -> None:
        try:
            self._map(connection, pool)
        except BadRequest as error:
            _log.warning("pool %r is not there any more: %s", pool.name, error)

    def _publish(self, connection: Connection) -> None:
        with self._changed:
            if self.closed:
                connection.hang_up()
                return
            self.core.opened(connection.session)
            self._connection = connection
            self._failure = None
        self.core.resumed(connection.session, connection.epoch)
        self._notify()

    def lose(self, connection: Connection) -> None:
        """The daemon went away, or ended the session: everyone who waits in it wakes up, the keeper connects anew."""
        self.core.left(connection.session, connection.epoch)
        connection.hang_up()
        self._notify()

    def present(self) -> Connection | None:
        """The connection in which the session goes on, if there is one."""
        connection = self._connection
        if connection is None:
            return None
        session = connection.session
        return None if session.over or session.away or session.epoch != connection.epoch else connection

    def failed(self, why: RadixKVError) -> None:
        """Connecting anew failed: who waits for it may want to know."""
        self._failure = why
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- the end --------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Begin to close; takes no lock that another thread could hold, so that a finaliser may call it."""
        if self.forked or self.closed:
            return
        self.closed = True
        self._keeper.stir()

    def close(self) -> None:
        """End the session. Calls of other threads that still wait end in Unavailable("closed")."""
        if self.forked:
            return
        self.let_go()
        with self._changed:
            joining = self._joining
        if joining is not None:
            joining.hang_up()
        self._keeper.join(FAREWELL_S + 2 * BYE_S)
        connection = self._connection
        if connection is not None:
            self.core.ended(connection.session)
            self.lose(connection)
            connection.session.memories.clear()  # unmapped when the last view is gone, not when a collector comes
            connection.session.lifeline = None
        for line in list(self._lines):
            line.close()
        self._notify()
        self.core.outbox.detach()

    def disown(self) -> None:
        """In a forked child, first of all: nobody may use this."""
        self.forked = True

    def forget(self) -> list[object]:
        """In a forked child: let go of everything. See ``forks``."""
        leftovers: list[object] = [self, self._keeper, self._local, *self._sockets, *self._lines]
        for connection in (self._connection, self._joining):
            if connection is not None:
                connection.session.over = True
                connection.forget()
                leftovers.append(connection)
        self._keeper.forget()
        forks.close_connections(self.endpoint.path)
        forks.close_connections(self.endpoint.attach_path)
        return leftovers


def _closed() -> Unavailable:
    return Unavailable("closed")
