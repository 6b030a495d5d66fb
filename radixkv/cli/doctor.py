"""``radixkv doctor``: look at this machine, say what is wrong and how to mend it."""

from __future__ import annotations

import json
from dataclasses import asdict

from radixkv.cli import ask
from radixkv.cli.checks import cuda, kernel, limits, memory, packages, sockets
from radixkv.cli.checks.check import Check, fail, ok
from radixkv.cli.flags import EndpointFlag, JsonFlag, PoolFlags
from radixkv.cli.serve import configuration
from radixkv.config import Config, PoolConfig
from radixkv.device.arena import available_bytes
from radixkv.errors import ConfigError, RadixKVError
from radixkv.ipc.endpoint import Endpoint, resolve

ANSWER_S = 2.0
"""How long a running daemon may take to answer."""


def doctor(*, pools: PoolFlags = PoolFlags(), endpoint: EndpointFlag = None, as_json: JsonFlag = False) -> int:
    """Check this machine and say what to mend.

    Memory, limits, kernel features, sockets, packages and CUDA are checked against the configuration. Each line begins
    with ok, warn or fail; what is not ok comes with its fix. Exit code 1 if anything fails.
    """
    checks = examine(pools, endpoint)
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}))
    else:
        print(as_lines(checks))
    return 1 if failed else 0


def examine(pools: PoolFlags, endpoint: str | None) -> list[Check]:
    """All checks, in the order in which they are printed."""
    try:
        config = configuration(pools, {} if endpoint is None else {"server.endpoint": endpoint})
        where = resolve(config.server.endpoint)
    except ConfigError as error:
        wrong = fail("configuration", error.message, "mend this key; docs/configuration.md has every key")
        return [wrong, *kernel.checks(), *packages.checks(), *cuda.checks(Config(), packages.version_of)]
    answer = _ask(where)
    running, asked = isinstance(answer, dict), bool(pools.pool or pools.config)
    return [
        ok("configuration", f"{_pools(config)}; endpoint {where.address}"),
        memory.check(config, available_bytes(), running=running, asked=asked),
        *limits.checks(config),
        *kernel.checks(),
        sockets.directory(where),
        sockets.daemon(where, answer),
        *packages.checks(),
        *cuda.checks(config, packages.version_of),
    ]


def _ask(where: Endpoint) -> dict[str, object] | RadixKVError:
    """The daemon's snapshot, or why there is none."""
    try:
        return ask.stats(where, ANSWER_S)
    except RadixKVError as error:
        return error


def _pools(config: Config) -> str:
    return ", ".join(f"pool {pool.name} of {pool.pages:,} pages{_host_tier(pool)}" for pool in config.pools)


def _host_tier(pool: PoolConfig) -> str:
    return f" and {pool.host_pages:,} in its host tier" if pool.host_pages else ""


def as_lines(checks: list[Check]) -> str:
    """One line a check, and one for its fix."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.detail}")
        if check.fix:
            lines.append(f"{'':<4}  {'':<{width}}  fix: {check.fix}")
    return "\n".join(lines)
