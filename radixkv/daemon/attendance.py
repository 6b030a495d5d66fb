"""Who is attached, between ``ipc/members.py``, which sees connections and processes end, and the core's sessions.

::

    hello, rejoin, join ──> OpenSession, RejoinSession, JoinSession ──> welcome
    an end              ──> EndSession; once nothing maps the arena any longer, MappingGone
                            on CUDA devices also once the driver shows nothing of it (device/quiescence.py)
    the core ended one  ──> its connection is hung up on, its queued requests are forgotten
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

from radixkv.commands import (
    PROTOCOL_VERSION,
    Command,
    EndSession,
    Failure,
    JoinSession,
    MappingGone,
    OpenSession,
    Outcome,
    PoolMap,
    RejoinSession,
    Welcome,
)
from radixkv.daemon.agenda import Agenda
from radixkv.daemon.parts import Parts
from radixkv.ipc.members import Members

NAME_MAX = 64
"""Characters of a session's name."""


class Attendance:
    """What ``ipc.members.Host`` asks for. ``step`` carries out a command of the daemon's own."""

    def __init__(self, parts: Parts, agenda: Agenda, step: Callable[[Command], Outcome], log: Any) -> None:
        self._parts = parts
        self._engine, self._router, self._quiescence = parts.engine, parts.router, parts.quiescence
        self._agenda = agenda
        self._step = step
        self._log = log
        self.members = Members(parts.listener, parts.epoll, self, parts.config.limits.sessions, parts.store)

    def meet_again(self) -> None:
        """Watch the workers of an earlier daemon's time, who are expected back."""
        known = [session.id for session in self._engine.sessions.all()]
        for session in self.members.adopt(self._parts.stored, known):
            self._log.warning("the store lost a session: its private pages are out of use for good", session=session)

    def ended(self, session: int, *, bye: bool = False) -> None:
        """The core has ended it: the worker said bye, or the core took its own decision."""
        self.members.ended(session, self._engine.awaits_mapping_gone(session), bye=bye)
        self._router.forget(session)

    # -- what ipc.members.Host asks for ---------------------------------------------------------------------------

    def open_session(self, session: int, name: str) -> Welcome | Failure:
        return self._welcome(OpenSession(session, os.urandom(16), name[:NAME_MAX]))

    def rejoin_session(self, session: int, token: bytes) -> Welcome | Failure:
        return self._welcome(RejoinSession(session, token))

    def join_session(self, session: int, token: bytes, rank: int) -> Welcome | Failure:
        return self._welcome(JoinSession(session, token, rank))

    def _welcome(self, command: OpenSession | RejoinSession | JoinSession) -> Welcome | Failure:
        reply = self._step(command).reply
        if isinstance(reply, Failure):
            return reply
        parts, config = self._parts, self._parts.config
        session = self._engine.sessions.find_quietly(command.session)
        return Welcome(
            version=PROTOCOL_VERSION,
            session=session.id,
            epoch=session.epoch,
            slot=session.slot,
            token=session.token,
            boot_id=self._engine.boot_id,
            cache_id=self._engine.cache_id,
            pools=list(parts.pools),
            heartbeat_s=config.server.heartbeat_s,
            lease_s=config.server.lease_s,
            message_bytes=config.limits.message_bytes,
            resumes=parts.store is not None,
        )

    def map_pool(self, name: str, rank: int) -> tuple[PoolMap, tuple[int, int]] | Failure:
        pools = self._parts.pools
        pool = pools.get(name)
        if pool is None:
            return Failure("bad_request", f"there is no pool {name!r}; there are: {', '.join(pools)}")
        ranks = len(pool.arena_fds)
        if rank >= ranks:
            return Failure("bad_request", f"pool {name!r} has ranks 0 to {ranks - 1}", {"rank": rank, "ranks": ranks})
        return pool.map_of(rank), (pool.arena_fds[rank], pool.table_fd)

    def report(self, command: EndSession | MappingGone, pids: Collection[int] = ()) -> bool:
        if self._quiescence is not None:
            if isinstance(command, MappingGone):
                self._quiescence.expect(command.session, pids, self._agenda.now)
                self.settle()
                return True
            command = EndSession(command.session, True, command.reason)  # a GPU may work on for who is gone
        self._step(command)
        self._router.forget(command.session)
        return self._engine.awaits_mapping_gone(command.session)

    def settle(self) -> None:
        """Pages come back when the GPU works for their owner's processes no more, as far as the driver can tell."""
        if not self._quiescence:
            return
        quiet, given_up = self._quiescence.settle(self._agenda.now)
        for session in quiet:
            self._step(MappingGone(session))
        for session in given_up:
            self._log.error(
                "the driver still shows a process of an ended session: its pages are out of use for good",
                session=session,
            )
        self._agenda.look_ahead()
