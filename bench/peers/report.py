"""What the peers' run found: figures, rows, the table for people, and the verdict a pair of peer and work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.peers.recipes import OURS, Peer
from bench.rows import Row
from bench.stopwatch import Summary, summarize

WORKS = ("W3", "W4", "W4b")


@dataclass
class Figures:
    """What one peer has needed: per work and round, us an admission."""

    peer: Peer
    version: str
    rounds: dict[str, list[list[float]]] = field(default_factory=lambda: {work: [] for work in WORKS})

    def summary(self, work: str) -> Summary:
        return summarize(us for measured in self.rounds[work] for us in measured)

    def medians(self, work: str) -> list[float]:
        return [summarize(measured).p50 for measured in self.rounds[work]]


def rows(found: Sequence[Figures]) -> list[Row]:
    """Each one's median; and for each peer what part of its time radixkv takes, with 1 as the bar.

    The latter is of all rounds; its p50 and p99 are the median and the least favourable round.
    """
    made = []
    for work in WORKS:
        for one in found:
            all_us = one.summary(work)
            made.append(Row(_name(work, one), all_us.p50, "us", 0.0, None, all_us.n, all_us.p50, all_us.p99))
    ours, others = _apart(found)
    if ours is None:
        return made
    for work in WORKS:
        for one in others:
            theirs, ratios = one.summary(work).p50, sorted(_ratios(work, ours, one))
            value = ours.summary(work).p50 / theirs
            name = f"{_name(work, ours)}_over_{one.peer.slug}"
            made.append(Row(name, value, "x", theirs, 1.0, len(ratios), summarize(ratios).p50, ratios[-1]))
    return made


def table(found: Sequence[Figures]) -> str:
    """Medians in us; in brackets how many times radixkv's that is: over all rounds, and in the least favourable one."""
    ours, _ = _apart(found)
    lines = ["us an admission, median (times radixkv's: all rounds, least favourable one; LOST: radixkv is slower)", ""]
    lines.append(f"{'':22s}" + "".join(f"{work:>30s}" for work in WORKS))
    for one in found:
        cells = "".join(f"{_cell(work, ours, one):>30s}" for work in WORKS)
        lines.append(f"{one.peer.name + ' ' + one.version:22s}{cells}")
    lines += ["", "timed:", *(f"  {one.peer.name:14s}{one.peer.timed}" for one in found)]
    return "\n".join(lines)


def verdict(made: Sequence[Row]) -> str:
    """One line that names what was lost."""
    judged = [row for row in made if row.bar is not None]
    lost = [f"{row.name} ({row.value:.2f})" for row in judged if not row.ok]
    if not judged:
        return "nothing to compare: radixkv or all peers are missing"
    if not lost:
        return f"radixkv is faster in all {len(judged)} comparisons"
    return f"radixkv is faster in {len(judged) - len(lost)} of {len(judged)} comparisons; lost: {', '.join(lost)}"


def _cell(work: str, ours: Figures | None, one: Figures) -> str:
    median = one.summary(work).p50
    if ours is None or one is ours:
        return f"{median:,.1f}"
    times = median / ours.summary(work).p50
    lost = " LOST" if times < 1 else ""
    return f"{median:,.1f} ({times:.1f}x, {1 / max(_ratios(work, ours, one)):.1f}x){lost}"


def _name(work: str, one: Figures) -> str:
    return f"peers.{work}.{one.peer.slug}"


def _apart(found: Sequence[Figures]) -> tuple[Figures | None, list[Figures]]:
    others = [one for one in found if one.peer.name != OURS]
    return next((one for one in found if one.peer.name == OURS), None), others


def _ratios(work: str, ours: Figures, theirs: Figures) -> list[float]:
    """radixkv's median by the other's, a round each."""
    return [a / b for a, b in zip(ours.medians(work), theirs.medians(work), strict=True)]
