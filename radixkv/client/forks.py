"""After fork(): the child lets go of what it inherited, the parent notices nothing.

A forked child that kept the attach connection open would keep its parent's session alive for ever; one that touched
ZeroMQ's sockets would talk on the parent's behalf. So in the child every inherited client is dead: its descriptors are
closed, ZeroMQ is not touched (its objects are kept alive for good, so that no finaliser runs), and use raises Forked.
Mapped memory is not inherited (MADV_DONTFORK); its objects too are kept, since unmapping would hit whatever lies at
those addresses by then.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import weakref
from pathlib import Path
from typing import Protocol


class Inherited(Protocol):
    """A client, as a forked child finds it."""

    def disown(self) -> None:
        """From now on every use raises Forked. Cannot fail."""
        ...

    def forget(self) -> list[object]:
        """Close what may be closed; gives the objects that must never be finalised."""
        ...


_clients: weakref.WeakSet[Inherited] = weakref.WeakSet()
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()
_FDS = Path("/proc/self/fd")


class Lifeline:
    """The end of a pipe that a session came with (``Attachment.take_lifeline``); closed with this object.

    Held open as long as the session's memory may be used, and by nobody else.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _lifelines.add(self)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def register(client: Inherited) -> None:
    _clients.add(client)


def register_mapping(memory: mmap.mmap) -> None:
    _mappings.add(memory)


def keep_for_good(thing: object) -> None:
    """No finaliser of this object ever runs in this process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _in_child() -> None:
    clients = list(_clients)
    for client in clients:
        client.disown()
    for mapping in list(_mappings):
        keep_for_good(mapping)
    for lifeline in list(_lifelines):
        lifeline.close()
    for client in clients:
        for leftover in client.forget():
            keep_for_good(leftover)
    _clients.clear()
    _mappings.clear()
    _lifelines.clear()


def close_connections(path: Path) -> None:
    """Close this process's descriptors of unix connections to a path, whoever opened them."""
    for name in os.listdir(_FDS):  # noqa: PTH208 - names, and all at once: the listing itself has a descriptor
        with contextlib.suppress(OSError):
            if str((_FDS / name).readlink()).startswith("socket:") and _peer(int(name)) == os.fsencode(path):
                os.close(int(name))


def _peer(fd: int) -> bytes | None:
    """Path of the unix socket that a socket is connected to. Raises OSError where it is not connected."""
    with socket.socket(fileno=os.dup(fd)) as connection:
        if connection.family != socket.AF_UNIX:
            return None
        return os.fsencode(connection.getpeername())


os.register_at_fork(after_in_child=_in_child)
