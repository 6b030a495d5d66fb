"""A store like systemd's: it knows nothing of radixkv, keeps what it is sent, and starts one command with all of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_EXEC = """
import fcntl, os, sys
names, command = sys.argv[1].split(":") if sys.argv[1] else [], sys.argv[3:]
given = [int(fd) for fd in sys.argv[2].split(":")] if names else []
spare = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3 + len(given)) for fd in given]
for fd in given:
    os.set_inheritable(fd, False)
for place, fd in enumerate(spare):
    os.dup2(fd, 3 + place)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(given)), LISTEN_FDNAMES=":".join(names))
os.execv(command[0], command)
"""


class StoreByHand:
    def __init__(self, directory: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._address = str(directory / "notify")
        self._socket.bind(self._address)
        self.kept: list[tuple[str, int]] = []
        self.said: list[str] = []

    def start(self, command: list[str], without: tuple[str, ...] = ()) -> Started:
        """The command, with everything that is kept but what has one of these names."""
        self.collect()
        given = [(name, fd) for name, fd in self.kept if name not in without]
        names, fds = ":".join(name for name, _ in given), ":".join(str(fd) for _, fd in given)
        environ = {**os.environ, "NOTIFY_SOCKET": self._address, "FDSTORE": "4096"}
        boot = [sys.executable, "-I", "-S", "-c", _EXEC, names, fds, *command]
        given_fds = [fd for _, fd in given]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return Started(subprocess.Popen(boot, env=environ, pass_fds=given_fds, **piped))

    def collect(self) -> list[str]:
        """Do what has been asked since; the names of all that is kept, sorted."""
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._socket, 4096, 253)
            except BlockingIOError:
                return sorted(name for name, _ in self.kept)
            fields = dict(line.split("=", 1) for line in message.decode().split("\n"))
            if "FDSTORE" in fields:
                assert fields["FDPOLL"] == "0"
                self.kept += [(fields["FDNAME"], fd) for fd in fds]
            elif "FDSTOREREMOVE" in fields:
                self.forget(fields["FDNAME"])
            else:
                self.said.append(message.decode())

    def fd(self, name: str) -> int:
        return next(fd for kept, fd in self.kept if kept == name)

    def replace(self, name: str, content: bytes) -> None:
        self.forget(name)
        fd = os.memfd_create(name)
        os.write(fd, content)
        self.kept.append((name, fd))

    def forget(self, *names: str) -> None:
        for kept, fd in self.kept:
            if kept in names:
                os.close(fd)
        self.kept = [(kept, fd) for kept, fd in self.kept if kept not in names]

    def close(self) -> None:
        self.forget(*{name for name, _ in self.kept})
        self._socket.close()


class Started:
    """``ready``: the first line on stdout; None when there was none."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        self.ready: dict[str, Any] | None = json.loads(line) if line else None

    def end(self, number: int = 0) -> tuple[int, str]:
        """Send a signal, if one is given; exit code and stderr."""
        if number:
            self.process.send_signal(number)
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, log
