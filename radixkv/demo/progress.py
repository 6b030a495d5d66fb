"""What goes on, as bars on stderr: one a process that loads, one an answer."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from radixkv.demo.processes import Job, WorkerProcess

OTHER_COLUMNS_WIDTH = 64
"""What label, bar, counts and time take; the rest of the line shows the end of the answer so far."""


class Display:
    """Live bars. Use it in a ``with`` block."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=12),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            expand=True,
        )
        self._text_width = max(8, console.width - OTHER_COLUMNS_WIDTH)
        self._tasks: dict[str, TaskID] = {}
        self._texts: dict[str, str] = {}

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """A line that stays above the bars."""
        self._progress.console.print(text, highlight=False)

    def begin(self, label: str, total: int | None = None, text: str = "") -> None:
        self._texts[label] = text
        self._tasks[label] = self._progress.add_task(label, total=total, text=text)

    def step(self, label: str) -> None:
        self._progress.advance(self._tasks[label])

    def loaded(self, label: str, worker: WorkerProcess) -> None:
        self.step(label)
        self._progress.update(self._tasks[label], text=f"pid {worker.pid} is ready")

    def show(self, label: str, job: Job, event: dict[str, Any]) -> None:
        """Move an answer's bar: prompt tokens whose keys and values are there, then the text as it comes."""
        task = self._tasks[label]
        match event["event"]:
            case "start":
                self._progress.update(task, total=len(job.prompt))
            case "prefill":
                self._progress.update(task, completed=event["done"])
            case "token":
                self._texts[label] += event["text"].replace("\n", " ")
                self._progress.update(task, text=self._texts[label][-self._text_width :])
            case "done":
                self._progress.stop_task(task)
