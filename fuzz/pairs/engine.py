"""The whole engine beside the naive one: replies, all counts, the descriptor writes and the engine's own recount."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from fuzz.model.compare import same_counts
from fuzz.model.engine import EngineModel
from fuzz.model.mismatch import expect
from fuzz.model.state import Slices
from fuzz.model.table import TableMirror
from fuzz.pairs.marks import same_marks
from radixkv import commands
from radixkv.config import Config
from radixkv.engine import engine as engine_module
from radixkv.engine import life
from radixkv.engine import state as state_module
from radixkv.engine.engine import Engine
from radixkv.engine.invariants import check

FAR = 1e9
"""A deadline that never comes."""


@contextmanager
def in_slices_of(slices: Slices | None) -> Iterator[None]:
    """Within, the engine does work that takes long in slices of these sizes."""
    if slices is None:
        yield
        return
    with (
        patch.object(life, "SLICE_PAGES", slices.pages),
        patch.object(state_module, "SLICE_SEQUENCES", slices.sequences),
        patch.object(engine_module, "SLICE_SEQUENCES", slices.sequences),
        patch.object(engine_module, "SLICE_NODES", slices.sequences),
    ):
        yield


class EnginePair:
    """``do`` carries one command out on both sides. Time stands still unless told otherwise."""

    def __init__(self, config: Config, slices: Slices | None = None) -> None:
        """``slices``: other sizes than the engine's own, for it and for the model."""
        self.config = config
        self.slices = slices
        self.real = Engine(config, "boot", "cache")
        self.model = EngineModel(config, slices or Slices())
        self.table = TableMirror({pool.name: pool.pages for pool in config.pools})
        for pool in self.model.state.pools.values():
            pool.root_of = self.table.roots(pool.name)
        self.now = 100.0
        self.running_s = 0.0
        self.events: Counter[str] = Counter()
        self._next_request: dict[int, int] = {}
        self._next_session = 0

    def do(self, command: commands.Command) -> commands.Outcome:
        """One command at the present time. Raises Mismatch or BrokenInvariant."""
        with in_slices_of(self.slices):
            outcome = self.real.step(command, self.now)
        for write in outcome.writes:
            self.table.write(write)
        check(self.real)
        self.model.apply(command, self.now, outcome)
        snapshot = self.real.snapshot()
        same_counts(self.model.state, snapshot)
        self.table.compare(self.model.state)
        for pool in self.model.state.pools.values():
            same_marks(pool, self.real)
        if not self.real.has_work():
            for pool in self.model.state.pools.values():
                expect("I10", "idle pages of invalidated epochs", pool.dead(self.model.state.held(pool)), [])
        self._count(command, outcome, snapshot)
        return outcome

    # -- shorthands ---------------------------------------------------------------------------------------------

    def open(self, name: str = "worker") -> int:
        self._next_session += 1
        self.do(commands.OpenSession(self._next_session, self._next_session.to_bytes(16, "little"), name))
        return self._next_session

    def ask(self, session: int, body: commands.Body, deadline: float = FAR) -> commands.Reply | None:
        """A new request of a session, under its next id."""
        return self.do(self.request(session, body, deadline)).reply

    def request(self, session: int, body: commands.Body, deadline: float = FAR) -> commands.Request:
        self._next_request[session] = self._next_request.get(session, 0) + 1
        known = self.model.state.sessions.get(session)
        epoch = known.epoch if known else int(session > 0)
        return commands.Request(session, epoch, self._next_request[session], deadline, body)

    def tick(self, seconds: float) -> commands.Outcome:
        """Time passes while the daemon runs."""
        self.now += seconds
        self.running_s += seconds
        return self.do(commands.Tick(self.running_s))

    # -- what has happened --------------------------------------------------------------------------------------

    def _count(self, command: commands.Command, outcome: commands.Outcome, snapshot: dict) -> None:  # type: ignore[type-arg]
        counters = snapshot["counters"]
        self.events["split"], self.events["merge"] = counters["splits"], counters["merges"]
        self.events["evict"], self.events["shadow"] = counters["evicted_pages"], counters["shadow_pages"]
        self.events["fork"], self.events["truncate"] = counters["forks"], counters["truncates"]
        self.events["grant"] += sum(1 for late in outcome.granted if isinstance(late.reply, commands.Reserved))
        self.events["revoke"] += len(outcome.ended)
        if isinstance(command, commands.Request) and isinstance(outcome.reply, commands.Reserved):
            self.events["reserve"] += 1
