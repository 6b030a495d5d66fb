"""The connected client behind ``radixkv.aio``: runs verbs in tasks of an event loop.

::

    task ─┐
    task ─┼─ one LoopLine (DEALER) a loop ──── requests, replies ───────── daemon
    task ─┘
    keeper thread  its own Line (DEALER) ───── heartbeats, what is left ── daemon

What a verb asks for is awaited (``LoopLink.perform``); connecting, healing and saying bye are the blocking client's,
the keeper's thread with them: so a session outlives a loop that stands still, or ends, and there is one way to resume.
What only blocks (connecting, mapping, an event's ``synchronize``) runs in a thread of its own.

ZeroMQ's descriptor says once that something has happened, until the socket is used again. So whoever has used it looks
at all that is there (``LoopLine.look``), not only at what he waits for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, closing, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import zmq

from radixkv.client import verbs
from radixkv.client.batch import Outgoing
from radixkv.client.connection import ENDED, Connection
from radixkv.client.core import Away, Core, no_reply
from radixkv.client.effects import Ask, Effect, Linger, NeedQuiet, NeedSession, Synchronize, Verb
from radixkv.client.line import LAST_WORDS_S, Line, Steps
from radixkv.client.link import LINGER_S, Link
from radixkv.client.outbox import Event
from radixkv.client.pool import PoolState
from radixkv.client.session import Session
from radixkv.commands import Reply
from radixkv.errors import RadixKVError, Unavailable
from radixkv.ipc.endpoint import Endpoint

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """What blocks, in a thread of its own. When the caller is cancelled the thread goes on, and nobody waits for it."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        outcome.set_running_or_notify_cancel()
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            outcome.set_exception(error)

    threading.Thread(target=run, name="radixkv-blocking", daemon=True).start()
    return await asyncio.wrap_future(outcome)


class Wait:
    """A task's waiting, at most until a monotonic time."""

    def __init__(self, core: Core, until: float) -> None:
        self.until = until
        self.wake = asyncio.Event()
        self._core = core

    async def woken(self) -> bool:
        """Until somebody wakes it. False: the time is over."""
        left = max(0.0, self.until - self._core.clock())
        try:
            async with asyncio.timeout(left):
                await self.wake.wait()
        except TimeoutError:
            return False
        self.wake.clear()
        return True


class Exchange(Wait):
    """The waiting of one exchange; as ``line.Patience`` it lasts only shortly beyond the end of the session."""

    def __init__(self, core: Core, connection: Connection, until: float) -> None:
        super().__init__(core, until)
        self.connection = connection
        self.requests: set[int] = set()
        """Whose answers it has waited for."""
        self.error: RadixKVError | None = None
        self._ended = False

    async def patience(self) -> None:
        """Until something happens. Errors: Timeout; Unavailable when the session has ended and nothing comes."""
        woken = await self.woken()
        if self.error is not None:
            raise self.error
        if not woken:
            raise Unavailable(ENDED) if self._ended else no_reply(self._core)

    def end(self) -> None:
        """No reply will leave any more; one that has left may still be on its way."""
        if not self._ended:
            self._ended = True
            self.until = min(self.until, self._core.clock() + LAST_WORDS_S)
            self.wake.set()

    def fail(self, error: RadixKVError) -> None:
        self.error = error
        self.wake.set()


class LoopLine(Line):
    """The way of all tasks of one loop to the daemon. Used in the loop's thread alone, but for ``stir``."""

    def __init__(self, link: LoopLink, loop: asyncio.AbstractEventLoop, sockets: set[zmq.Socket[bytes]]) -> None:
        super().__init__(link.core, link.endpoint, sockets)
        self._link = link
        self._loop = loop
        self._exchanges: set[Exchange] = set()
        self._senders: set[Exchange] = set()
        """Those that wait for room to send."""
        self._askers: dict[int, set[Exchange]] = {}
        """Those that wait for an answer, by request id. Two may wait for the same one, to different sequences."""
        self._watchers: set[Wait] = set()
        self._turns: WeakKeyDictionary[Any, asyncio.Lock] = WeakKeyDictionary()

    def turn(self, seq: Any) -> asyncio.Lock:
        """Held while a verb on this sequence runs: tasks come one after the other."""
        lock = self._turns.get(seq)
        if lock is None:
            lock = self._turns[seq] = asyncio.Lock()
        return lock

    # -- exchanges ------------------------------------------------------------------------------------------------

    async def converse(self, connection: Connection, ask: Ask, until: float) -> None:
        """Send what is asked and wait until all replies are there. Errors: Timeout, Unavailable, Away."""
        exchange = Exchange(self._core, connection, until)
        with connection:
            self._exchanges.add(exchange)
            try:
                await self._drive(self._steps(connection, ask, until), exchange)
            finally:
                self._forget(exchange)
                self.look()

    async def _drive(self, steps: Steps, exchange: Exchange) -> None:
        with closing(steps), suppress(StopIteration):
            awaited = next(steps)
            while True:
                try:
                    await self._come_to(awaited, exchange)
                except BaseException as error:  # noqa: BLE001 - it is raised again, once the exchange is wound up
                    steps.throw(error)
                awaited = next(steps)

    async def _come_to(self, awaited: Sequence[Outgoing], exchange: Exchange) -> None:
        for out in awaited:
            exchange.requests.add(out.request.id)
            self._askers.setdefault(out.request.id, set()).add(exchange)
        if not awaited:
            self._senders.add(exchange)
        if self._link.present() is not exchange.connection:
            exchange.end()
        self.look()
        await exchange.patience()

    def _forget(self, exchange: Exchange) -> None:
        self._exchanges.discard(exchange)
        self._senders.discard(exchange)
        for request in exchange.requests & self._askers.keys():
            self._askers[request].discard(exchange)
            if not self._askers[request]:
                del self._askers[request]

    # -- the socket -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in all that has come, and wake whom it concerns."""
        while self._socket is not None and self._connected is not None:
            events = int(self._socket.getsockopt(zmq.EVENTS))
            if events & zmq.POLLOUT:
                for sender in self._senders:
                    sender.wake.set()
                self._senders.clear()
            if not events & zmq.POLLIN:
                return
            try:
                super()._take_in(self._socket, self._connected.session)
            except Away:
                for exchange in self._exchanges:
                    exchange.end()
            except RadixKVError as error:  # the daemon does not speak as agreed: nothing is worth waiting for
                for exchange in self._exchanges:
                    exchange.fail(error)

    def _take_in(self, socket: zmq.Socket[bytes], session: Session) -> bool:  # noqa: ARG002
        """Nobody reads for himself: ``look`` does for all."""
        return False

    def _settle(self, request: int, reply: Reply, session: Session) -> None:
        try:
            super()._settle(request, reply, session)
        finally:
            for exchange in self._askers.pop(request, ()):
                exchange.wake.set()

    def _open_socket(self) -> zmq.Socket[bytes]:
        socket = super()._open_socket()
        self._loop.add_reader(int(socket.getsockopt(zmq.FD)), self.look)
        return socket

    def _close_socket(self) -> None:
        """Who still waits in it waits for a daemon that is not there any more."""
        if self._socket is not None and self._pid == os.getpid():
            if not self._loop.is_closed():
                self._loop.remove_reader(int(self._socket.getsockopt(zmq.FD)))
            for exchange in self._exchanges:
                if exchange.connection is self._connected:
                    exchange.fail(Unavailable(ENDED))
        super()._close_socket()

    # -- other news -----------------------------------------------------------------------------------------------

    async def news(self, until: float) -> bool:
        """Until something has changed: the connection, or what is on its way. False: the time is over."""
        watcher = Wait(self._core, until)
        self._watchers.add(watcher)
        try:
            return await watcher.woken()
        finally:
            self._watchers.discard(watcher)

    def stir(self) -> None:
        """Something has changed. May be called from any thread, by a finaliser too."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits in it
            self._loop.call_soon_threadsafe(self._stirred)

    def _stirred(self) -> None:
        for watcher in self._watchers:
            watcher.wake.set()
        present = self._link.present()
        for exchange in self._exchanges:
            if exchange.connection is not present or self._link.closed:
                exchange.end()
        if self._link.closed and not self._exchanges:
            self.close()


class LoopLink(Link):
    """``perform`` for tasks, of as many loops as there are; all else as for threads, which may use it too."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self._loops: dict[asyncio.AbstractEventLoop, LoopLine] = {}
        super().__init__(endpoint, timeout)

    async def perform(self, verb: Verb[T], sequences: Iterable[Any] = ()) -> T:
        """As ``run``. A task that is cancelled leaves nothing behind, like a thread that is interrupted."""
        self.check()
        line = self._loop_line()
        async with AsyncExitStack() as turns:
            for seq in sequences:
                await turns.enter_async_context(line.turn(seq))
            until = self.core.clock() + self.core.timeout
            try:
                effect = next(verb)
                while True:
                    try:
                        answer = await self._see_to(effect, until, line)
                    except BaseException as error:  # noqa: BLE001 - the verb decides what it means
                        effect = verb.throw(error)
                        continue
                    if isinstance(effect, Synchronize | Linger):
                        until = self.core.clock() + self.core.timeout
                    effect = verb.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    async def attach(self, pool: PoolState) -> PoolState:
        """As ``attach_pool``."""
        until = self.core.clock() + self.core.timeout
        attached = None
        while attached is None:
            await self.perform(verbs.heartbeat())
            attached = await in_thread(lambda: self.try_to_attach(pool, until))
        return attached

    async def _see_to(self, effect: Effect, until: float, line: LoopLine) -> Any:
        match effect:
            case NeedSession():
                return await self._session(until + effect.wait_s, line)
            case Ask():
                await self._converse(effect, until + effect.wait_s, line)
                return effect.answers()
            case Synchronize():
                return await in_thread(effect.event.synchronize)
            case Linger():
                return await self._linger_on(effect.event, effect.until, line)
            case NeedQuiet():
                return await self._quiet(effect, until, line)

    async def _session(self, until: float, line: LoopLine) -> Session:
        while (connection := self.expected()) is None:
            if not await line.news(until):
                raise self.absent()
        return connection.session

    async def _converse(self, ask: Ask, until: float, line: LoopLine) -> None:
        with self.conversation(ask.session) as connection:
            await line.converse(connection, ask, until)

    async def _linger_on(self, event: Event | None, until: float | None, line: LoopLine) -> None:
        if event is None:
            await line.news(self.core.clock() + LINGER_S)
        elif until is None:
            await in_thread(event.synchronize)
        else:
            while not event.query() and self.core.clock() < until:
                await asyncio.sleep(LINGER_S)

    async def _quiet(self, effect: NeedQuiet, until: float, line: LoopLine) -> None:
        while self.core.on_its_way(effect.seq):
            if not await line.news(until):
                raise no_reply(self.core)
            self.check()

    def _loop_line(self) -> LoopLine:
        loop = asyncio.get_running_loop()
        line = self._loops.get(loop)
        if line is None:
            for ended in [other for other in self._loops if other.is_closed()]:
                self._loops.pop(ended).close()
            line = self._loops[loop] = LoopLine(self, loop, self._sockets)
        return line

    def _notify(self) -> None:
        super()._notify()
        self._stir()

    def let_go(self) -> None:
        super().let_go()
        if not self.forked:
            self._stir()

    def _stir(self) -> None:
        for line in list(self._loops.values()):
            line.stir()

    def forget(self) -> list[object]:
        return [*super().forget(), *self._loops, *self._loops.values()]
