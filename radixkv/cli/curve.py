"""``radixkv curve``: hit rate against capacity, drawn and as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from radixkv.cli import extras
from radixkv.cli.bar import bar
from radixkv.cli.flags import JsonFlag
from radixkv.cli.replay import TraceArgument, check_policy
from radixkv.cli.values import refuse
from radixkv.config import POLICIES

if TYPE_CHECKING:
    from radixkv.simulate.curve import Point


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFlags:
    policy: Annotated[
        tuple[str, ...],
        Parameter(
            help=f"a policy; may be repeated [default: {', '.join(POLICIES)}]",
            metavar="NAME",
            negative="",
            show_default=False,
        ),
    ] = ()
    device_blocks: Annotated[
        tuple[int, ...],
        Parameter(
            help="a capacity; may be repeated [default: 1 to 50 % of the trace's different blocks]",
            metavar="COUNT",
            negative="",
            show_default=False,
        ),
    ] = ()
    png: Annotated[Path, Parameter(help="where the picture goes", metavar="FILE")] = Path("curve.png")
    jobs: Annotated[int, Parameter(help="processes [default: one a CPU]", metavar="COUNT", show_default=False)] = 0


def curve(*traces: TraceArgument, flags: CurveFlags = CurveFlags(), as_json: JsonFlag = False) -> int:
    """Draw how much of request traces is found in the cache, for several capacities and policies.

    Each point is a replay with the daemon's own engine. The bound is what a policy that knows the future would find if
    it could keep or refuse each block by itself (Belady with bypass).
    """
    extras.require(("matplotlib",), "plots")
    policies = tuple(dict.fromkeys(flags.policy or POLICIES))
    for name in policies:
        check_policy(name)
    if not traces:
        raise refuse("TRACE", "", "at least one trace")
    if not 0 <= flags.jobs <= 1024:
        raise refuse("jobs", flags.jobs, "a whole number from 1 to 1024; 0: one a CPU")
    if not flags.png.absolute().parent.is_dir():
        raise refuse("png", str(flags.png), "a file in a folder that is there")
    found = _find(tuple(dict.fromkeys(traces)), policies, flags)
    from radixkv.simulate.picture import draw

    draw(found, flags.png)
    if as_json:
        print(json.dumps({"points": [point.as_json() for point in found], "png": str(flags.png)}))
    else:
        show(found)
        print(f"drawn in {flags.png}")
    return 0


def _find(traces: Sequence[Path], policies: Sequence[str], flags: CurveFlags) -> list[Point]:
    """All points, in the order of traces, capacities and policies."""
    from radixkv.simulate import curve as simulated
    from radixkv.simulate.trace import load

    tasks = [
        simulated.Task(number, policy, blocks)
        for number, path in enumerate(traces)
        for blocks in simulated.capacities(load(path), flags.device_blocks)
        for policy in (*policies, simulated.BOUND)
    ]
    jobs = min(flags.jobs or len(os.sched_getaffinity(0)), len(tasks))
    found: dict[simulated.Task, Point] = {}
    with bar("replays", len(tasks)) as watch:
        for task, point in simulated.points(traces, tasks, jobs):
            found[task] = point
            watch(len(found))
    return [found[task] for task in tasks]


def show(points: Sequence[Point]) -> None:
    """A table for each trace: capacities down, policies across."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for trace in dict.fromkeys(point.trace for point in points):
        mine = [point for point in points if point.trace == trace]
        rates = {(point.device_blocks, point.policy): point.hit_rate for point in mine}
        policies = dict.fromkeys(point.policy for point in mine)
        table = Table(title=f"{trace}: hit blocks, % of {mine[0].blocks:,}", title_justify="left", box=box.SIMPLE_HEAD)
        for heading in ("device blocks", *policies):
            table.add_column(heading, justify="right", no_wrap=True)
        for blocks in dict.fromkeys(point.device_blocks for point in mine):
            table.add_row(f"{blocks:,}", *(f"{100 * rates[blocks, policy]:.2f}" for policy in policies))
        console.print(table)
