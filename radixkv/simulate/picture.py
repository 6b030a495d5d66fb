"""The curves as a PNG, a panel for each trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError
from radixkv.simulate.curve import BOUND, Point

STYLES: dict[str, dict[str, Any]] = {
    "fifo": {"color": "#9fd39f", "linewidth": 6},  # first and broad: LRU often lies upon it
    "lru": {"color": "#0b5fa5", "marker": "o"},
    "lfu": {"color": "#c44e00", "marker": "s"},
    "s3fifo": {"color": "#8e3aa8", "marker": "^"},
    BOUND: {"color": "#777777", "marker": "x", "linestyle": "--", "label": "Belady with bypass"},
}
WIDTH, HEIGHT, DPI = 5.0, 3.8, 80


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw all points into ``path``. Errors: ConfigError if it cannot be written."""
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(point.trace for point in points))
    figure = Figure(figsize=(WIDTH * len(traces), HEIGHT))
    panels = figure.subplots(1, len(traces), squeeze=False)
    for trace, panel in zip(traces, panels[0], strict=True):
        _panel(panel, trace, [point for point in points if point.trace == trace])
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=DPI, format="png", metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"png = {str(path)!r} cannot be written: {error}") from None


def _panel(panel: Any, trace: str, points: Sequence[Point]) -> None:
    for policy, style in STYLES.items():
        line = sorted((point.device_blocks, 100 * point.hit_rate) for point in points if point.policy == policy)
        if line:
            panel.plot(*zip(*line, strict=True), **{"label": policy, "markersize": 4, **style})
    panel.set(title=trace, xscale="log", xlabel="device blocks", ylabel="hit blocks, %")
    capacities = sorted({point.device_blocks for point in points})
    panel.set_xticks(capacities, [f"{blocks:,}" for blocks in capacities], rotation=30)
    panel.set_xticks([], minor=True)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
