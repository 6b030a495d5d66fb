"""``python -m bench.mortals ENDPOINT``: workers to be killed by ``bench.deaths``.

Each is a process of its own, forked from this one before any client is open, with what a worker needs and nothing else:
no torch. A line on stdin, a number, asks for a set of them; when all of them hold what they are to hold, their process
ids are printed as one line of JSON. They are one process group, whose id is the first of them. They end with this
process, and that ends with its stdin.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from typing import NoReturn

import numpy as np

import radixkv.client.sync

WORKERS = 64
SEQUENCES, SEQUENCE_PAGES, PAGE_SIZE = 8, 196, 16
WORKER_PAGES = SEQUENCES * SEQUENCE_PAGES
"""Half of each sequence is committed, and so pinned, and half is private. 64 workers: 100,352 pages."""

NAMESPACE = radixkv.Namespace("bench")
PATIENCE_S = 30.0
_PR_SET_PDEATHSIG = 1


def main(endpoint: str) -> None:
    gc.collect()
    gc.freeze()  # a child that looked for garbage would write to, and so copy, all that it shares with this process
    pids: list[int] = []
    for line in sys.stdin:
        for pid in pids:
            os.waitpid(pid, 0)
        pids = bring_up(endpoint, int(line))
        print(json.dumps(pids), flush=True)


def bring_up(endpoint: str, number: int) -> list[int]:
    """Process ids of the ``number``-th set, in one process group. Ends the process if they do not come up."""
    holding, holds = os.pipe()
    pids: list[int] = []
    for worker in range(number * WORKERS, (number + 1) * WORKERS):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            os.close(holding)
            live(endpoint, worker, holds)
        if not pids:
            os.setpgid(pid, pid)
        pids.append(pid)
    os.close(holds)
    count = 0
    while said := os.read(holding, WORKERS):
        count += len(said)
    os.close(holding)
    if count != WORKERS:
        sys.exit(f"only {count} of {WORKERS} workers got what they were to hold")
    return pids


def live(endpoint: str, worker: int, holds: int) -> NoReturn:
    """Take up sequences, say so, wait to be killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pool = radixkv.connect(endpoint, timeout=PATIENCE_S).pool()
    held = []
    for sequence in range(worker * SEQUENCES, (worker + 1) * SEQUENCES):
        tokens = np.arange(SEQUENCE_PAGES * PAGE_SIZE, dtype=np.uint32)
        tokens[0] += len(tokens) + sequence  # no two begin with the same page: none finds anything cached
        held.append(pool.reserve(tokens, namespace=NAMESPACE))
        held[-1].commit(len(tokens) // 2)
    os.write(holds, b"1")
    os.close(holds)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
