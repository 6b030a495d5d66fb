"""``radixkv stat``: what a running daemon holds and has done."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

from cyclopts import Parameter

from radixkv.cli import ask, sizes
from radixkv.cli.flags import EndpointFlag, JsonFlag, switch
from radixkv.cli.values import refuse

TIMEOUT_S = 2.0


def stat(
    *,
    endpoint: EndpointFlag = None,
    as_json: JsonFlag = False,
    watch: Annotated[bool, switch("show it again and again, until ctrl-c")] = False,
    every: Annotated[float, Parameter(help="seconds between two looks of --watch", metavar="SECONDS")] = 1.0,
) -> int:
    """Show a daemon's pools, sessions and counters.

    With --json one object, with --watch as well one a line.
    """
    if not 0.01 <= every <= 86400:
        raise refuse("every", every, "seconds from 0.01 to 86400")
    with ask.connected(endpoint, TIMEOUT_S) as client:
        show(ask.stats(client), as_json=as_json)
        while watch:
            time.sleep(every)
            show(ask.stats(client), as_json=as_json, again=True)
    return 0


def show(found: dict[str, Any], *, as_json: bool, again: bool = False) -> None:
    """Print one snapshot; on a terminal a later one stands where the first one stood."""
    if as_json:
        print(json.dumps(found), flush=True)
        return
    if again:
        print("\x1b[H\x1b[J" if sys.stdout.isatty() else "", end="" if sys.stdout.isatty() else "\n")
    print(as_table(found), flush=True)


def as_table(found: dict[str, Any]) -> str:
    """The snapshot for people."""
    lines = [
        f"radixkv {found['version']}, up {_duration(found['uptime_s'])}, "
        f"{found['sessions']:,} sessions, {found['queued']:,} queued" + (", draining" if found.get("draining") else ""),
        f"boot {found['boot_id']}, cache {found['cache_id']}",
    ]
    for name, pool in found["pools"].items():
        lines += ["", *_pool(name, pool)]
    lines += ["", *_counters(found["counters"])]
    return "\n".join(lines)


def _pool(name: str, pool: dict[str, Any]) -> list[str]:
    total, page_bytes = pool["total_pages"], pool.get("page_bytes", 0)
    size = f", {sizes.show(total * page_bytes)}" if page_bytes else ""
    lines = [f"pool {name}: {total:,} pages{size}, {pool['sequences']:,} sequences, {pool['nodes']:,} tree nodes"]
    for state, count in pool["pages"].items():
        if count or state in ("free", "private", "cached"):
            lines.append(f"  {state:<12} {count:>12,}  {count / total:>6.1%}")
    lines.append(f"  {'evictable':<12} {pool['evictable_pages']:>12,}  {pool['evictable_pages'] / total:>6.1%}")
    return lines


def _counters(counters: dict[str, Any]) -> list[str]:
    asked, hit = counters.get("asked_tokens", 0), counters.get("hit_tokens", 0)
    lines = [f"{name:<22} {value:>14,}" for name, value in counters.items()]
    return [*lines, f"{'hit rate':<22} {hit / asked:>14.1%}" if asked else f"{'hit rate':<22} {'-':>14}"]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{seconds:02}"
