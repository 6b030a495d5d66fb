"""``radixkv replay``: a request trace through the real engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from radixkv.cli.bar import bar
from radixkv.cli.flags import JsonFlag
from radixkv.cli.values import refuse
from radixkv.config import HOST_WRITE_MODES, PAGES_MAX, POLICIES

if TYPE_CHECKING:
    from radixkv.simulate.replay import Report

BLOCK_TOKENS = 512
"""Of the traces that Mooncake published."""

TraceArgument = Annotated[Path, Parameter(help="JSON lines as Mooncake's, plain or .gz", metavar="TRACE")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFlags:
    """What there is to hold blocks, and how large they are taken to be."""

    device_blocks: Annotated[int, Parameter(help="blocks that fit on the device", metavar="COUNT")]
    host_blocks: Annotated[
        int, Parameter(help="blocks that fit into host memory beside them; lru only", metavar="COUNT")
    ] = 0
    host_write: Annotated[
        str, Parameter(help=f"when blocks are copied to host memory: {', '.join(HOST_WRITE_MODES)}", metavar="NAME")
    ] = "back"
    policy: Annotated[str, Parameter(help=f"which blocks leave first: {', '.join(POLICIES)}", metavar="NAME")] = "lru"
    block_size: Annotated[int, Parameter(help="tokens of a block, for the figures in tokens", metavar="TOKENS")] = (
        BLOCK_TOKENS
    )


def replay(trace: TraceArgument, /, *, memory: MemoryFlags, as_json: JsonFlag = False) -> int:
    """Replay a request trace and count how many blocks were found.

    Drives the daemon's own engine and evictor, without a daemon: one request after the other, from an empty pool,
    prompts only. A block is a page.
    """
    check(memory)
    from radixkv.simulate import replay as simulated
    from radixkv.simulate.trace import load

    loaded = load(trace)
    asked = simulated.Memory(memory.device_blocks, memory.host_blocks, memory.policy, memory.host_write)
    simulated.check(loaded, asked)
    with bar(f"{loaded.name}, {memory.policy}", len(loaded.prompts)) as watch:
        report = simulated.replay(loaded, asked, watch)
    print(json.dumps(report.as_json()) if as_json else as_table(report, memory))
    return 0


def check(memory: MemoryFlags) -> None:
    """Errors: ConfigError."""
    check_policy(memory.policy)
    if not 1 <= memory.device_blocks <= PAGES_MAX:
        raise refuse("device_blocks", memory.device_blocks, f"a whole number from 1 to {PAGES_MAX}")
    if not 0 <= memory.host_blocks <= PAGES_MAX - memory.device_blocks:
        raise refuse("host_blocks", memory.host_blocks, f"a whole number from 0 to {PAGES_MAX - memory.device_blocks}")
    if memory.host_write not in HOST_WRITE_MODES:
        raise refuse("host_write", memory.host_write, ", ".join(HOST_WRITE_MODES))
    if memory.block_size < 1:
        raise refuse("block_size", memory.block_size, "a whole number from 1")


def check_policy(name: str) -> None:
    """Errors: ConfigError."""
    if name not in POLICIES:
        raise refuse("policy", name, ", ".join(POLICIES))


def as_table(report: Report, memory: MemoryFlags) -> str:
    """The report for people: blocks and tokens side by side."""
    rows = {
        "asked for": report.blocks,
        "different": report.unique_blocks,
        "found on the device": report.device_hits,
        "found in host memory": report.host_hits,
        "inserted": report.inserted,
        "evicted": report.evicted,
    }
    speed = report.requests / report.seconds if report.seconds else 0.0
    lines = [
        f"{report.requests:,} requests, {memory.device_blocks:,} device blocks, {memory.policy}",
        f"hit rate {report.hit_rate:.2%}",
        "",
        f"  {'':<22} {'blocks':>14} {'tokens':>18}",
        *(f"  {what:<22} {blocks:>14,} {blocks * memory.block_size:>18,}" for what, blocks in rows.items()),
        "",
        f"  {report.seconds:.2f} s, {speed:,.0f} requests/s",
    ]
    return "\n".join(lines)
