"""All fuzzers by name."""

from __future__ import annotations

from fuzz.registry import Fuzzer
from fuzz.targets.allocator import AllocatorTarget
from fuzz.targets.engine import EngineTarget
from fuzz.targets.evictor import EvictorTarget
from fuzz.targets.recovery import RecoveryTarget
from fuzz.targets.sessions import SessionsTarget
from fuzz.targets.tree import TreeTarget
from fuzz.targets.weak_hash import WeakHashTarget
from fuzz.targets.wire import WireTarget

FUZZERS = {
    fuzzer.name: fuzzer
    for fuzzer in (
        Fuzzer(
            "engine", "the whole engine against a naive one: replies, counts, writes", EngineTarget, smoke_steps=36_000
        ),
        Fuzzer("recovery", "the daemon dies between and within writes; the next one scans the table", RecoveryTarget),
        Fuzzer("weak-hash", "the same with a chain hash that nearly always collides", WeakHashTarget),
        Fuzzer("tree", "the prefix tree with each policy of eviction against a dict of token tuples", TreeTarget),
        Fuzzer("allocator", "page states, free list and counted holders against a dict", AllocatorTarget),
        Fuzzer("evictor", "each policy of eviction in a full cache, its victims against a naive one", EvictorTarget),
        Fuzzer("sessions", "sessions, leases and reply windows against dicts that forget nothing", SessionsTarget),
        Fuzzer("wire", "spoilt and hostile bytes against the codec", WireTarget),
    )
}
