"""The copier of one daemon: pages go from tier to tier one by one, in any order, long after they were asked for.

Copies end late, in any order, badly, twice, or never, because the copier hangs until it dies. What is copied is what
is in a page at that time; of what fails, some pages have been copied and the others hold garbage. What is to be copied
by layer is: a layer of all pages before the next of any, and mostly the daemon is told. When the daemon dies the copier
goes on for a moment: the next daemon begins when it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fuzz.simulator.contents import GARBAGE, Arena
from fuzz.simulator.stage import Stage
from radixkv.commands import Copy, CopyDone, CopyProgress

WELL = 0.9
HANGS = 0.08
"""How often a copy ends well, and how often only with its copier."""


@dataclass
class _Running:
    copy: Copy
    pages: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) still to be copied, of this layer."""
    hangs: bool = False
    layer: int = 0
    layers: int = 1
    """In which it is copied; 1: all at once."""

    @property
    def complete(self) -> bool:
        return not self.pages and self.layer + 1 >= self.layers


class Copier:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._running: list[_Running] = []
        self._ended: list[int] = []
        self._failed: set[bytes] = set()
        """Targets of loads that have failed: if they are tried again, what is there stays."""

    def __bool__(self) -> bool:
        """Is anything being copied?"""
        return bool(self._running)

    def take(self, copy: Copy) -> None:
        """Its targets hold nothing of worth from now on, unless it has been tried before: what is there stays."""
        pages = list(zip(_ids(copy.sources), _ids(copy.targets), strict=True))
        source, arena = self._arenas(copy)
        for here, target in pages:
            if copy.targets not in self._failed or (arena.rows[target] != source.rows[here]).any():
                arena.rows[target] = GARBAGE
                arena.layers[target] = 0
        self._stage.note("save" if copy.to_host else "load", f"copy {copy.copy}: {pages}")
        one = _Running(copy, pages, self._stage.rng.random() < HANGS)
        if copy.by_layer:
            one.layers = next(pool.spec.layers for pool in self._stage.config.pools if pool.name == copy.pool)
        self._running.append(one)

    def go_on(self) -> list[CopyDone | CopyProgress]:
        """Some pages of some copy are copied. Returns what has come to its end, or further."""
        rng = self._stage.rng
        one = self._running[0] if rng.random() < 0.7 else rng.choice(self._running)
        if one.hangs:
            return [*self.die()] if rng.random() < 0.2 else []
        self._copy(one)
        if one.layers > 1 and not one.pages and not one.complete:
            self._next_layer(one)
            return [CopyProgress(one.copy.copy, one.layer)] if rng.random() < 0.8 else []
        if not one.complete and rng.random() < 0.5:
            return []
        self._running.remove(one)
        ok = rng.random() < WELL
        while ok and not one.complete:
            if not one.pages:
                self._next_layer(one)
            self._copy(one)
        return [*self._ends([one], ok)]

    def _next_layer(self, one: _Running) -> None:
        one.layer += 1
        one.pages = list(zip(_ids(one.copy.sources), _ids(one.copy.targets), strict=True))

    def unknown_end(self) -> CopyDone:
        """Somebody speaks of a copy that never was, or has ended before."""
        rng = self._stage.rng
        self._stage.note("unknown copy")
        if self._ended and rng.random() < 0.5:
            return CopyDone(rng.choice(self._ended[-5:]), rng.random() < 0.5)
        return CopyDone(10**6 + rng.randint(0, 99), rng.random() < 0.5)

    def die(self) -> list[CopyDone]:
        """All that were running have failed."""
        running, self._running = self._running, []
        self._stage.note("copier dies")
        return self._ends(running, ok=False)

    def orphaned(self) -> None:
        """The daemon has died: nobody hears of the ends any more."""
        if self._running:
            self._stage.note("copying when its daemon died")
        for one in self._running:
            if one.pages and self._stage.rng.random() < 0.5:
                self._copy(one)
        self._running.clear()

    def _ends(self, ended: list[_Running], ok: bool) -> list[CopyDone]:
        self._ended += [one.copy.copy for one in ended]
        for one in ended:
            if not ok and not one.copy.to_host:
                self._failed.add(one.copy.targets)
            self._stage.note("copied" if ok else "copy failed", f"copy {one.copy.copy}")
        return [CopyDone(one.copy.copy, ok, self._stage.rng.random()) for one in ended]

    def _copy(self, one: _Running) -> None:
        """Some pages, any."""
        rng = self._stage.rng
        source, target = self._arenas(one.copy)
        for _ in range(min(len(one.pages), rng.choice((1, 2, 8)))):
            here, there = one.pages.pop(rng.randrange(len(one.pages)))
            target.rows[there] = source.rows[here]
            target.layers[there] = max(target.layers.get(there, 0), one.layer + 1)
            if one.layer + 1 == one.layers:
                del target.layers[there]
            for row in range(target.page_size):
                target.writers[there, row] = f"copy {one.copy.copy} from page {here}"

    def _arenas(self, copy: Copy) -> tuple[Arena, Arena]:
        device, host = self._stage.store.arenas[copy.pool], self._stage.store.host_arenas[copy.pool]
        return (device, host) if copy.to_host else (host, device)


def _ids(packed: bytes) -> list[int]:
    return memoryview(packed).cast("i").tolist()
