"""The keeper: a client's own thread.

Sends heartbeats, and what nobody's message has taken along; notices the end of the connection and connects anew, to go
on with the session if it can (``resume.py``); says bye in the end.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from typing import TYPE_CHECKING

from radixkv.client.connection import HANGUP, Connection
from radixkv.client.effects import Ask
from radixkv.client.wakeup import Wakeup
from radixkv.commands import Bye, Heartbeat
from radixkv.errors import RadixKVError, Unavailable

if TYPE_CHECKING:
    from radixkv.client.link import Link

FENCE_POLL_S = 0.05
"""How often fenced operations, and requests in doubt, are looked after while there are any."""
RETRY_FIRST_S, RETRY_MAX_S = 0.02, 0.5
FENCE_LAST_POLL_S = 0.002
"""The same when the client is about to close."""
FAREWELL_S = 1.0
"""How long events that are not done, and then the daemon, hold up the end of a client."""
BYE_S = 0.1
"""How long the daemon is given at least to answer the bye."""

_log = logging.getLogger("radixkv.client")


class Keeper:
    """The thread, and how to wake it. Ends when the link is closed."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._keep, name="radixkv-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stir(self) -> None:
        """There is something to do. A finaliser may call it."""
        self._wakeup.stir()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end; nobody can wake it any more."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if not self._thread.is_alive():
            self._wakeup.close()

    def forget(self) -> None:
        """In a forked child, where this thread does not run."""
        self._wakeup.forget()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        link, core = self._link, self._link.core
        beat = core.clock()
        while not link.closed:
            connection = link.present()
            if connection is None:
                self._reconnect()
                continue
            interval = connection.session.welcome.heartbeat_s
            beat = min(beat, core.clock() + interval)
            wait = max(0.0, beat - core.clock())
            if self._hung_up(connection, min(wait, FENCE_POLL_S) if core.unfinished(connection.session) else wait):
                link.lose(connection)
                continue
            due = core.clock() >= beat
            if due:
                beat = core.clock() + interval
            if due or core.unfinished(connection.session) or core.outbox.pressing:
                self._send(Ask(connection.session, [Heartbeat()] if due else ()), core.timeout)
        self._farewell()

    def _hung_up(self, connection: Connection, wait_s: float) -> bool:
        """Sleep until something is to be done. True: the connection has ended."""
        poll = select.poll()
        try:
            with connection:
                poll.register(connection.fileno(), select.POLLRDHUP)
                poll.register(self._wakeup.fileno(), select.POLLIN)
                ready = dict(poll.poll(wait_s * 1000))
        except Unavailable:
            return True
        if ready.pop(self._wakeup.fileno(), 0):
            self._wakeup.awake()
        return any(events & HANGUP for events in ready.values())

    def _send(self, ask: Ask, timeout: float) -> None:
        """With what the outbox has ready. No answer is nobody's error here: the session's end shows by itself."""
        try:
            self._link.exchange(ask, self._link.core.clock() + timeout)
        except RadixKVError as error:
            _log.debug("session %d: %s", ask.session.id, error)

    def _reconnect(self) -> None:
        link = self._link
        pause = RETRY_FIRST_S
        while not link.closed:
            try:
                link.connect(link.core.timeout)
                return
            except RadixKVError as error:
                link.failed(error)
            except OSError as error:
                link.failed(Unavailable(f"cannot connect: {error}"))
            self._wakeup.sleep(pause)
            pause = min(2 * pause, RETRY_MAX_S)

    def _farewell(self) -> None:
        """Say bye, unless devices may still write to our pages: then the daemon has to wait for our process's end."""
        link, core = self._link, self._link.core
        connection = link.present()
        if connection is None:
            return
        until = core.clock() + min(FAREWELL_S, core.timeout)
        self._last_fences(connection, until)
        if not len(core.outbox):
            self._send(Ask(connection.session, [Bye()]), max(BYE_S, until - core.clock()))
        link.lose(connection)

    def _last_fences(self, connection: Connection, until: float) -> None:
        """Fenced operations whose events are done soon still go out; pages of the others are lost to everybody."""
        core = self._link.core
        while len(core.outbox) and self._link.present() is connection and core.clock() < until:
            if core.ready(connection.session):
                self._send(Ask(connection.session), until - core.clock())
            else:
                time.sleep(FENCE_LAST_POLL_S)
