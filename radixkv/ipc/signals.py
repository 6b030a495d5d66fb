"""Stop signals as bytes on a socket, so that they wait in epoll like everything else."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_READ_BYTES = 64


@contextlib.contextmanager
def signal_socket() -> Iterator[socket.socket]:
    """A socket on which each stop signal becomes a byte. Only the main thread can do this (ValueError)."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def take_signals(reader: socket.socket) -> list[signal.Signals]:
    """The stop signals that have arrived, in order."""
    try:
        numbers = reader.recv(_READ_BYTES)
    except BlockingIOError:
        return []
    return [signal.Signals(number) for number in numbers if number in STOP_SIGNALS]
