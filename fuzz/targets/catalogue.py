"""All fuzzers by name."""

from __future__ import annotations

from fuzz.registry import Fuzzer
from fuzz.targets.allocator import AllocatorTarget
from fuzz.targets.engine import EngineTarget
from fuzz.targets.events import EventsTarget
from fuzz.targets.evictor import EvictorTarget
from fuzz.targets.priorities import PrioritiesTarget
from fuzz.targets.recovery import RecoveryTarget
from fuzz.targets.sessions import SessionsTarget
from fuzz.targets.simulator import LIVES, SimulatorTarget, smallest
from fuzz.targets.tiered_recovery import TieredRecoveryTarget
from fuzz.targets.tiers import TiersTarget
from fuzz.targets.tree import TreeTarget
from fuzz.targets.two_tiers import TwoTiersTarget
from fuzz.targets.wire import WireTarget

ENGINE = dict.fromkeys(("split", "merge", "evict", "shadow", "grant", "fork", "truncate"), 100)
"""``grant``: a reserve that had waited got its pages."""

TIERS = dict.fromkeys(
    ("save", "loaded", "failed", "unknown", "granted", "sink", "raise", "uncover", "drop_below", "host evict"), 30
) | {"early": 20, "layers": 3}
"""What moves between the tiers. ``raise``: computed anew although the host tier had it; ``uncover``, ``drop_below``:
host copies gone for lack of room, and with what they continued; ``early``, ``layers``: reserves that were granted while
their pages were loading, and answers that named layers which were there."""

SIMULATOR = dict.fromkeys(
    (
        "worker dies", "fork", "stop", "wake", "revoked", "late commit", "peer gone", "reply dropped", "break",
        "repeat", "twice", "unsent, kept", "daemon dies", "torn", "killed recovering", "warm start", "rejoin",
        "rejoin refused", "resumed", "kept", "claim refused", "read, right", "read, refused", "read, overwritten",
        "unknown copy", "save", "load", "copied", "copy failed", "copying when its daemon died",
        "granted", "hit_tokens", "shadow_pages", "evicted_pages", "forks", "adopted", "wound down",
    ),
    50,
) | {"read, overwritten": 10, "copier dies": 20, "early": 20, "read by layer": 3}  # fmt: skip
"""``late commit``: of a session that is over; ``torn``: a command of which only a part was stored; ``kept``: sequences
that went on with another daemon; ``read, overwritten``: and ``valid()`` said so; ``read by layer``: pages that were
still loading, as far as was told."""

FUZZERS = {
    fuzzer.name: fuzzer
    for fuzzer in (
        Fuzzer(
            "engine",
            "the whole engine against a naive one: replies, counts, writes",
            EngineTarget,
            smoke_steps=36_000,
            wanted=ENGINE,
        ),
        Fuzzer(
            "tiers",
            "every verb while copies between two tiers run, fail, or never end, with what is really in the pages",
            TiersTarget,
            lives=300,
            smoke_steps=40_000,
            wanted=TIERS,
        ),
        Fuzzer(
            "two-tiers",
            "what is where and what is found, against a naive two-tier LRU",
            TwoTiersTarget,
            lives=300,
            smoke_steps=10_000,
            wanted={"device hit": 1000, "host hit": 500, "lost": 1000, "early": 200},
        ),
        Fuzzer("recovery", "the daemon dies between and within writes; the next one scans the table", RecoveryTarget),
        Fuzzer(
            "tiers-torn",
            "the daemon and its copier die with pages in two tiers, some of them on their way",
            TieredRecoveryTarget,
            wanted={"cut": 100, "restart": 20, "host only": 5},
        ),
        Fuzzer(
            "events",
            "routers that lose batches, ask for them and come late, against what the engine has and a lookup finds",
            EventsTarget,
            lives=300,
            smoke_steps=9_000,
            wanted={"batch": 500, "replay": 20, "whole": 50, "settled": 200, "found": 60, "restart": 20},
        ),
        Fuzzer("tree", "the prefix tree with each policy of eviction against a dict of token tuples", TreeTarget),
        Fuzzer("allocator", "page states, free list and counted holders against a dict", AllocatorTarget),
        Fuzzer("evictor", "each policy of eviction in a full cache, its victims against a naive one", EvictorTarget),
        Fuzzer(
            "priorities",
            "a full cache whose pages have priorities for a time, its victims against a naive one",
            PrioritiesTarget,
            smoke_steps=8000,
            wanted={"said": 500, "evict": 1000, "gave way": 10},
        ),
        Fuzzer("sessions", "sessions, leases and reply windows against dicts that forget nothing", SessionsTarget),
        Fuzzer(
            "simulator",
            "workers, daemons and networks that fail, with what is really in the pages",
            SimulatorTarget,
            lives=LIVES,
            smoke_steps=1_000_000,
            wanted=SIMULATOR,
            smallest=smallest,
        ),
        Fuzzer("wire", "spoilt and hostile bytes against the codec", WireTarget),
    )
}
