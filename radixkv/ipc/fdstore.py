"""The store: who keeps this daemon's file descriptors over its death. By the sd_notify protocol of systemd.

::

    daemon ── FDSTORE=1, FDNAME=name, descriptors ──> store       from now on they outlive the daemon
           ── FDSTOREREMOVE=1, FDNAME=name ─────────> store
    store  ── exec, descriptors 3, 4, ... ──────────> next daemon  LISTEN_FDS, LISTEN_FDNAMES, LISTEN_PID

The store is ``radixkv serve --supervised`` (``keeper.py``) or systemd (``FileDescriptorStoreMax=``). A datagram that
was sent is not lost with its sender: what must be kept is sent before anybody can see it.

What is stored::

    doors          listening sockets of the endpoint; the lock file too, if the daemon and not its keeper made them
    arena-I-R      pool I, arena of rank R all of these, and then
    host-I-R       the same of its host tier, if it has one
    table-I        its descriptor table
    manifest       which pools they are; the last, so that with it everything is there
    member-S-R     of rank R of session S: pidfd and lifeline, in one datagram
"""

from __future__ import annotations

import array
import fcntl
import os
import resource
import select
import socket
import time
from collections import deque
from collections.abc import MutableMapping

from radixkv.errors import Unavailable

FIRST_FD = 3
NAME_MAX = 255
SEND_MS = 200
"""How long a daemon that serves waits, at most, until the store has room for a datagram (it holds about ten)."""
START_MS = 10_000
"""The same while it starts and keeps nobody waiting."""

STORE_MAX = 4096
"""Descriptors that a store holds, at most; their names have to fit into one environment variable (128 KiB)."""
SESSIONS_MAX = 1000
"""``limits.sessions`` under a store: of as many ended ones processes may still live, two descriptors each."""
MEMBERS_MAX = 2 * SESSIONS_MAX
"""Processes that a store can hold: of sessions, and of ended ones that still live."""
_OPEN_FILES = 65_536

Stored = dict[str, list[int]]
"""Descriptors by name, as they come from the store."""


class Store:
    """The daemon's end. A store that does not read costs SEND_MS once; until it does, newcomers are refused at once."""

    def __init__(self, address: str) -> None:
        """``address``: a path, or ``@name`` of the abstract namespace. Errors: Unavailable."""
        self._reads = True
        self._patience_ms = START_MS
        self._to_drop: deque[str] = deque()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"the store at {address} cannot be reached: {error.strerror}") from error

    def keep(self, name: str, *fds: int) -> None:
        """Have these descriptors kept under a name. When this returns, our death does not lose them.

        Errors: Unavailable when the store does not take them.
        """
        # FDPOLL=0: systemd would drop a descriptor as soon as its other end is gone, which is what we want to find out.
        if not self._deliver(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fds):
            raise Unavailable("the store does not take file descriptors at the moment")

    def _deliver(self, message: str, fds: tuple[int, ...] = ()) -> bool:
        """Wait until the store has room; but not once more if it had none the last time."""
        until = time.monotonic() + self._patience_ms / 1000
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while not (sent := self._send_after_drops(message, fds)) and self._reads:
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            room.poll(left_s * 1000)
        self._reads = sent
        return sent

    def _send_after_drops(self, message: str, fds: tuple[int, ...]) -> bool:
        """In the order in which all was asked for: a name may have been dropped before."""
        self.flush()
        return not self._to_drop and self._send(message, fds)

    def drop(self, name: str) -> None:
        """Have nothing kept under this name, as soon as the store reads it. Never waits."""
        self._to_drop.append(name)
        self.flush()

    @property
    def idle(self) -> bool:
        """All that was to be dropped is."""
        return not self._to_drop

    def flush(self) -> None:
        """What could not be dropped yet: try again."""
        while self._to_drop and self._send(f"FDSTOREREMOVE=1\nFDNAME={self._to_drop[0]}"):
            self._to_drop.popleft()

    def ready(self) -> None:
        """From now on the daemon serves."""
        self._deliver("READY=1")
        self._patience_ms = SEND_MS

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: str, fds: tuple[int, ...] = ()) -> bool:
        """False: no room, or nobody there."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([message.encode()], rights)
        except BlockingIOError:
            return False
        except OSError:
            self._reads = False
            return False
        return True


def raise_open_files() -> None:
    """A descriptor or two are needed for each worker; the usual soft limit of 1,024 is less than that can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def find_store(environ: MutableMapping[str, str]) -> Store | None:
    """The store that the environment names; None where nobody keeps descriptors (then every start is cold).

    NOTIFY_SOCKET alone does not say that descriptors are kept: FDSTORE, how many may be, has to be there as well.
    Both are taken out of the environment. Errors: Unavailable.
    """
    address, room = environ.pop("NOTIFY_SOCKET", ""), environ.pop("FDSTORE", "")
    return Store(address) if address and room.isdecimal() and int(room) else None


def take_stored(environ: MutableMapping[str, str]) -> Stored:
    """The descriptors that came from the store. None of them is inherited by anybody else."""
    pid, count, names = (environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    found: Stored = {}
    if pid != str(os.getpid()) or not count.isdecimal():
        return found
    for fd, name in zip(range(FIRST_FD, FIRST_FD + int(count)), names.split(":"), strict=False):
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        found.setdefault(name, []).append(fd)
    return found
