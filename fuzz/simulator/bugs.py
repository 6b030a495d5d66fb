"""Bugs that a world must find: each is planted by a context manager, and wrong only where several things meet."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
from msgspec.structs import replace

from fuzz.simulator.daemon import Daemon
from radixkv import commands
from radixkv.client.outbox import Deferred
from radixkv.device import writer
from radixkv.device.writer import TableWriter
from radixkv.engine import early, resume
from radixkv.engine.host import Copying
from radixkv.engine.sequence import Sequence
from radixkv.engine.state import State
from radixkv.engine.tiering import Tiering
from radixkv.sessions.registry import Registry


def fence_ignored() -> AbstractContextManager[Any]:
    return patch.object(Deferred, "done", lambda self: True)


def reply_first() -> AbstractContextManager[Any]:
    return patch.object(Daemon, "ORDER", Daemon.ORDER[::-1])


def unproven() -> AbstractContextManager[Any]:
    right = resume._prove

    def prove(state: Any, session: Any, claim: commands.Claim) -> Any:
        lineage = state.pools[claim.pool].lineage
        if lineage is not None:
            pages = np.frombuffer(claim.page_table, "<i4")
            claim = replace(claim, generations=lineage.generations[pages].astype("<u8").tobytes())
        return right(state, session, claim)

    return patch.object(resume, "_prove", prove)


def returns_early() -> AbstractContextManager[Any]:
    right = State.end_session

    def end_session(self: State, identity: int, mapped: bool) -> None:
        right(self, identity, False)

    return patch.object(State, "end_session", end_session)


def any_epoch() -> AbstractContextManager[Any]:
    right = Registry.find

    def find(self: Any, identity: int, epoch: int) -> Any:
        session = self._sessions.get(identity)
        return right(self, identity, epoch if session is None or session.absent else session.epoch)

    return patch.object(Registry, "find", find)


def same_generation() -> AbstractContextManager[Any]:
    right = TableWriter._assign

    def assign(self: TableWriter, write: commands.Assign) -> None:
        before = self._generations.copy()
        right(self, write)
        pages = np.frombuffer(write.pages, "<i4")
        again = pages[before[pages] > 1]
        self._generations[again] = before[again]

    return patch.dict(writer._STORE, {commands.Assign: assign})


def nothing_is_loading() -> AbstractContextManager[Any]:
    right = early.begin

    def begin(seq: Sequence, plan: early.EarlyPlan, reply: commands.Reserved) -> commands.Reserved:
        return replace(right(seq, plan, reply), loading=commands.NO_RANGE)

    return patch.object(early, "begin", begin)


def layers_too_soon() -> AbstractContextManager[Any]:
    right = Tiering.progress

    def progress(self: Tiering, copying: Copying, outcome: commands.CopyProgress) -> None:
        right(self, copying, replace(outcome, layers=outcome.layers + 1))

    return patch.object(Tiering, "progress", progress)
