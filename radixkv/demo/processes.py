"""The demo's processes: a daemon with its keeper, and workers whose events are collected in one place.

Each has a process group of its own, so that a Ctrl-C reaches the demo alone, which then ends them in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 30.0
SILENCE_TIMEOUT_S = 180.0
"""A worker that says nothing for this long is stuck. Loading the model is the longest silence there is."""
END_TIMEOUT_S = 30.0
HOST_PAGES = 512
"""The host tier: 360 MiB of float32, room for the longest prompt that the model takes."""


class DemoFailed(Exception):
    """A process of the demo did not do its part; the message says which, with its last words."""


class DaemonProcess:
    """``radixkv serve --supervised``, with its sockets in ``folder`` and nothing from the environment. Nor does it tell
    routers what it has, as this machine's file may want a daemon to.

    ``process`` is the keeper; ``ready`` is what the present daemon said when it was ready, ``boot_ids`` are those of
    all daemons so far.
    """

    def __init__(self, folder: Path, kv_dtype: str) -> None:
        """Raises DemoFailed when it is not ready within START_TIMEOUT_S."""
        self._log = folder / "daemon.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RADIXKV_")}
        endpoint = f"ipc://{folder / 'radixkv.sock'}"
        command = [
            sys.executable, "-m", "radixkv", "serve", "--supervised", "--endpoint", endpoint,
            "--pool", f"name=default,dtype={kv_dtype},host_pages={HOST_PAGES}", "--events.endpoint=",
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment, process_group=0
            )
        self.boot_ids: list[str] = []
        self._starts: queue.SimpleQueue[tuple[float, dict[str, Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.await_start()

    @property
    def endpoint(self) -> str:
        return str(self.ready["endpoint"])

    @property
    def pid(self) -> int:
        return int(self.ready["pid"])

    def kill_daemon(self) -> float:
        """SIGKILL to the daemon; its keeper starts the next one. When that was, by the monotonic clock, in seconds."""
        os.kill(self.pid, signal.SIGKILL)
        return time.monotonic()

    def await_start(self) -> float:
        """Wait until the next daemon is ready. When that was, in seconds. Raises DemoFailed."""
        try:
            at, self.ready = self._starts.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            self.ready = {}
        if not self.ready:
            self.kill()
            raise DemoFailed("the daemon did not start: " + last_words(self._log))
        self.boot_ids.append(str(self.ready["boot_id"]))
        return at

    def end(self) -> int:
        """SIGTERM, wait, and give the exit code. Raises DemoFailed when it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DemoFailed("the daemon did not end after SIGTERM: " + last_words(self._log)) from None

    def kill(self) -> None:
        """In good order if it can: a keeper that is killed cannot wait for its daemon."""
        with contextlib.suppress(DemoFailed):
            self.end()
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        """Until the last of keeper and daemon has ended: both have the pipe."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._starts.put((time.monotonic(), json.loads(line)))
        self._starts.put((time.monotonic(), {}))


class WorkerProcess:
    """``python -m radixkv.demo.worker``: orders in, events out into the crew's queue."""

    def __init__(self, number: int, log: Path, events: queue.SimpleQueue[Any]) -> None:
        self.number = number
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "radixkv.demo.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True,
                process_group=0,
            )  # fmt: skip
        threading.Thread(target=self._read, args=(events,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def order(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("it is gone") from None

    def end(self) -> None:
        """Close its input, which ends it. Raises DemoFailed when it does not end well."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            code = self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise self.failure("it did not end") from None
        if code != 0:
            raise self.failure(f"it ended with {code}")

    def kill(self) -> None:
        """SIGKILL: it gets no chance to give anything back."""
        self.process.kill()
        self.process.wait()

    def failure(self, what: str) -> DemoFailed:
        return DemoFailed(f"worker {self.number} (pid {self.pid}): {what}: {last_words(self._log)}")

    def _read(self, events: queue.SimpleQueue[Any]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # A killed worker may leave half a line.
            with contextlib.suppress(ValueError):
                events.put((self, json.loads(line)))
        events.put((self, {"event": "end"}))


@dataclass(slots=True)
class Job:
    """One order to one worker, and what came of it. kill_after: SIGKILL after so many tokens of the answer."""

    worker: WorkerProcess
    order: dict[str, Any]
    kill_after: int | None = None
    prompt: list[int] = field(default_factory=list)
    said: int = 0
    done: dict[str, Any] | None = None
    killed: bool = False


OnEvent = Callable[[Job, dict[str, Any]], None]


class Crew:
    """The workers, and the one queue in which what they say arrives in order. setup: each one's first line of input."""

    def __init__(self, folder: Path) -> None:
        self.setup: dict[str, Any] = {}
        self._folder = folder
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.workers: list[WorkerProcess] = []

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM arrive as an event like any other, so that none comes while a process is being started."""

        def note(number: int, _frame: object) -> None:
            self._events.put((None, {"event": "signal", "number": number}))

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def hire(self, count: int, on_ready: Callable[[WorkerProcess], None]) -> list[WorkerProcess]:
        """Start workers side by side and wait until all have loaded the model. Raises DemoFailed."""
        first = len(self.workers) + 1
        for number in range(first, first + count):
            self.workers.append(WorkerProcess(number, self._folder / f"worker-{number}.log", self._events))
            self.workers[-1].order(self.setup)
        new = self.workers[first - 1 :]
        waiting = set(new)
        while waiting:
            worker, event = self._next()
            if event["event"] == "ready":
                waiting.discard(worker)
                on_ready(worker)
            elif event["event"] == "end" and worker in waiting:
                raise worker.failure("it ended while it loaded the model")
        return new

    def work(self, jobs: list[Job], on_event: OnEvent) -> None:
        """Give all orders at once and see them through. ``on_event`` is called before a kill. Raises DemoFailed."""
        for job in jobs:
            job.worker.order(job.order)
        by_worker = {job.worker: job for job in jobs}
        while any(job.done is None and not job.killed for job in jobs):
            worker, event = self._next()
            if worker not in by_worker or by_worker[worker].killed:
                continue
            job = by_worker[worker]
            self._note(job, event)
            on_event(job, event)
            if job.kill_after is not None and job.said >= job.kill_after:
                worker.kill()
                job.killed = True

    def end(self) -> None:
        """End all that live. Raises DemoFailed when one does not end well."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.end()

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def _note(self, job: Job, event: dict[str, Any]) -> None:
        match event["event"]:
            case "start":
                job.prompt = event["prompt"]
            case "token":
                job.said += 1
            case "done":
                job.done = event
            case "end":
                raise job.worker.failure("it ended in the middle of its work")

    def _next(self) -> tuple[WorkerProcess, dict[str, Any]]:
        try:
            worker, event = self._events.get(timeout=SILENCE_TIMEOUT_S)
        except queue.Empty:
            raise DemoFailed(f"no worker said anything for {SILENCE_TIMEOUT_S:.0f} s") from None
        if event["event"] == "signal":
            if event["number"] == signal.SIGINT:
                raise KeyboardInterrupt
            sys.exit(128 + event["number"])
        return worker, event


def last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-6:]) or "it left no message"
