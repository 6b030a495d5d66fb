"""One peer in its own process: builds its state, then does admissions as it is told and says how long each took.

Line by line on stdin and stdout::

    -> {"event": "ready", "version": "0.5.23"}
    <- W3 5 100                    5 admissions unmeasured, then 100 measured
    -> [21043, 20984, ...]         nanoseconds each

End of input ends the process. Whatever the peer itself prints goes to stderr. Once built, the process stays on one CPU:
Dynamo's tree works in a thread of its own, and to hand over to a thread on another CPU costs three times the work.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from bench.stopwatch import quiet, time_each


class Work(NamedTuple):
    """``admit`` is timed; ``requests`` makes its arguments, already in the peer's favourite type, without end."""

    admit: Callable[[Any], object]
    requests: Iterator[Any]


def serve(version: str, build: Callable[[], dict[str, Work]]) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    works = build()
    stay_on_one_cpu()
    print(json.dumps({"event": "ready", "version": version}), file=answers)
    for line in sys.stdin:
        name, warm, count = line.split()
        print(json.dumps(_slice(works[name], int(warm), int(count))), file=answers)


def stay_on_one_cpu() -> None:
    """All threads of this process."""
    cpu = max(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cpu})


def _slice(work: Work, warm: int, count: int) -> list[int]:
    first = list(islice(work.requests, warm))
    timed = list(islice(work.requests, count))
    if len(timed) < count:
        raise ValueError(f"the work has only {len(timed)} of {count} requests left")
    with quiet():
        time_each(work.admit, first)
        return time_each(work.admit, timed)
