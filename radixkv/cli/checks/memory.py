"""Is there memory for the configured pools? The daemon takes all of it at its start."""

from __future__ import annotations

from radixkv.cli import sizes
from radixkv.cli.checks.check import Check, fail, ok, warn
from radixkv.config import Config
from radixkv.device import arena

TIGHT = 0.8
"""Part of the available memory from which on pools are called tight: weights and activations need room as well."""


def check(config: Config, available_bytes: int, *, running: bool) -> Check:
    """``running``: a daemon answers, so that its pages are no longer part of what is available."""
    needed = sum(pool.arena_bytes for pool in config.pools)
    if running:
        detail = f"a daemon runs and has its pages; {sizes.show(available_bytes)} are available beside them"
        return ok("memory", detail)
    detail = f"the pools take {sizes.show(needed)}, {sizes.show(available_bytes)} are available"
    fitting = max(0, int((available_bytes - arena.SPARE_BYTES) * TIGHT)) // 2**20
    fix = f"give the pools fewer pages: device_bytes={fitting}MiB in all, or less"
    if needed > available_bytes - arena.SPARE_BYTES:
        return fail("memory", detail, fix)
    if needed > available_bytes * TIGHT:
        return warn("memory", f"{detail}: little is left for weights", fix)
    return ok("memory", detail)
