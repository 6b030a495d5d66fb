"""``radixkv serve``: read the configuration and hand it to the daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from radixkv.cli import settings
from radixkv.cli.flags import EventFlags, LimitFlags, PoolFlags, ServerFlags, given, switch
from radixkv.config import Config


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class StartFlags:
    paranoid: Annotated[bool, switch("check every invariant after every step; slow")] = False
    cold: Annotated[bool, switch("begin with empty pools, whatever an earlier daemon left in the store")] = False
    supervised: Annotated[
        bool, switch("be the daemon's keeper: start it again when it dies, with all that it held")
    ] = False


def configuration(pools: PoolFlags, keys: Mapping[str, str]) -> Config:
    """The configuration that the flags, the environment and the files say. ``keys``: text by ``server.lease_s``.

    Errors: ConfigError.
    """
    return settings.load(keys, pools.pool, os.environ, config=pools.config)


def written(**tables: object) -> dict[str, str]:
    """The keys that were written as flags, by ``server.lease_s``."""
    return {f"{table}.{name}": text for table, flags in tables.items() for name, text in given(flags).items()}


def command(keys: Mapping[str, str], pools: PoolFlags, start: StartFlags) -> list[str]:
    """The command line of a daemon with these flags, for its keeper. Its first start is cold anyway."""
    flags = [f"{settings.flag_name(key)}={text}" for key, text in keys.items()]
    flags += [f"--pool={text}" for text in pools.pool]
    flags += [f"--config={pools.config.absolute()}"] if pools.config else []
    flags += ["--paranoid"] if start.paranoid else []
    return [sys.executable, "-m", "radixkv", "serve", *flags]


def serve(
    *,
    pools: PoolFlags = PoolFlags(),
    server: ServerFlags = ServerFlags(),
    limits: LimitFlags = LimitFlags(),
    events: EventFlags = EventFlags(),
    start: StartFlags = StartFlags(),
) -> int:
    """Own the pages of this machine and answer workers until SIGTERM.

    The first line on stdout is JSON with event "ready"; logs go to stderr. A key that no flag gives is looked for in
    the environment (RADIXKV_SERVER__LEASE_S), the file of --config, /etc/radixkv.toml, in this order.

    Ends with 0 when drained, 2 for a wrong configuration, 3 when the endpoint is in use, 4 when the memory cannot be
    had, 70 for a broken invariant. With --supervised it is started again instead, unless that cannot help (2, 3, 4);
    once one has served, a wrong configuration (2) is waited for until it is mended.
    """
    keys = written(server=server, limits=limits, events=events)
    config = configuration(pools, keys)
    if start.supervised:
        from radixkv.ipc.endpoint import resolve
        from radixkv.keeper import keep

        return keep(resolve(config.server.endpoint), command(keys, pools, start))
    from radixkv.daemon import serve as run

    return run(config, paranoid=start.paranoid, cold=start.cold)
