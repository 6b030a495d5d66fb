"""The keeper: ``radixkv serve --supervised``. Keeps what must outlive the daemon, and starts the next one.

::

    claim the endpoint, open its sockets
    ┌─> start a daemon with all that is kept ──> keep what it sends (ipc/fdstore.py) ──> it ends and is reaped ─┐
    └── by a signal, an unexpected code, or 0 without being asked: again; a broken invariant (70): again, empty ┘
        0 after SIGTERM or SIGINT to the keeper: 0; configuration, endpoint, memory (2, 3, 4): the same code,
        but for what passes: memory that old workers still map, or that a killed daemon's copier still writes to;
        and, once a daemon has served, a configuration that somebody can mend: the pages wait for that

One thread, no ZeroMQ, no memory mapped, nothing decided about pages. A daemon that dies while it starts is started
again after a pause that grows; so is one that crashes again and again soon after. Should the keeper itself be killed,
the kernel sends its daemon SIGTERM: that one drains and ends, instead of going on with nobody behind it.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from radixkv.errors import ConfigError, Exit, PermissionDenied
from radixkv.ipc.endpoint import Claim, Endpoint, EndpointInUse, open_socket, prepare_directory
from radixkv.ipc.fdstore import FIRST_FD, NAME_MAX, STORE_MAX, raise_open_files
from radixkv.ipc.log import open_log
from radixkv.ipc.refusals import FIELD, KEEPER, REFUSED
from radixkv.ipc.signals import STOP_SIGNALS, signal_socket, take_signals

YOUNG_S = 5.0
"""A daemon that ends by itself within this time has crashed; the next one is given a moment."""
PAUSE_FIRST_S, PAUSE_MAX_S = 0.1, 5.0
MEMORY_PATIENCE_S = 30.0
"""After a broken invariant: how long memory that is not there yet is waited for (old workers still map the old)."""

EXIT_NOT_STARTED = 127
_FINAL = (Exit.CONFIG, Exit.IN_USE, Exit.MEMORY)

_PR_SET_PDEATHSIG = 1
_DATAGRAM_MAX = 4096
_FDS_MAX = 253
_CREDENTIALS = 3 * 4
_libc = ctypes.CDLL(None)


def keep(endpoint: Endpoint, command: Sequence[str]) -> int:
    """Run ``command`` (a daemon of this endpoint) again and again until told to stop. Returns the exit code."""
    log, _ = open_log()
    try:
        with ExitStack() as stack:
            return Keeper(stack, endpoint, list(command), log).run()
    except (ConfigError, PermissionDenied) as error:
        log.critical("configuration refused", error=str(error))
        return Exit.CONFIG
    except EndpointInUse as error:
        log.critical("endpoint in use", error=str(error))
        return Exit.IN_USE


class Keeper:
    def __init__(self, stack: ExitStack, endpoint: Endpoint, command: list[str], log: Any) -> None:
        self._command = command
        self._log = log
        self._signals = stack.enter_context(signal_socket())
        raise_open_files()
        prepare_directory(endpoint)
        claim = Claim(endpoint)
        stack.callback(claim.release)
        self._doors = [open_socket(endpoint.path, socket.SOCK_STREAM)]
        self._doors.append(open_socket(endpoint.attach_path, socket.SOCK_SEQPACKET))
        self._notify = open_socket(endpoint.notify_path, socket.SOCK_DGRAM)
        self._notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._address = str(endpoint.notify_path)
        for made in (*self._doors, self._notify):
            stack.callback(made.close)
        self._kept: list[tuple[str, int]] = []
        stack.callback(self._forget)
        self._daemon = 0
        self._ready = False
        """The daemon that runs, or ran last, has been ready."""
        self._served = False
        """One has been."""
        self._refused = ""
        """What the last daemon's configuration was refused for, hashed; empty: it was not."""
        self._stops = 0
        self._crashes = 0
        self._patient_until = 0.0

    def run(self) -> int:
        while True:
            started, refused = time.monotonic(), self._refused
            code = self._run_daemon()
            self._served |= self._ready
            self._tell(code, refused)
            passes = self._may_pass(code, started)
            if self._is_stopping():
                return Exit.DRAINED if passes else max(code, Exit.DRAINED)
            if code in _FINAL and not passes:
                return code
            if code == Exit.BROKEN:
                self._forget()
                self._patient_until = time.monotonic() + MEMORY_PATIENCE_S
            self._pause(code, time.monotonic() - started)
            if self._is_stopping():
                return Exit.DRAINED

    def _tell(self, code: int, refused: str) -> None:
        """Nothing of one that was ``refused`` for the same as the one before."""
        if code == Exit.CONFIG and self._refused and self._refused == refused:
            return
        self._log.info("the daemon ended", code=code, ready=self._ready, asked=self._is_stopping())
        if code == Exit.CONFIG and self._served and not self._is_stopping():
            self._log.error("no daemon serves until the configuration is mended; the pages wait, it is tried again")

    def _may_pass(self, code: int, started: float) -> bool:
        """Old workers still map the old memory; or, once a daemon has served, what is left of it (its copier) still
        has the lock, or somebody will mend what he has written."""
        return (code == Exit.MEMORY and started < self._patient_until) or (
            code in (Exit.IN_USE, Exit.CONFIG) and self._served
        )

    def _is_stopping(self) -> bool:
        return self._stops > 0

    def _pause(self, code: int, lived_s: float) -> None:
        """Nothing after a first crash, then longer and longer; a signal ends it.

        SIGKILL comes from others and 0 is an orderly end: no crashes, once the daemon was ready.
        """
        crashed = not self._ready or (code not in (-signal.SIGKILL, Exit.DRAINED) and lived_s < YOUNG_S)
        self._crashes = self._crashes + 1 if crashed else 0
        if self._crashes <= 1:
            return
        pause_s = min(PAUSE_FIRST_S * 2.0 ** min(self._crashes - 2, 16), PAUSE_MAX_S)
        if code != Exit.CONFIG:
            self._log.warning("the daemon crashed again", crashes=self._crashes, pause_s=pause_s)
        until = time.monotonic() + pause_s
        while not self._is_stopping() and (left_s := until - time.monotonic()) > 0:
            self._wait([self._signals], left_s)

    # -- one daemon -----------------------------------------------------------------------------------------------

    def _run_daemon(self) -> int:
        """Start a daemon, serve as its store until it has ended, reap it. Its exit code, or minus its signal."""
        self._ready = False
        known, self._refused = self._refused, ""
        try:
            self._daemon = pid = self._spawn(known)
        except OSError as error:
            self._log.warning("no daemon can be started at the moment", error=str(error))
            return EXIT_NOT_STARTED
        pidfd = os.pidfd_open(pid)
        try:
            while pidfd not in self._wait([self._signals, self._notify, pidfd]):
                pass
            while self._receive():  # what it said before it died
                pass
        finally:
            os.close(pidfd)
        self._daemon = 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _wait(self, sources: list[Any], timeout_s: float | None = None) -> list[Any]:
        """Sleep until one of these is readable; signals and notifications are dealt with. Which ones are."""
        poll = select.poll()
        for source in sources:
            poll.register(source, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000 + 1)]
        if self._signals.fileno() in ready:
            for number in take_signals(self._signals):
                self._stop(number)
        if self._notify.fileno() in ready:
            self._receive()
        return ready

    def _stop(self, number: signal.Signals) -> None:
        """The first signal is passed on, so that the daemon drains; a second one ends it at once."""
        self._stops += 1
        self._log.info("stopping", signal=number.name, at_once=self._stops > 1)
        if self._daemon:
            os.kill(self._daemon, signal.SIGTERM if self._stops == 1 else signal.SIGKILL)

    def _spawn(self, refused: str) -> int:
        """Fork and exec the daemon; its process id. The child does nothing but rearrange descriptors.

        ``refused``: what need not be said once more.

        Errors: OSError, where there is no memory or no room for another process.
        """
        stored = [("doors", door.fileno()) for door in self._doors] + self._kept
        parent = os.getpid()
        # Signals wait until the child's are its own: before that it would tell our signal socket about them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if pid:
            return pid
        try:
            os.setsid()  # the terminal's ctrl-c is for the keeper alone
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
            if os.getppid() != parent:
                os._exit(Exit.DRAINED)
            above = FIRST_FD + len(stored)
            spare = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for _, fd in stored]
            for place, fd in enumerate(spare, FIRST_FD):
                os.dup2(fd, place)
            environ = {
                **os.environ,
                "NOTIFY_SOCKET": self._address,
                "FDSTORE": str(STORE_MAX),
                KEEPER: self._address,
                REFUSED: refused,
                "LISTEN_PID": str(os.getpid()),
                "LISTEN_FDS": str(len(stored)),
                "LISTEN_FDNAMES": ":".join(name for name, _ in stored),
            }
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            os.execve(self._command[0], self._command, environ)  # noqa: S606 - our own command, no shell wanted
        finally:
            os._exit(EXIT_NOT_STARTED)

    # -- what is kept -----------------------------------------------------------------------------------------------

    def _receive(self) -> bool:
        """Take one datagram of our daemon. False: there is none."""
        room = socket.CMSG_SPACE(_FDS_MAX * 4) + socket.CMSG_SPACE(_CREDENTIALS)
        try:
            message, extras, _, _ = self._notify.recvmsg(_DATAGRAM_MAX, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        fds, sender = array.array("i"), 0
        for level, kind, data in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                sender = int.from_bytes(data[:4], "little")
        fields = dict(line.partition("=")[::2] for line in message.decode(errors="replace").split("\n"))
        name = fields.get("FDNAME", "")
        if sender != self._daemon:
            self._log.warning("somebody else spoke to the keeper", pid=sender)
        elif "FDSTOREREMOVE" in fields:
            self._forget(name)
        elif "FDSTORE" in fields and _is_name(name) and len(self._kept) + len(fds) <= STORE_MAX:
            self._kept += [(name, fd) for fd in fds]
            return True
        elif "READY" in fields:
            self._ready = True
        elif FIELD in fields:
            self._refused = fields[FIELD]
        for fd in fds:
            os.close(fd)
        return True

    def _forget(self, name: str | None = None) -> None:
        """Close what is kept under a name, or everything. The endpoint's sockets stay."""
        for kept, fd in self._kept:
            if name in (None, kept):
                os.close(fd)
        self._kept = [(kept, fd) for kept, fd in self._kept if name not in (None, kept)]


def _is_name(name: str) -> bool:
    return 0 < len(name) <= NAME_MAX and name.isprintable() and name.isascii() and ":" not in name
