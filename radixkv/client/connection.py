"""The attach connection of a session, as many threads use it: asked by one at a time, watched by all."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading

from radixkv.client import forks
from radixkv.client.session import Session
from radixkv.commands import Welcome
from radixkv.errors import SessionLost, Unavailable
from radixkv.ipc.attach import Attachment

ENDED = "the session ended: the daemon went away, or ended it"
HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL

_log = logging.getLogger("radixkv.client")


class Connection:
    """A session's attach connection. The session lives as long as it is open; anyone may watch it and hang up.

    ``with connection:`` around every use: its descriptor is closed when it has ended and nobody uses it any more.
    """

    def __init__(self, attachment: Attachment, session: Session) -> None:
        self.attachment = attachment
        self.session = session
        self.epoch = session.epoch
        """Of the daemon at the other end: what is sent and received here belongs to it."""
        self._lock = threading.Lock()
        self._users = 0
        self._over = False
        self._fd = os.dup(attachment.fileno())

    def fileno(self) -> int:
        return self._fd

    def __enter__(self) -> Connection:
        """Errors: Unavailable when it has ended."""
        with self._lock:
            if self._over:
                raise Unavailable(ENDED)
            self._users += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._users -= 1
            self._close_if_unused()

    def rejoin(self, rank: int = 0) -> Welcome:
        """Ask the daemon to go on with the session. Errors: SessionLost, and those of ``Attachment.rejoin``."""
        before = self.session.welcome
        welcome = self.attachment.rejoin(before.session, before.token, rank)
        if welcome.cache_id != before.cache_id:
            raise SessionLost("the daemon has another cache")
        return welcome

    def enter(self) -> None:
        """The session goes on here, in its present epoch."""
        self.epoch = self.session.epoch
        self.session.daemon_lives = self.stands
        lifeline = self.attachment.take_lifeline()
        if lifeline >= 0:
            self.session.lifeline = forks.Lifeline(lifeline)

    def hang_up(self) -> None:
        """End the session, unless the daemon went away before. All who wait for the connection wake up."""
        with self._lock:
            if self._over:
                return
            self._over = True
            if self.session.daemon_lives == self.stands:
                self.session.daemon_lives = _never
            try:
                with socket.socket(fileno=os.dup(self._fd)) as end:
                    end.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                _log.debug("the other end was faster: %s", error)
            self._close_if_unused()

    def stands(self) -> bool:
        """The other end is open: its daemon lives, and no other one does."""
        with self._lock:
            if self._over:
                return False
            poll = select.poll()
            poll.register(self._fd, select.POLLRDHUP)
            return not poll.poll(0)

    def forget(self) -> None:
        """In a forked child: let go of the connection without ending it. Takes no lock: its holder is not here."""
        if self._fd >= 0:
            self._close()

    def _close_if_unused(self) -> None:
        if self._over and not self._users and self._fd >= 0:
            self._close()

    def _close(self) -> None:
        self.attachment.close()
        os.close(self._fd)
        self._fd = -1


def _never() -> bool:
    return False
