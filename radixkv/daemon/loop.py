"""The daemon's loop: what is served in which order, and how it ends.

::

    poll ── ROUTER ──> one request: decode, engine.step, descriptor writes, reply
      │
      └──── epoll ───> no request waits (or 64 have been served): attach connections, pidfds, signals, copies that
                       have ended, whose meaning goes to the engine as commands; tick, if one is due

Waiting happens in one place, ``zmq_poll`` over the socket and the epoll; nothing else in the process blocks. An
unexpected exception is a bug: the last commands go to stderr, the tables are marked, the process ends with 70.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import time
from typing import Any

import zmq
from zmq import zmq_poll

from radixkv.commands import Done, Drain, Request, Shutdown, Tick, failure
from radixkv.daemon.agenda import NEVER, Agenda
from radixkv.daemon.last_words import LastCommands
from radixkv.daemon.parts import Parts
from radixkv.daemon.service import Service
from radixkv.engine import invariants
from radixkv.errors import Exit, Timeout
from radixkv.ipc.log import Lines, announce
from radixkv.ipc.signals import take_signals
from radixkv.version import VERSION

CHECK_PAGES_MAX = 4_096
"""More pages than this in all are recounted only with ``paranoid``: a recount must not be felt (about 2 us a page)."""

_REQUESTS_BEFORE_TICK = 64
_EVENTS_A_ROUND = 16
"""Of connections and processes, before requests are looked at again: a worker's end is two events and takes 0.3 ms (if
it held 1,500 pages), and 64 may die at once."""

_READABLE = int(zmq.POLLIN)


class Daemon:
    """Joins the engine with its edges; ``run`` is the loop."""

    def __init__(self, parts: Parts, paranoid: bool, log: tuple[Any, Lines]) -> None:
        self._parts = parts
        self._engine, self._router, self._epoll = parts.engine, parts.router, parts.epoll
        self._signals, self._copier, self._events = parts.signals, parts.copier, parts.events
        self._log, self._lines = log
        self._last = LastCommands()
        self._agenda = Agenda(parts.config.server, parts, time.monotonic())
        self._service = Service(parts, self._agenda, self._last, paranoid, self._log)
        self._attendance = self._service.attendance
        self._epoll.register(self._signals.fileno(), select.EPOLLIN)
        self._copier_fd = -1 if parts.copier is None else parts.copier.fileno()
        if parts.copier is not None:
            self._epoll.register(self._copier_fd, select.EPOLLIN)
        self._recounts = paranoid or sum(pool.pages for pool in parts.config.pools) <= CHECK_PAGES_MAX
        self._until_tick = _REQUESTS_BEFORE_TICK
        self._stop = False

    def run(self) -> int:
        """Serve until drained (0), or until something is found that cannot be (70)."""
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            self._attendance.meet_again()
            self._announce()
            self._loop()
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a bug, and nothing here may be trusted any more)
            self._break(error)
            return Exit.BROKEN
        self._log.info("stopped", dropped_replies=self._router.dropped_replies, malformed=self._router.malformed)
        return Exit.DRAINED

    def close(self) -> None:
        self._attendance.members.close()

    def _announce(self) -> None:
        endpoint, store = self._parts.endpoint, self._parts.store
        line = {
            "event": "ready",
            "endpoint": endpoint.address,
            "attach": str(endpoint.attach_path),
            "pid": os.getpid(),
            "boot_id": self._engine.boot_id,
            "cache_id": self._engine.cache_id,
            "pools": list(self._parts.pools),
        }
        if store is not None:
            store.ready()
        announce(json.dumps(line))
        self._log.info("ready", endpoint=endpoint.address, libzmq=zmq.zmq_version(), version=VERSION)

    # -- in which order -------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        agenda, events, requests = self._agenda, self._events, self._router.socket
        sources: list[tuple[Any, int]] = [(requests, _READABLE), (self._epoll.fileno(), _READABLE)]
        if events is not None and events.replay is not None:
            sources.append((events.replay, _READABLE))
        while not self._stop:
            asked = False
            for source, _ in zmq_poll(sources, self._sleep_ms()):
                asked |= source is requests
            agenda.turn(time.monotonic())
            if asked:
                self._serve_one()
                agenda.tick_if_long_ago()
            self._until_tick -= 1
            if not asked or self._until_tick <= 0:
                happened = self._epoll.poll(0, _EVENTS_A_ROUND)
                for fd, _ in happened:
                    self._serve_fd(fd)
                if happened:
                    agenda.stir()
                self._serve_time()
                if events is not None:
                    events.work(agenda.now)
            if agenda.drain_ends != NEVER and (agenda.now >= agenda.drain_ends or self._is_drained()):
                return

    def _sleep_ms(self) -> int:
        agenda = self._agenda
        return agenda.sleep_ms(NEVER if self._events is None else self._events.wait_s(agenda.now))

    def _serve_one(self) -> None:
        incoming = self._router.receive()
        if incoming is None:
            return
        route, request, size = incoming
        self._last.note_request(self._agenda.now, request, size)
        if type(request.body) is Shutdown:
            self._shut_down(route, request)
        else:
            self._service.answer(route, request)

    def _serve_fd(self, fd: int) -> None:
        if fd == self._copier_fd:
            self._service.take_copies()
        elif fd != self._signals.fileno():
            self._attendance.members.handle(fd, self._agenda.now)
        else:
            for number in take_signals(self._signals):
                self._stop_asked(number)

    def _serve_time(self) -> None:
        """Ticks come when no request is waiting, so that nobody is judged while his sign of life lies unread."""
        agenda = self._agenda
        self._until_tick = _REQUESTS_BEFORE_TICK
        if not agenda.is_due():
            return
        if self._service.step(Tick(agenda.tick())).writes:
            agenda.stir()
        if self._copier is not None:
            self._copier.kill_if_stuck(agenda.now)
        self._attendance.settle()
        if agenda.now >= agenda.round_at:
            self._make_round()

    def _make_round(self) -> None:
        members = self._attendance.members
        members.sweep(self._agenda.now)
        if self._recounts:
            invariants.check(self._engine)
        self._agenda.round_made(members.settled)

    # -- the end --------------------------------------------------------------------------------------------------

    def _stop_asked(self, number: signal.Signals) -> None:
        """The first signal drains, a second one ends at once."""
        if self._agenda.drain_ends != NEVER:
            self._log.warning("stopping without waiting", signal=number.name)
            self._stop = True
            return
        self._drain(number.name)

    def _drain(self, reason: str) -> None:
        at_most_s = self._parts.config.server.drain_s
        self._agenda.drain_ends = self._agenda.now + at_most_s
        self._log.info("draining", reason=reason, at_most_s=at_most_s)
        self._service.step(Drain())

    def _shut_down(self, route: bytes, request: Request) -> None:
        """Somebody asks for the end. With a store, the next daemon goes on with all there is."""
        if self._agenda.now > request.deadline:
            self._router.send(route, request.id, failure(Timeout("the request came after its deadline: not executed")))
            return
        self._router.send(route, request.id, Done())
        if self._parts.store is not None:
            self._log.info("leaving everything to the next daemon")
            self._parts.leave()
            self._stop = True
        elif self._agenda.drain_ends == NEVER:
            self._drain("shutdown")

    def _is_drained(self) -> bool:
        snapshot = self._engine.snapshot()
        sequences = sum(pool["sequences"] for pool in snapshot["pools"].values())
        return not sequences and not snapshot["in_transit"] and not snapshot["queued"]

    def _break(self, error: Exception) -> None:
        """Mark the tables first: the next start must not trust them, whatever happens to this report."""
        for pool in self._parts.pools.values():
            pool.table.taint()
        self._last.tell(self._lines)
        self._log.critical("broken: this is a bug in radixkv", error=f"{type(error).__name__}: {error}", exc_info=error)
