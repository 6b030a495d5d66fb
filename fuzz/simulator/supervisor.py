"""The keeper's side of daemons: what one leaves behind when it dies, and how the next one starts, cold or warm."""

from __future__ import annotations

from collections.abc import Mapping

from fuzz.simulator.attendance import Process
from fuzz.simulator.daemon import Daemon, recovered
from fuzz.simulator.stage import Stage
from fuzz.simulator.store import Store
from radixkv.engine.engine import Engine

COLD = 0.03
"""How often a start under a keeper is cold, as after a broken invariant."""


class Supervisor:
    """``keeps``: there is a keeper; without one each start is cold."""

    def __init__(self, stage: Stage, processes: Mapping[int, Process], keeps: bool) -> None:
        self._stage = stage
        self._processes = processes
        self._keeps = keeps
        self.daemon: Daemon | None = None
        self.stores = {stage.store.cache_id: stage.store}

    def died(self) -> None:
        """SIGKILL: what the daemon held in its own memory is gone, its connections are cut."""
        stage = self._stage
        assert self.daemon is not None
        self.daemon.count()
        self.daemon.copier.orphaned()
        stage.note("daemon dies", self.daemon.boot_id)
        self.daemon = None
        for socket in stage.network.sockets:
            stage.events["unsent, kept"] += socket.daemon_died(stage.rng, stage.habits.keeps_unsent)
        for pipe in stage.network.pipes:
            if pipe.accepted_by is not None:
                pipe.daemon_end = False

    def start(self) -> None:
        """The next daemon, unless it is killed before it is there."""
        first = not self._stage.events["start"]
        warm = self._keeps and not first and self._stage.rng.random() >= COLD
        self.daemon = self._warm() if warm else self._cold(first)
        if self.daemon is not None:
            self.daemon.adopt()

    def _cold(self, first: bool) -> Daemon:
        """Empty pools; whatever else is stored of an earlier daemon's time is thrown away."""
        stage = self._stage
        if not first:
            stage.store = Store(stage.config, stage.store.generation + 1)
            self.stores[stage.store.cache_id] = stage.store
        boot, cache = f"boot-{stage.fresh()}", stage.store.cache_id
        stage.note("start", f"{boot}, {cache}")
        return Daemon(stage, Engine(stage.config, boot, cache), self._processes, self._keeps)

    def _warm(self) -> Daemon | None:
        stage = self._stage
        boot = f"boot-{stage.fresh()}"
        engine = recovered(stage, boot, stage.rng.random() < stage.habits.killed_recovering)
        if engine is None:
            return None
        stage.note("start", f"{boot}, window {'open' if engine.window_open else 'closed'}, {len(engine.resuming)} away")
        stage.events["warm start"] += 1
        return Daemon(stage, engine, self._processes, True)
