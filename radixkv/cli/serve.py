"""``radixkv serve``: read the configuration and hand it to the daemon."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from radixkv.cli import settings
from radixkv.cli.flags import LimitFlags, PoolFlags, ServerFlags, given, switch
from radixkv.config import Config


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class StartFlags:
    paranoid: Annotated[bool, switch("check every invariant after every step; slow")] = False
    cold: Annotated[bool, switch("begin with empty pools; no effect yet: every start is cold")] = False


def configuration(pools: PoolFlags, server: ServerFlags, limits: LimitFlags) -> Config:
    """The configuration that the flags, the environment and the files say. Errors: ConfigError."""
    flags = {f"server.{name}": text for name, text in given(server).items()}
    flags |= {f"limits.{name}": text for name, text in given(limits).items()}
    return settings.load(flags, pools.pool, os.environ, config=pools.config)


def serve(
    *,
    pools: PoolFlags = PoolFlags(),
    server: ServerFlags = ServerFlags(),
    limits: LimitFlags = LimitFlags(),
    start: StartFlags = StartFlags(),
) -> int:
    """Own the pages of this machine and answer workers until SIGTERM.

    The first line on stdout is JSON with event "ready"; logs go to stderr. A key that no flag gives is looked for in
    the environment (RADIXKV_SERVER__LEASE_S), the file of --config, /etc/radixkv.toml, in this order.

    Ends with 0 when drained, 2 for a wrong configuration, 3 when the endpoint is in use, 4 when the memory cannot be
    had, 70 for a broken invariant.
    """
    config = configuration(pools, server, limits)
    from radixkv.daemon import serve as run

    return run(config, paranoid=start.paranoid, cold=start.cold)
