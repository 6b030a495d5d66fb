"""What everything in one simulated world shares: its clock, its randomness, its network, what outlives daemons.

One ``Setup`` makes one world. ``off`` and ``workers`` are what the shrinker turns: they change nothing else.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from fuzz.simulator.contents import Paths
from fuzz.simulator.network import Network
from fuzz.simulator.store import Store
from radixkv.config import HOST_WRITE_MODES, POLICIES, Config, KVSpec, Limits, PoolConfig, ServerConfig

HISTORY = 400
"""How many of the last events a report shows."""


@dataclass(frozen=True)
class Setup:
    """``key`` seeds all randomness; ``workers`` 0: drawn; ``off``: actions that never happen."""

    key: str
    workers: int = 0
    off: frozenset[str] = frozenset()

    def source(self, purpose: str) -> random.Random:
        """Randomness of its own for each purpose, so that less of one changes nothing of another."""
        return random.Random(f"{self.key}/{purpose}")


@dataclass(frozen=True)
class Habits:
    """How this world's parts behave, drawn once: rates of faults inside other actions."""

    keeps_unsent: bool
    """Requests that a socket had not sent may reach the next daemon."""
    drops_replies: float
    twice: float
    """How often a request arrives a second time, right behind itself."""
    library_copies: bool
    """The client library carries out copy_rows (CPU pools), or leaves them to the caller (CUDA)."""
    killed_recovering: float
    """How often a daemon is killed before it has recovered."""
    few_pages: int
    """Up to how many pages the table's writer goes record by record."""
    alphabet: int
    longest: int
    namespaces: int
    """Kinds of pages that occur; pages of the longest prompt; namespaces in use."""


TIERS = "host-tier"
HOST_TIERS = 0.35
"""How many worlds have pools with a host tier."""
HABITS = {"unsent": "keeps_unsent", "drops": "drops_replies", "twice": "twice", "dies-recovering": "killed_recovering"}
"""Faults among the habits, which can be switched off like others."""


def draw_habits(rng: random.Random, pages: int, off: frozenset[str]) -> Habits:
    """Drawn in full before any is switched off."""
    drawn = Habits(
        keeps_unsent=rng.random() < 0.5,
        drops_replies=rng.choice((0.0, 0.0, 0.02, 0.1)),
        twice=rng.choice((0.0, 0.0, 0.02, 0.1)),
        library_copies=rng.random() < 0.8,
        killed_recovering=rng.choice((0.0, 0.1, 0.5)),
        few_pages=rng.choice((0, 1, 2, 8)),
        alphabet=rng.choice((1, 2, 3, 6)),
        namespaces=rng.randint(1, 3),
        longest=rng.randint(1, max(1, min(6, pages // 2))),
    )
    return replace(drawn, **{field: type(getattr(drawn, field))() for name, field in HABITS.items() if name in off})


def draw_config(rng: random.Random) -> Config:
    """One small pool, mostly; two now and then. Times are short, so that leases end within a life."""

    def pool(name: str) -> PoolConfig:
        pages = rng.choice((rng.randint(3, 10), rng.randint(6, 16), rng.randint(12, 40)))
        floor = rng.randint(0, pages // 6) if rng.random() < 0.2 else 0
        return PoolConfig(
            name=name,
            spec=KVSpec(layers=1, kv_heads=1, head_dim=1, page_size=rng.choice((1, 2, 3, 4, 4))),
            pages=pages,
            decode_reserve_pages=rng.randint(0, pages // 4) if rng.random() < 0.2 else 0,
            session_floor_pages=floor,
            session_cap_pages=rng.randint(max(1, pages // 2), pages) if rng.random() < 0.15 else 0,
            namespaces=rng.choice((1, 2, 3, 6)),
            policy=rng.choice(("lru", *POLICIES)),
        )

    names = ["a", "b"] if rng.random() < 0.15 else ["a"]
    return Config(
        server=ServerConfig(lease_s=20.0, heartbeat_s=5.0, resume_timeout_s=rng.choice((0.0, 5.0, 5.0, 30.0))),
        limits=Limits(sessions=12, message_bytes=rng.choice((1024, 16 * 2**20))),
        pools=tuple(pool(name) for name in names),
    )


def add_host_tiers(config: Config, rng: random.Random) -> Config:
    """To some worlds, and with it a device so small that it is needed; the others stay as they are."""

    def added(pool: PoolConfig) -> PoolConfig:
        pages = rng.randint(3, 8)
        return PoolConfig(
            name=pool.name,
            pages=pages,
            namespaces=pool.namespaces,
            host_pages=rng.choice((1, rng.randint(1, 6), rng.randint(4, 40))),
            host_staging_pages=rng.choice((0, 2, pages)),
            reclaim_pages=rng.choice((0, 1, pages // 2, pages)),
            host_write=rng.choice(("back", *HOST_WRITE_MODES)),
            spec=replace(pool.spec, layers=rng.choice((1, 2, 3))),
        )

    return replace(config, pools=tuple(map(added, config.pools))) if rng.random() < HOST_TIERS else config


@dataclass
class Stage:
    setup: Setup
    config: Config
    habits: Habits
    rng: random.Random
    store: Store
    network: Network = field(default_factory=Network)
    paths: Paths = field(default_factory=Paths)
    now: float = 100.0
    events: Counter[str] = field(default_factory=Counter)
    history: deque[str] = field(default_factory=lambda: deque(maxlen=HISTORY))
    next_id: int = 0

    def fresh(self) -> int:
        """A number that nothing else in this world has: process, session, boot, ..."""
        self.next_id += 1
        return self.next_id

    def note(self, event: str, text: str = "") -> None:
        """Something has happened: count it, and remember it for a report."""
        self.events[event] += 1
        self.tell(event, text)

    def tell(self, event: str, text: str) -> None:
        """The same, uncounted."""
        self.history.append(f"{self.now:10.3f}  {event:<18} {text}")


def make_stage(setup: Setup) -> Stage:
    draw = setup.source("config")
    config = draw_config(draw)
    if TIERS not in setup.off:
        config = add_host_tiers(config, setup.source(TIERS))
    habits = draw_habits(draw, min(pool.pages for pool in config.pools), setup.off)
    return Stage(setup, config, habits, setup.source("steps"), Store(config))
