"""A trace through the real engine and its evictor, one request at a time.

A block is a page of one token. Each request is what a worker would do that computes prompts and nothing else: reserve
(``last_page="keep"``), commit, free. So the pages of a request are held while its missing ones are made room for, and
a hit is the leading run of pages that are there.

With host blocks, copies between the tiers end as soon as they begin; nothing is copied ahead of need, and there is
staging room for what passes through. So a block is on the device or in the host tier, never lost between them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from radixkv.commands import (
    Body,
    Commit,
    CopyDone,
    Free,
    LookedUp,
    Lookup,
    OpenSession,
    Outcome,
    Reply,
    Request,
    Reserve,
    Reserved,
    SessionRecord,
    Step,
)
from radixkv.config import Config, KVSpec, PoolConfig
from radixkv.engine.engine import Engine
from radixkv.errors import ConfigError
from radixkv.simulate.trace import Trace
from radixkv.types import TOKEN_BYTES

POOL = "replay"
NAMESPACE = b"replay"
SESSION = 1
NOW, LATER = 0.0, 1.0
"""Nobody waits and nothing lapses: time does not matter."""

TICK_REQUESTS = 64
"""How often whoever watches is told."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What there is to hold blocks."""

    device_blocks: int
    host_blocks: int = 0
    policy: str = "lru"
    host_write: str = "back"


@dataclass(frozen=True, slots=True)
class Report:
    """Blocks but for ``requests`` and ``seconds``. ``inserted`` and ``evicted``: pages committed, and given up."""

    requests: int
    blocks: int
    unique_blocks: int
    device_hits: int
    host_hits: int
    inserted: int
    evicted: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        return (self.device_hits + self.host_hits) / self.blocks if self.blocks else 0.0

    def as_json(self) -> dict[str, int | float]:
        return asdict(self)


class Worker:
    """An engine with one pool and the only worker it has."""

    def __init__(self, memory: Memory) -> None:
        spec = KVSpec(layers=1, kv_heads=1, head_dim=1, page_size=1)
        self._two_tiers = memory.host_blocks > 0
        pool = PoolConfig(
            name=POOL,
            spec=spec,
            pages=memory.device_blocks,
            policy=memory.policy,
            host_pages=memory.host_blocks,
            host_staging_pages=memory.device_blocks if self._two_tiers else 0,
            reclaim_pages=0,
            host_write=memory.host_write,
        )
        self.engine = Engine(Config(pools=(pool,)), boot_id="replay", cache_id="replay")
        opened = self.engine.step(OpenSession(SESSION, bytes(16), "replay"), NOW)
        self._epoch = next(write.epoch for write in opened.writes if isinstance(write, SessionRecord))
        self._request = 0

    def compute(self, prompt: bytes) -> tuple[int, int]:
        """Reserve, commit, free. Returns the pages that were there: on the device, in the host tier."""
        on_device = None
        if self._two_tiers:
            found = self._ask(Lookup(POOL, NAMESPACE, [prompt]))
            assert type(found) is LookedUp
            on_device = found.device_tokens[0]
        seq = self._request
        reserved = self._ask(Reserve(POOL, seq, NAMESPACE, prompt, 0, "keep"))
        if type(reserved) is not Reserved:
            raise RuntimeError(f"a pool that nobody holds should have room, but answered {reserved!r}")
        self._ask(Step(commit=[Commit(seq, len(prompt) // TOKEN_BYTES)]))
        self._ask(Step(free=[Free(seq)]))
        hits = reserved.writable_from_tokens  # a page is a token
        return (hits, 0) if on_device is None else (on_device, hits - on_device)

    def _ask(self, body: Body) -> Reply | None:
        self._request += 1
        outcome = self.engine.step(Request(SESSION, self._epoch, self._request, LATER, body), NOW)
        granted = self._copied(outcome)
        return outcome.reply or granted

    def _copied(self, outcome: Outcome) -> Reply | None:
        """Whoever waits for copies is answered when these have ended."""
        copies, granted = [*outcome.effects], [*outcome.granted]
        for copy in copies:
            after = self.engine.step(CopyDone(copy.copy, ok=True), NOW)
            copies += after.effects
            granted += after.granted
        return granted[0].reply if granted else None

    def counter(self, name: str) -> int:
        return int(self.engine.snapshot()["counters"][name])


def replay(trace: Trace, memory: Memory, watch: Callable[[int], None] = lambda _done: None) -> Report:
    """Replay from a cold start. ``watch`` is called with the number of requests done, now and then and at the end.

    Errors: ConfigError if there is too little memory for the longest prompt.
    """
    check(trace, memory)
    worker = Worker(_of_use(trace, memory))
    hits = host_hits = 0
    with _collecting_no_garbage():
        started = time.perf_counter()
        for done, prompt in enumerate(trace.prompts):
            on_device, in_host = worker.compute(prompt)
            hits += on_device
            host_hits += in_host
            if done % TICK_REQUESTS == 0:
                watch(done)
        seconds = time.perf_counter() - started
    watch(len(trace.prompts))
    return Report(
        requests=len(trace.prompts),
        blocks=trace.blocks,
        unique_blocks=trace.unique_blocks,
        device_hits=hits,
        host_hits=host_hits,
        inserted=worker.counter("committed_pages"),
        evicted=worker.counter("evicted_pages"),
        seconds=seconds,
    )


def check(trace: Trace, memory: Memory) -> None:
    """Errors: ConfigError for what cannot be replayed."""
    if memory.host_blocks and memory.policy != "lru":
        raise ConfigError(f"policy = {memory.policy!r} is not allowed with host_blocks; allowed: lru")
    if memory.device_blocks < max(1, trace.longest):
        raise ConfigError(
            f"device_blocks = {memory.device_blocks} is not allowed; allowed: at least {max(1, trace.longest)}, "
            f"the longest prompt of {trace.name}"
        )


def _of_use(trace: Trace, memory: Memory) -> Memory:
    """No more blocks than are asked for: the engine has a record of each page, also of those that stay free."""
    most = max(1, trace.blocks)
    return replace(memory, device_blocks=min(memory.device_blocks, most), host_blocks=min(memory.host_blocks, most))


@contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """As in the daemon: the engine leaves no cycles behind."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
