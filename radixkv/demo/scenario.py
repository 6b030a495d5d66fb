"""What happens in the demo, in order.

::

    1        worker 1: the document is computed
    2        worker 2: found cached
    3, 4     workers 1 and 2 at once: found cached
    5        worker 2: SIGKILL in the middle of its answer; its pages come back
    6        worker 3, which is new: still found cached
    7        worker 3: SIGKILL to the daemon in the middle of the answer; the next daemon comes, the answer goes on
    8        worker 1: found cached, by the next daemon
    9        somebody else takes all pages of the device: the document goes to the host tier. Worker 3: it comes back
    then     all but 5 again in the same grouping, by Transformers alone: the outputs must be equal. With quantized
             pages by one process alone, in such pages of its own
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

import radixkv
from radixkv.adapters import smollm2
from radixkv.demo import report, verdict
from radixkv.demo.options import KILL_AFTER_TOKENS, MAX_NEW_TOKENS, BadInput, Task
from radixkv.demo.processes import Crew, DaemonProcess, DemoFailed, Job, OnEvent, WorkerProcess
from radixkv.demo.progress import Display
from radixkv.demo.verdict import Answer, PageCount

POOL = "default"
TEMPORARY_PATH_MAX = 60
PLAIN_WIDTH = 108
"""Columns of a table that goes into a file or a pipe."""
RETURN_TIMEOUT_S = 5.0
"""A killed worker's pages must be back within this time."""
TIMEOUT_S = 30.0
ENDLESS = ("5", "7")
"""Answers that go on to the last token allowed, since a short one could be over before anybody is killed."""


def run_demo(load: Callable[[], Task], as_json: bool) -> int:
    """0: all went as it must; 1: not; 2: the input cannot be used."""
    errors = Console(stderr=True)
    try:
        task = load()
        smollm2.fetch_shown(errors)
        result = _run(task, errors)
    except BadInput as error:
        errors.print(f"radixkv: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    except (DemoFailed, smollm2.ModelError, radixkv.RadixKVError) as error:
        errors.print(f"The demo failed: {error}", markup=False)
        return 1
    if as_json:
        sys.stdout.write(json.dumps(report.as_json(result)) + "\n")
        for fault in result.faults:
            errors.print(fault, markup=False)
    else:
        report.show(result, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    return 0 if not result.faults else 1


def _run(task: Task, console: Console) -> report.Result:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_folder()))
        display = stack.enter_context(Display(console))
        crew = Crew(folder)
        stack.enter_context(crew.stopped_by_signals())
        daemon = DaemonProcess(folder, task.kv_dtype)
        stack.callback(daemon.kill)
        client = stack.enter_context(radixkv.connect(daemon.endpoint, timeout=TIMEOUT_S))
        crew.setup = {
            "endpoint": daemon.endpoint,
            "document": task.document,
            "max_new_tokens": MAX_NEW_TOKENS,
            "kv_dtype": task.kv_dtype,
        }
        stack.callback(crew.kill)
        scenario = _Scenario(task, crew, client, display)
        scenario.answer_questions()
        scenario.outlive_the_daemon(daemon)
        scenario.come_back_from_the_host()
        scenario.compare()
        crew.end()
        scenario.count("at the end")
        client.close()
        return scenario.result(daemon.boot_ids, daemon.end())


def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for sockets and logs. A socket's path may have 107 characters, which a long $TMPDIR would exceed."""
    fits = len(tempfile.gettempdir()) <= TEMPORARY_PATH_MAX
    return tempfile.TemporaryDirectory(prefix="radixkv-demo-", dir=None if fits else "/tmp")  # noqa: S108 - mode 0700


class _Scenario:
    def __init__(self, task: Task, crew: Crew, client: radixkv.Client, display: Display) -> None:
        self._task = task
        self._crew = crew
        self._client = client
        self._pool = client.pool(POOL)
        self._display = display
        self._began = time.monotonic()
        self._finished: list[list[int]] = []
        self._answers: dict[str, Answer] = {}
        self._kills: list[report.Kill] = []
        self._counts: list[PageCount] = []
        self._faults: list[str] = []

    def answer_questions(self) -> None:
        one, two = self._hire(2)
        self._ask({"1": one})
        self.count("after the first answer")
        self._ask({"2": two})
        self._ask({"3": one, "4": two})
        self._kill_amid("5", two)
        (three,) = self._hire(1)
        self._ask({"6": three})
        self._one, self._three = one, three

    def outlive_the_daemon(self, daemon: DaemonProcess) -> None:
        """Kill it while worker 3 answers; worker 1 then finds what the former daemon had cached."""
        worker, pid = self._three, daemon.pid
        held: list[PageCount] = []
        times: list[float] = []
        """Of the kill, then of each further token."""

        def look(job: Job, event: dict[str, Any]) -> None:
            if event["event"] == "token" and job.said == KILL_AFTER_TOKENS:
                held.append(self.count("worker 3, just before the daemon's kill"))
                times.append(daemon.kill_daemon())
            elif event["event"] == "token" and times:
                times.append(time.monotonic())

        self._ask({"7": worker}, look)
        answer = self._answers["7"]
        if not times:
            self._faults.append("request 7 was finished before the daemon was killed")
            return
        killed_at, back_at = times[0], daemon.await_start()
        meanwhile = sum(at < back_at for at in times[1:])
        how = (
            f" (pid {pid}) with SIGKILL after {KILL_AFTER_TOKENS} tokens of worker {worker.number}'s answer to 7, "
            f"which went on; {meanwhile} more tokens came in the {back_at - killed_at:.2f} s until the next daemon "
            f"(pid {daemon.pid}) was ready"
        )
        self._kills.append(report.Kill("daemon", killed_at - self._began, how))
        self._display.note(f"Killed: daemon{how}")
        after = self.count("after that answer, by the next daemon")
        found = self._pool.lookup(answer.tokens, namespace=radixkv.Namespace(**smollm2.namespace_fields()))
        page_size = self._pool.page_size
        self._faults += verdict.restart_faults(held[0], after, answer, found.device_tokens, page_size)
        self._ask({"8": self._one})

    def come_back_from_the_host(self) -> None:
        """Leave no room on the device, as a crowd of other requests would, and ask about the document again."""
        pool = self._pool
        others = range(pool.total_pages * pool.page_size)
        with pool.reserve(others, namespace=radixkv.Namespace("somebody else"), timeout=TIMEOUT_S):
            away = self.count("while somebody else has the whole device")
        self._ask({"9": self._three})
        self._journey = away, self.count("after the document came back")

    def compare(self) -> None:
        """Answer the finished questions again, grouped as before, but by Transformers alone."""
        one, three = self._one, self._three
        for group in (
            {"1": one},
            {"2": three},
            {"3": one, "4": three},
            {"6": three},
            {"7": three},
            {"8": one},
            {"9": three},
        ):
            jobs = {name: Job(worker, self._order("reference", name)) for name, worker in group.items()}
            self._work(jobs, "without cache")
            for name, job in jobs.items():
                assert job.done is not None
                self._answers[name].reference = job.done

    def count(self, when: str) -> PageCount:
        """Ask the daemon for its page counts and keep them."""
        stats = self._client.stats()
        pool = stats["pools"][POOL]
        states = {state: int(pages) for state, pages in pool["pages"].items()}
        count = PageCount(
            when,
            total=int(pool["total_pages"]),
            states=states,
            sequences=int(pool["sequences"]),
            host_only=int(pool["host_only_pages"]),
            loaded=int(stats["counters"]["loaded_pages"]),
        )
        self._counts.append(count)
        return count

    def result(self, boot_ids: list[str], daemon_exit: int) -> report.Result:
        answers = list(self._answers.values())
        faults = [fault for answer in answers for fault in verdict.faults_of(answer, self._pool.page_size)]
        faults += verdict.page_faults(self._counts) + self._faults + verdict.wait_faults(self._answers["8"])
        faults += verdict.host_faults(*self._journey, self._answers["9"])
        faults += verdict.end_faults(self._counts[-1], daemon_exit) + verdict.boot_faults(boot_ids)
        return report.Result(answers, self._kills, self._counts, boot_ids, faults, time.monotonic() - self._began)

    def _hire(self, count: int) -> list[WorkerProcess]:
        first = len(self._crew.workers) + 1
        names = ", ".join(str(number) for number in range(first, first + count))
        label = f"worker {names}: loading"
        self._display.begin(label, count)
        return self._crew.hire(count, lambda worker: self._display.loaded(label, worker))

    def _ask(self, group: dict[str, WorkerProcess], look: OnEvent | None = None) -> None:
        """Put questions to workers, all at the same time, and keep their answers. ``look`` sees every event."""
        before = list(self._finished)
        jobs = {name: Job(worker, self._order("ask", name)) for name, worker in group.items()}
        self._work(jobs, "with cache", look)
        for name, job in jobs.items():
            assert job.done is not None
            beside = [other.prompt for other in jobs.values() if other is not job]
            self._answers[name] = Answer(name, job.worker.number, job.worker.pid, job.prompt, job.done, before, beside)
            self._finished.append(job.prompt)

    def _kill_amid(self, name: str, worker: WorkerProcess) -> None:
        job = Job(worker, self._order("ask", name), kill_after=KILL_AFTER_TOKENS)
        held: list[PageCount] = []

        def look(job: Job, event: dict[str, Any]) -> None:
            if event["event"] == "token" and job.said == KILL_AFTER_TOKENS:
                held.append(self.count("worker 2, just before its kill"))

        self._work({name: job}, "with cache", look)
        at_s = time.monotonic() - self._began
        if not job.killed:
            self._faults.append(f"request {name} was finished before its worker was killed")
            return
        what = f"worker {worker.number} (pid {worker.pid}) with SIGKILL after {job.said} tokens of its answer to {name}"
        self._kills.append(report.Kill(what, at_s))
        self._display.note(f"Killed: {what}")
        self._finished.append(job.prompt)  # its pages were committed before its first token came
        self._faults += verdict.kill_faults(held[0], self._count_when_returned())

    def _count_when_returned(self) -> PageCount:
        deadline = time.monotonic() + RETURN_TIMEOUT_S
        while True:
            count = self.count("after the kill")
            if (count.busy == 0 and count.sequences == 0) or time.monotonic() > deadline:
                return count
            self._counts.pop()
            time.sleep(0.01)

    def _work(self, jobs: dict[str, Job], what: str, look: OnEvent | None = None) -> None:
        labels = {id(job): f"{name} by worker {job.worker.number}, {what}" for name, job in jobs.items()}
        for label in labels.values():
            self._display.begin(label)

        def on_event(job: Job, event: dict[str, Any]) -> None:
            if event["event"] == "refused":
                raise BadInput(event["message"])
            self._display.show(labels[id(job)], job, event)
            if look is not None:
                look(job, event)

        self._crew.work(list(jobs.values()), on_event)

    def _order(self, verb: str, name: str) -> dict[str, Any]:
        return {verb: name, "question": self._task.questions[int(name) - 1], "endless": name in ENDLESS}
