"""One figure is one row: a name, a value, the bar it must keep. As JSON lines for programs, as a table for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from bench.stopwatch import Summary

TABLE_WIDTH = 100
"""Columns that no figure's name needs to be cut for, also where the output is no terminal."""


@dataclass(frozen=True)
class Row:
    """``reference``: what the figure is compared with, same unit (0: nothing). ``bar``: the most it may be, or with
    ``at_least`` the least (None: no bar, the row stands for comparison). ``p50`` and ``p99`` of ``n`` measurements."""

    name: str
    value: float
    unit: str
    reference: float = 0.0
    bar: float | None = None
    n: int = 1
    p50: float = 0.0
    p99: float = 0.0
    at_least: bool = False

    @property
    def ok(self) -> bool:
        return self.bar is None or (self.value >= self.bar if self.at_least else self.value <= self.bar)

    def as_json(self) -> str:
        """The object that ``--json`` prints, in the order of the contract."""
        fields = asdict(self)
        shown = ("name", "value", "unit", "reference", "bar")
        row = {name: fields[name] for name in shown} | {"ok": self.ok}
        row |= {name: fields[name] for name in ("n", "p50", "p99")}
        return json.dumps({name: _short(value) for name, value in row.items()})

    @classmethod
    def from_json(cls, line: str) -> Row:
        """Which side of its bar it is on, and whether that is ok, says what kind of bar it is."""
        fields = json.loads(line)
        ok = fields.pop("ok")
        made = cls(**fields)
        return made if made.ok == ok else replace(made, at_least=True)


def row(name: str, unit: str, measured: Summary, bar: float | None = None, reference: float = 0.0) -> Row:
    """A row whose value is the median."""
    return Row(name, measured.p50, unit, reference, bar, measured.n, measured.p50, measured.p99)


def single(name: str, unit: str, value: float, bar: float | None = None, reference: float = 0.0) -> Row:
    """A row of one measurement."""
    return Row(name, value, unit, reference, bar, 1, value, value)


def _short(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def report(rows: Iterable[Row], arguments: Sequence[str]) -> None:
    """Print each row as soon as it is there: JSON lines with ``--json``, else one line of text a row."""
    as_json = wants_json(arguments)
    for made in rows:
        print(made.as_json() if as_json else as_text(made), flush=True)


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether ``--json`` is given. Ends the process if there is anything else, before minutes go into measuring."""
    unknown = [argument for argument in arguments if argument != "--json"]
    if unknown:
        sys.exit(f"unknown argument {unknown[0]!r}; the only one is --json")
    return "--json" in arguments


def as_text(made: Row) -> str:
    bar = "" if made.bar is None else f"  bar {_bar(made)}  {'ok' if made.ok else 'MISSED'}"
    reference = f"  beside {made.reference:,.4g}" if made.reference else ""
    spread = f"  p99 {made.p99:,.4g}  n={made.n}" if made.n > 1 else ""
    return f"{made.name:32s} {made.value:12,.4g} {made.unit:8s}{bar}{reference}{spread}"


def _bar(made: Row) -> str:
    return "" if made.bar is None else f"{'at least ' * made.at_least}{made.bar:,.4g}"


def print_table(rows: Sequence[Row], title: str) -> None:
    """All rows as one table on a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("figure", "value", "unit", "bar", "", "beside", "p99", "n"):
        table.add_column(heading, justify="left" if heading in ("figure", "unit") else "right", no_wrap=True)
    for made in rows:
        verdict = "" if made.bar is None else "[green]ok[/green]" if made.ok else "[red]over[/red]"
        table.add_row(
            made.name,
            f"{made.value:,.4g}",
            made.unit,
            _bar(made),
            verdict,
            f"{made.reference:,.4g}" if made.reference else "",
            f"{made.p99:,.4g}" if made.n > 1 else "",
            f"{made.n:,}" if made.n > 1 else "",
        )
    missed = sum(not made.ok for made in rows)
    judged = sum(made.bar is not None for made in rows)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)
    console.print(f"{judged - missed} of {judged} bars are kept")
