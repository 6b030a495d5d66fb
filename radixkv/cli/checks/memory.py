"""Is there memory for the configured pools? The daemon takes all of it at its start."""

from __future__ import annotations

from radixkv.cli import sizes
from radixkv.cli.checks.check import Check, fail, ok, warn
from radixkv.config import Config
from radixkv.device import arena

TIGHT = 0.8
"""Part of the available memory from which on pools are called tight: weights and activations need room as well."""


def check(config: Config, available_bytes: int, *, running: bool, asked: bool = False) -> Check:
    """``running``: a daemon answers, so that its pages are no longer part of what is available.

    ``asked``: somebody wrote down pools to be checked, which need not be the running daemon's.
    """
    needed = sum(pool.machine_bytes for pool in config.pools)
    if running and asked:
        fix = "run this again when it has ended, or with another --endpoint to see what fits beside it"
        return warn("memory", "not checked: a daemon already runs here", fix)
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
