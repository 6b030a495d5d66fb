"""How a client's own thread is woken from its sleep: a descriptor to be polled beside others."""

from __future__ import annotations

import os
import select
import threading


class Wakeup:
    """``stir`` may be called from anywhere, from a finaliser too, also when nobody sleeps any more."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.RLock()
        """Held while the descriptor is written or closed; re-entrant, for a finaliser that runs inside."""

    def fileno(self) -> int:
        return self._fd

    def stir(self) -> None:
        """There is something to do."""
        with self._lock:
            if self._fd >= 0 and self._pid == os.getpid():
                os.eventfd_write(self._fd, 1)

    def awake(self) -> None:
        """What has been stirred up to now is known."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def sleep(self, seconds: float) -> None:
        """Until stirred, or until so much time has passed."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if poll.poll(seconds * 1000):
            self.awake()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0 and self._pid == os.getpid():
                os.close(self._fd)
                self._fd = -1

    def forget(self) -> None:
        """In a forked child. Takes no lock: its holder is not here."""
        if self._fd >= 0:
            os.close(self._fd)

    def __del__(self) -> None:
        self.close()
