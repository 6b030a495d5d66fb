"""Connections between workers and daemons: what they may do to messages.

::

    what                                      ZeroMQ (DEALER to ROUTER)                attach (SOCK_SEQPACKET)
    order within one connection               kept                                     kept
    order between connections of a client     none                                     none
    delay                                     any                                      any
    loss while both live                      replies only, when a peer reads slowly   never
    loss when the daemon dies                 what it had not read, what it had not    the connection ends
                                              sent; both queues are cut anywhere
    unsent when the daemon dies               may reach the next daemon                a hello nobody has accepted
                                                                                       waits for the next daemon
    loss when the worker dies                 what had not left it; what has left is   the connection ends, unless a
                                              still served                             child holds it
    duplication                               never by itself; ``twice`` models a      never
                                              peer that repeats at once
    to a peer that is gone                    dropped by the ROUTER, and counted       the connection has ended

Delay is what the scheduler makes of it: a frame stays in its queue until somebody is chosen to take it out.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Socket:
    """One DEALER of one thread and its peer's end. ``served_by``: the boot of the daemon that has accepted it."""

    route: bytes
    owner: str
    served_by: str | None = None
    requests: deque[bytes] = field(default_factory=deque)
    replies: deque[bytes] = field(default_factory=deque)
    closed: bool = False
    keeps: bool = False
    """A keeper's."""
    full: bool = False
    """Replies are dropped, until its worker asks for something new."""

    def daemon_died(self, rng: random.Random, keeps_unsent: bool) -> int:
        """Cut both queues somewhere. Returns how many requests will reach the next daemon."""
        self.served_by = None
        unsent = rng.randint(0, len(self.requests)) if keeps_unsent else 0
        while len(self.requests) > unsent:
            self.requests.popleft()
        for _ in range(rng.randint(0, len(self.replies))):
            self.replies.pop()
        return unsent

    def worker_died(self, rng: random.Random) -> None:
        for _ in range(rng.randint(0, len(self.requests))):
            self.requests.pop()
        self.replies.clear()
        self.closed = True


@dataclass(eq=False)
class AttachPipe:
    """One attach connection. ``process``: whose it is; ``accepted_by``: the boot that has taken it."""

    process: int
    accepted_by: str | None = None
    packets: deque[bytes] = field(default_factory=deque)
    answers: deque[bytes] = field(default_factory=deque)
    worker_end: bool = True
    """Somebody on the worker's side (the process, or a child of it) has it open."""
    daemon_end: bool = True

    @property
    def hung_up(self) -> bool:
        """What POLLRDHUP tells the worker."""
        return not self.daemon_end


@dataclass(eq=False)
class Network:
    """All connections, and the listening sockets, which outlive daemons."""

    sockets: list[Socket] = field(default_factory=list)
    pipes: list[AttachPipe] = field(default_factory=list)
    opened: int = 0

    def open_socket(self, owner: str) -> Socket:
        self.opened += 1
        fresh = Socket(self.opened.to_bytes(5, "little"), owner)
        self.sockets.append(fresh)
        return fresh

    def open_pipe(self, process: int) -> AttachPipe:
        fresh = AttachPipe(process)
        self.pipes.append(fresh)
        return fresh

    def tidy(self) -> None:
        """Forget what can never carry anything any more."""
        self.sockets = [one for one in self.sockets if not (one.closed and not one.requests)]
        self.pipes = [one for one in self.pipes if one.worker_end or one.daemon_end]
