"""The connected client behind ``Client``, ``Pool`` and ``Sequence``: connects, runs verbs, heals after a restart.

::

    calling thread          its own Line (DEALER) ──── request, reply ────────────── daemon
    calling thread          its own Line (DEALER) ──── request, reply ────────────── daemon
    keeper thread           its own Line (DEALER) ──── heartbeats, what is left ──── daemon
                            Connection (attach) ─────── its end is the session's end

The keeper sends heartbeats and what nobody's message has taken along, notices the end of the session, connects anew,
maps the pools again, and says bye in the end.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import zmq

from radixkv.client import forks, verbs
from radixkv.client.connection import ENDED, HANGUP, Connection
from radixkv.client.core import Core, no_reply
from radixkv.client.effects import Ask, Effect, Linger, NeedQuiet, NeedSession, Repeat, Synchronize, Verb
from radixkv.client.line import Line
from radixkv.client.mapping import PoolMemory
from radixkv.client.outbox import Event
from radixkv.client.pool import PoolState
from radixkv.client.session import Session
from radixkv.commands import PROTOCOL_VERSION, Bye, Heartbeat
from radixkv.errors import (
    BadRequest,
    Forked,
    PermissionDenied,
    RadixKVError,
    Timeout,
    Unavailable,
    VersionMismatch,
)
from radixkv.ipc.attach import Attachment
from radixkv.ipc.endpoint import Endpoint

T = TypeVar("T")

FENCE_POLL_S = 0.05
"""How often the keeper looks after fenced operations while there are any."""
RETRY_FIRST_S, RETRY_MAX_S = 0.02, 0.5
FAREWELL_S = 1.0
LINGER_S = 0.001

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
        self._connection: Connection | None = None
        self._failure: RadixKVError | None = None
        self._changed = threading.Condition()
        self._attaching = threading.RLock()
        """Held while a question is asked on an attach connection, and until its answer is noted."""
        self._local = threading.local()
        self._lines: weakref.WeakSet[Line] = weakref.WeakSet()
        self._sockets: set[zmq.Socket[bytes]] = set()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pid = os.getpid()
        self._keeper = threading.Thread(target=self._keep, name="radixkv-keeper", daemon=True)
        self.core.outbox.changed = self._notify
        self.core.outbox.stirred = self._stir
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
        if self.forked:
            raise Forked("this client was opened before fork(); open another one in the child")
        if self.closed:
            raise _closed()

    def _carry_out(self, effect: Effect, until: float) -> Any:
        match effect:
            case NeedSession():
                return self.connection(until).session
            case Ask():
                self._exchange(effect, until + effect.wait_s)
                return effect.answers()
            case Repeat():
                self._exchange(effect, until)
                return effect.outgoing.reply
            case Synchronize():
                return effect.event.synchronize()
            case Linger():
                return self._linger(effect.event, effect.until)
            case NeedQuiet():
                return self._wait_for_quiet(effect, until)

    def _exchange(self, effect: Ask | Repeat, until: float) -> None:
        connection = self._connection
        if connection is None or connection.session is not effect.session:
            raise _closed() if self.closed else Unavailable(ENDED)
        line = self._line()
        try:
            line.exchange(connection, effect, until)
        except Unavailable as error:
            raise (_closed() if self.closed else error) from None
        finally:
            if connection.session.over:
                self._lose(connection)
            if self.closed:
                line.close()

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
            while self.core.outbox.flying(effect.seq):
                left = until - self.core.clock()
                if left <= 0:
                    raise no_reply(self.core)
                self.check()
                self._changed.wait(left)

    # -- the session ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect, trying until the timeout. Errors: Unavailable, VersionMismatch, PermissionDenied, ..."""
        until = self.core.clock() + self.core.timeout
        pause = RETRY_FIRST_S
        while True:
            left = until - self.core.clock()
            try:
                self._connect(max(0.001, left))
                break
            except Unavailable as error:
                if self.core.clock() + pause >= until:
                    raise Unavailable(f"{error.message} (tried for {self.core.timeout:g} s)") from error
            time.sleep(pause)
            pause = min(2 * pause, RETRY_MAX_S)
        self._keeper.start()

    def connection(self, until: float) -> Connection:
        """The present connection; waits for the keeper to make one. Errors: Unavailable, and what keeps it out."""
        connection = self._connection
        if connection is not None and not connection.session.over:
            return connection
        with self._changed:
            while True:
                self.check()
                connection = self._connection
                if connection is not None and not connection.session.over:
                    return connection
                if isinstance(self._failure, VersionMismatch | PermissionDenied):
                    raise self._failure
                left = until - self.core.clock()
                if left <= 0:
                    raise self._failure or Unavailable(f"no daemon answers at {self.endpoint.address}")
                self._changed.wait(left)

    def attach_pool(self, pool: PoolState) -> PoolState:
        """Map a pool's memory, unless it is mapped; gives the pool that is mapped.

        An attach connection that waits in vain is over, and with it the session; so the daemon is asked first, in a way
        that costs nothing, whether it answers at all.
        Errors: BadRequest (no such pool), Timeout, Unavailable.
        """
        until = self.core.clock() + self.core.timeout
        while True:
            self.run(verbs.heartbeat())
            connection = self.connection(until)
            with self._attaching:
                known = self.pools.get(pool.name)
                if known is not None:
                    return known
                with connection:
                    try:
                        self._map(connection, pool)
                    except Unavailable:
                        self._lose(connection)
                        raise
                if not connection.session.over:
                    self.pools[pool.name] = pool
                    return pool

    def _map(self, connection: Connection, pool: PoolState) -> None:
        memory = PoolMemory(connection.attachment.map_pool(pool.name))
        connection.session.memories[pool.name] = memory
        pool.current = memory

    def _connect(self, timeout: float) -> None:
        """One attempt. The session is there for others once every known pool is mapped again."""
        attachment = Attachment(self.endpoint, timeout)
        try:
            welcome = attachment.hello()
            if welcome.version != PROTOCOL_VERSION:
                raise VersionMismatch(
                    "the daemon speaks another protocol", daemon=welcome.version, ours=PROTOCOL_VERSION
                )
            connection = Connection(attachment, Session(welcome))
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
            self._changed.notify_all()

    def _lose(self, connection: Connection) -> None:
        """The session is over: everyone who waits in it wakes up, the keeper connects anew."""
        self.core.ended(connection.session)
        connection.hang_up()
        self._notify()

    # -- the keeper -----------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        beat = self.core.clock()
        while not self.closed:
            connection = self._connection
            if connection is None or connection.session.over:
                self._reconnect()
                continue
            interval = connection.session.welcome.heartbeat_s
            beat = min(beat, self.core.clock() + interval)
            wait = max(0.0, beat - self.core.clock())
            if self._hung_up(connection, min(wait, FENCE_POLL_S) if len(self.core.outbox) else wait):
                self._lose(connection)
                continue
            due = self.core.clock() >= beat
            if due:
                beat = self.core.clock() + interval
            if due or len(self.core.outbox):
                self._send_leftovers(connection, Ask(connection.session, [Heartbeat()] if due else ()))
        self._farewell()

    def _send_leftovers(self, connection: Connection, ask: Ask) -> None:
        try:
            self._exchange(ask, self.core.clock() + self.core.timeout)
        except (Timeout, Unavailable) as error:
            _log.debug("heartbeat of session %d: %s", connection.session.id, error)

    def _hung_up(self, connection: Connection, wait_s: float) -> bool:
        """Sleep until something is to be done. True: the connection has ended."""
        poll = select.poll()
        try:
            with connection:
                poll.register(connection.fileno(), select.POLLRDHUP)
                poll.register(self._wake, select.POLLIN)
                ready = dict(poll.poll(wait_s * 1000))
        except Unavailable:
            return True
        if self._wake in ready:
            self._drain_wake()
        return any(events & HANGUP for fd, events in ready.items() if fd != self._wake)

    def _reconnect(self) -> None:
        pause = RETRY_FIRST_S
        while not self.closed:
            try:
                self._connect(self.core.timeout)
                return
            except RadixKVError as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            if poll.poll(pause * 1000):
                self._drain_wake()
            pause = min(2 * pause, RETRY_MAX_S)

    def _farewell(self) -> None:
        """Say bye, unless devices may still write to our pages: then the daemon has to wait for our end."""
        connection = self._connection
        if connection is not None and not connection.session.over:
            if not len(self.core.outbox):
                try:
                    ask = Ask(connection.session, [Bye()])
                    self._line().exchange(connection, ask, self.core.clock() + min(FAREWELL_S, self.core.timeout))
                except (Timeout, Unavailable) as error:
                    _log.debug("no answer to bye: %s", error)
            self._lose(connection)
        self._line().close()

    def _stir(self) -> None:
        if self._pid == os.getpid():
            os.eventfd_write(self._wake, 1)

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- the end --------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Begin to close; takes no lock that another thread could hold, so that a finaliser may call it."""
        if self.forked or self.closed:
            return
        self.closed = True
        self._stir()

    def close(self) -> None:
        """End the session. Calls of other threads that still wait end in Unavailable("closed")."""
        if self.forked:
            return
        self.let_go()
        if self._keeper.is_alive() and self._keeper is not threading.current_thread():
            self._keeper.join(FAREWELL_S)
        connection = self._connection
        if connection is not None:
            self._lose(connection)
        for line in list(self._lines):
            line.close()
        self._notify()
        self.core.outbox.detach()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            os.close(self._wake)

    def forget(self) -> list[object]:
        """In a forked child: nothing of this is ours. See ``forks``."""
        self.forked = True
        leftovers: list[object] = [self, self._local, *self._sockets, *self._lines]
        connection = self._connection
        if connection is not None:
            connection.session.over = True
            connection.forget()
            leftovers.append(connection)
        os.close(self._wake)
        forks.close_connections(self.endpoint.path)
        return leftovers


def _closed() -> Unavailable:
    return Unavailable("closed")
