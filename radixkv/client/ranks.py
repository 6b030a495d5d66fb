"""Several processes that are one worker: rank 0 has the client and sends verbs, the others map their own arenas.

::

    rank 0       client = radixkv.connect()              client.group_token ──(by the application's own means)──┐
    ranks 1..K-1 member = radixkv.attach(endpoint, group_token, rank)   <───────────────────────────────────────┘

Page ids mean the same on all of them. A commit by rank 0 is its word for all: it is refused until all have joined. The
end of any of them is the end of the session.
"""

from __future__ import annotations

import logging
import os
import select
import struct
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from radixkv.client import forks
from radixkv.client.asking import seconds
from radixkv.client.connection import HANGUP, Connection
from radixkv.client.mapping import PoolMemory, map_pool
from radixkv.client.session import Session
from radixkv.client.wakeup import Wakeup
from radixkv.commands import CopyRow, Welcome
from radixkv.config import KVSpec, Layout
from radixkv.errors import (
    BadRequest,
    Forked,
    PermissionDenied,
    RadixKVError,
    SessionLost,
    Unavailable,
    VersionMismatch,
)
from radixkv.ipc.attach import Attachment
from radixkv.ipc.endpoint import Endpoint, resolve

if TYPE_CHECKING:
    from radixkv.kernels import Pages

TIMEOUT_S = 5.0
RETRY_FIRST_S, RETRY_MAX_S = 0.02, 0.5
_GROUP = struct.Struct("<Q16s")
_OVER = (SessionLost, BadRequest, VersionMismatch, PermissionDenied)
"""Answers to a rejoin after which there is nothing to come back to."""

_log = logging.getLogger("radixkv.client")


def group_token(welcome: Welcome) -> bytes:
    """What the further processes of a session need to join it. As secret as the session."""
    return _GROUP.pack(welcome.session, welcome.token)


def attach(endpoint: str | os.PathLike[str] | None, group_token: Any, rank: Any, timeout: float = TIMEOUT_S) -> Member:
    """Be rank 1, 2, ... of the session whose client gave ``group_token``.

    ``timeout``: seconds until an answer is there, here and for each pool.
    Errors: BadRequest (no such rank, or taken; no token), SessionLost (the session is over), Unavailable (nobody
    answers), VersionMismatch, PermissionDenied, LimitExceeded, ConfigError.
    """
    if not isinstance(group_token, bytes) or len(group_token) != _GROUP.size:
        raise BadRequest(f"a group token is {_GROUP.size} bytes, as client.group_token gives it")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise BadRequest("rank 0 is the client itself; the others are 1, 2, ...", rank=repr(rank))
    return Member(_Tie(resolve(endpoint), group_token, rank, seconds("timeout", timeout)))


class Member:
    """One of a session's further processes. Its end, or ``close``, is the end of the session."""

    def __init__(self, tie: _Tie) -> None:
        self._tie = tie
        self._finalizer = weakref.finalize(self, tie.let_go)

    @property
    def rank(self) -> int:
        return self._tie.rank

    def pool(self, name: str = "default") -> MemberPool:
        """Map this rank's arena of a pool. Errors: BadRequest (no such pool, or it has fewer ranks), SessionLost."""
        return MemberPool(self._tie, self._tie.map(name))

    def valid(self) -> bool:
        """Does the session go on? Asked of the mapped tables, so it needs no daemon. Errors: Forked, Unavailable."""
        self._tie.check()
        return self._tie.goes_on()

    def close(self) -> None:
        """End the session, for all of its processes. Twice is once."""
        self._finalizer.detach()
        self._tie.close()

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Member {self.rank} of session {self._tie.session.id} at {self._tie.endpoint.address}>"


class MemberPool:
    """A pool's memory as one rank has it. ``spec`` is what one rank holds."""

    def __init__(self, tie: _Tie, memory: PoolMemory) -> None:
        self._tie = tie
        self._memory = memory
        self.name = memory.name

    @property
    def spec(self) -> KVSpec:
        return self._memory.spec

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._memory.spec.page_size

    @property
    def total_pages(self) -> int:
        return self._memory.pages

    @property
    def ranks(self) -> int:
        return self._memory.ranks

    @property
    def layout(self) -> Layout:
        return self._memory.layout

    def keys(self, layer: int) -> Pages:
        """Torch view [pages, page_size, kv_heads, head_dim] of this rank's arena. Errors: SessionLost, Forked."""
        self._tie.check_session()
        return self._memory.keys(layer)

    def values(self, layer: int) -> Pages:
        """Torch view [pages, page_size, kv_heads, head_dim] of this rank's arena. Errors: SessionLost, Forked."""
        self._tie.check_session()
        return self._memory.values(layer)

    def copy_rows(self, rows: Iterable[CopyRow]) -> None:
        """Carry out a sequence's copy_rows in this rank's arena. Errors: SessionLost, Forked."""
        self._tie.check_session()
        self._memory.copy(rows)


class _Tie:
    """A member's connection, and the thread that watches it and comes back after a restart of the daemon."""

    def __init__(self, endpoint: Endpoint, group: bytes, rank: int, timeout: float) -> None:
        self.endpoint = endpoint
        self.rank = rank
        self.closed = False
        self.forked = False
        self._timeout = timeout
        self._pid = os.getpid()
        self._identity, self._token = _GROUP.unpack(group)
        self._changed = threading.Condition()
        self._asking = threading.Lock()
        """Held while a pool is mapped."""
        self._connection: Connection | None = None
        self._joining: Connection | None = None
        """In which the session may go on: for nobody to use, but to hang up on."""
        self._wakeup = Wakeup()
        self.session = self._join()
        self._thread = threading.Thread(target=self._keep, name="radixkv-member", daemon=True)
        forks.register(self)
        self._thread.start()

    def _join(self) -> Session:
        """Also when a daemon dies over it: then the next one has not heard of us."""
        until = time.monotonic() + self._timeout
        while True:
            try:
                return self._join_once()
            except Unavailable:
                if time.monotonic() + RETRY_FIRST_S >= until:
                    raise
                time.sleep(RETRY_FIRST_S)

    def _join_once(self) -> Session:
        attachment = Attachment(self.endpoint, self._timeout)
        with ExitStack() as undo:
            undo.callback(attachment.close)
            session = Session(attachment.join(self._identity, self._token, self.rank))
            self._connection = Connection(attachment, session)
            self._connection.enter()
            undo.pop_all()
        return session

    # -- what a member asks -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Errors: Forked, Unavailable when closed."""
        if self.forked or self._pid != os.getpid():
            raise Forked("this process was forked from a member of a group; it is none itself")
        if self.closed:
            raise Unavailable("closed")

    def check_session(self) -> None:
        """Errors: the same; SessionLost."""
        self.check()
        if not self.goes_on():
            raise SessionLost("the session is over: rank 0 has closed it, or a process of the group has ended")

    def goes_on(self) -> bool:
        session = self.session
        return not session.over and all(memory.knows(session) for memory in session.memories.values())

    def map(self, name: str) -> PoolMemory:
        """Errors: BadRequest, SessionLost, Unavailable, Forked."""
        until = time.monotonic() + self._timeout
        with self._asking:
            while True:
                known = self.session.memories.get(name)
                if known is not None:
                    assert isinstance(known, PoolMemory)
                    return known
                connection = self._present(until)
                try:
                    with connection:
                        self.session.memories[name] = map_pool(connection.attachment.map_pool(name))
                except Unavailable:
                    self._lose(connection)
                    if time.monotonic() >= until:
                        raise

    def _present(self, until: float) -> Connection:
        with self._changed:
            while True:
                self.check_session()
                if self._connection is not None:
                    return self._connection
                left = until - time.monotonic()
                if left <= 0:
                    raise Unavailable(f"no daemon answers at {self.endpoint.address}")
                self._changed.wait(left)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        pause = RETRY_FIRST_S
        while not self.closed and not self.session.over:
            connection = self._connection
            if connection is not None:
                if self._hung_up(connection):
                    self._lose(connection)
                pause = RETRY_FIRST_S
                continue
            try:
                self._come_back()
            except _OVER as refusal:
                _log.info("session %d is over: %s", self.session.id, refusal)
                self._end()
            except (RadixKVError, OSError) as error:
                _log.debug("no way back yet: %s", error)
                self._wakeup.sleep(pause)
                pause = min(2 * pause, RETRY_MAX_S)
        if self._connection is not None:
            self._connection.hang_up()

    def _hung_up(self, connection: Connection) -> bool:
        """Sleep until something happens. True: the connection has ended."""
        poll = select.poll()
        try:
            with connection:
                poll.register(connection.fileno(), select.POLLRDHUP)
                poll.register(self._wakeup.fileno(), select.POLLIN)
                ready = dict(poll.poll())
        except Unavailable:
            return True
        if ready.pop(self._wakeup.fileno(), 0):
            self._wakeup.awake()
        return any(events & HANGUP for events in ready.values())

    def _come_back(self) -> None:
        """To the daemon that goes on with the session. Errors: SessionLost and others of ``_OVER``; Unavailable."""
        session = self.session
        connection = Connection(Attachment(self.endpoint, self._timeout), session)
        try:
            with self._changed:
                if self.closed:
                    raise Unavailable("closed")
                self._joining = connection
            session.welcome = connection.rejoin(self.rank)
            connection.enter()
            with self._changed:
                self._connection = connection
                self._changed.notify_all()
        except BaseException:
            connection.hang_up()
            raise
        finally:
            self._joining = None

    def _lose(self, connection: Connection) -> None:
        """The daemon went away, or has ended the session."""
        with self._changed:
            if self._connection is connection:
                self._connection = None
        connection.hang_up()
        if not self.session.welcome.resumes:
            self._end()

    def _end(self) -> None:
        with self._changed:
            self.session.over = True
            self._changed.notify_all()

    # -- the end ------------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Begin to close. A finaliser may call it."""
        if not self.forked and not self.closed:
            self.closed = True
            self._wakeup.stir()

    def close(self) -> None:
        if self.forked:
            return
        self.let_go()
        with self._changed:
            joining = self._joining
        if joining is not None:
            joining.hang_up()
        self._thread.join(self._timeout)
        if not self._thread.is_alive():
            self._wakeup.close()
        self._end()
        self.session.memories.clear()  # unmapped when the last view is gone
        self.session.lifeline = None

    def disown(self) -> None:
        """In a forked child, first of all: nobody may use this."""
        self.forked = True

    def forget(self) -> list[object]:
        """In a forked child: let go of everything. See ``forks``."""
        leftovers: list[object] = [self, self._wakeup]
        self.session.over = True
        for connection in (self._connection, self._joining):
            if connection is not None:
                connection.forget()
                leftovers.append(connection)
        self._wakeup.forget()
        forks.close_connections(self.endpoint.attach_path)
        return leftovers
