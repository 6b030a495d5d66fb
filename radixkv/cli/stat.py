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
from radixkv.ipc.endpoint import resolve

TIMEOUT_S = 2.0
STATES = ("free", "private", "cached", "shadow", "quarantined")
"""Of a page at rest: each is shown also when it has none. Those of pages that are being copied only when there are any.
"""
HOST_STATES = ("free", "cached")
"""The same of a page of the host tier."""


def stat(
    *,
    endpoint: EndpointFlag = None,
    as_json: JsonFlag = False,
    watch: Annotated[bool, switch("show it again and again, until ctrl-c")] = False,
    every_counter: Annotated[bool, switch("also the counters that are 0", name="all")] = False,
    every: Annotated[float, Parameter(help="seconds between two looks of --watch", metavar="SECONDS")] = 1.0,
) -> int:
    """Show a daemon's pools, sessions and counters.

    With --json one object, with --watch as well one a line.
    """
    if not 0.01 <= every <= 86400:
        raise refuse("every", every, "seconds from 0.01 to 86400")
    where = resolve(endpoint)
    show(ask.stats(where, TIMEOUT_S), as_json=as_json, every_counter=every_counter)
    while watch:
        time.sleep(every)
        show(ask.stats(where, TIMEOUT_S), as_json=as_json, every_counter=every_counter, again=True)
    return 0


def show(found: dict[str, Any], *, as_json: bool, every_counter: bool = False, again: bool = False) -> None:
    """Print one snapshot; on a terminal a later one stands where the first one stood."""
    if as_json:
        print(json.dumps(found), flush=True)
        return
    if again:
        print("\x1b[H\x1b[J" if sys.stdout.isatty() else "", end="" if sys.stdout.isatty() else "\n")
    print(as_table(found, every_counter=every_counter), flush=True)


def as_table(found: dict[str, Any], *, every_counter: bool = False) -> str:
    """The snapshot for people. ``every_counter``: also those that are 0."""
    sessions, queued = _counted(found["sessions"], "session"), f"{found['queued']:,} queued"
    lines = [
        f"radixkv {found['version']}, up {_duration(found['uptime_s'])}, {sessions}, {queued}"
        + (", draining" if found.get("draining") else ""),
        f"boot {found['boot_id']}, cache {found['cache_id']}",
    ]
    for name, pool in found["pools"].items():
        lines += ["", *_pool(name, pool)]
    if found.get("events"):
        lines += ["", *_events(found["events"], every_counter)]
    lines += ["", *_counters(found["counters"], every_counter)]
    return "\n".join(lines)


def _pool(name: str, pool: dict[str, Any]) -> list[str]:
    total, page_bytes = pool["total_pages"], pool.get("page_bytes", 0)
    size = f", {sizes.show(total * page_bytes)}" if page_bytes else ""
    sequences, nodes = _counted(pool["sequences"], "sequence"), _counted(pool["nodes"], "tree node")
    lines = [f"pool {name}: {_counted(total, 'page')}{size}, {sequences}, {nodes}"]
    return lines + _states(pool["pages"], total, ("evictable", pool["evictable_pages"])) + _host_tier(pool)


def _host_tier(pool: dict[str, Any]) -> list[str]:
    """Nothing of a pool that has none."""
    host = pool["host_pages"]
    total = sum(host.values())
    if not total:
        return []
    size = f", {sizes.show(total * pool['page_bytes'])}" if pool.get("page_bytes") else ""
    return [
        f" its host tier: {_counted(total, 'page')}{size}",
        *_states(host, total, ("only here", pool["host_only_pages"]), HOST_STATES),
    ]


def _states(
    found: dict[str, int], total: int, of_cached: tuple[str, int], shown: tuple[str, ...] = STATES
) -> list[str]:
    """A line a state. ``of_cached``: a part of the cached pages to be told. ``shown``: also if there are none."""
    lines = []
    for state, count in ({state: found.get(state, 0) for state in shown} | found).items():
        if count or state in shown:
            lines.append(_row(state, count, total))
        if state == "cached":
            lines.append(_row(f"  of which {of_cached[0]}", of_cached[1], total))
    return lines


def _row(what: str, count: int, total: int) -> str:
    return f"  {what:<20} {count:>12,}  {count / total:>6.1%}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _events(events: dict[str, Any], every_counter: bool) -> list[str]:
    rest = {name: value for name, value in events.items() if name not in ("pool", "boot")}
    return [f"events of pool {events['pool']}, boot {events['boot']}:", *_numbers(rest, every_counter)]


def _numbers(found: dict[str, int], every: bool) -> list[str]:
    return [f"{name:<22} {value:>14,}" for name, value in found.items() if value or every]


def _counters(counters: dict[str, Any], every_counter: bool) -> list[str]:
    asked, hit = counters.get("asked_tokens", 0), counters.get("hit_tokens", 0)
    rate = f"{hit / asked:.1%}" if asked else "-"
    return [f"{'hit rate':<22} {rate:>14}", *_numbers(counters, every_counter)]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{seconds:02}"
