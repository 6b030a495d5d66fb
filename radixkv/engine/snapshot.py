"""The state in numbers, as ``stats()`` shows it. Every number is a counter that ``invariants.py`` recounts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radixkv.allocator.page_states import State
from radixkv.engine.pool import COUNTERS

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine
    from radixkv.engine.pool import Pool


def snapshot(engine: Engine) -> dict[str, Any]:
    counters = {name: sum(pool.counters[name] for pool in engine.pools.values()) for name in COUNTERS}
    counters["splits"] = sum(pool.tree.splits for pool in engine.pools.values())
    counters["merges"] = sum(pool.tree.merges for pool in engine.pools.values())
    counters["evicted_pages"] += sum(tier.host.evicted_pages for tier in engine.tiers.values())
    kept = [pool.priorities for pool in engine.retaining if pool.priorities is not None]
    counters["pins_given_up"] = sum(priorities.pins_given_up for priorities in kept)
    counters |= engine.counters
    return {
        "boot_id": engine.boot_id,
        "cache_id": engine.cache_id,
        "draining": engine.draining,
        "pools": {name: _pool(pool) for name, pool in engine.pools.items()},
        "sessions": len(engine.sessions),
        "in_transit": len(engine.transit),
        "queued": engine.queued,
        "counters": counters,
    }


def _pool(pool: Pool) -> dict[str, Any]:
    return {
        "total_pages": pool.pages.size,
        "pages": {state.name.lower(): pool.pages.counts[state] for state in State},
        "host_pages": {state.name.lower(): pool.host.pages.counts[state] if pool.host else 0 for state in State},
        "host_only_pages": pool.host.only_pages if pool.host else 0,
        "copies": len(pool.host.copies) if pool.host else 0,
        "evictable_pages": pool.tree.idle_pages,
        "pinned_pages": 0 if pool.priorities is None else pool.priorities.pinned_pages,
        "sequences": pool.sequences,
        "nodes": pool.tree.nodes,
        "namespaces": len(pool.namespaces),
        "page_size": pool.page_size,
        "page_bytes": pool.config.spec.page_bytes,
        "policy": pool.config.policy,
    }
