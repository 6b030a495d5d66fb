"""``python -m bench.mortals ENDPOINT``: workers to be killed by ``bench.deaths``.

Each is a process of its own, forked from this one before any client is open. When all of them hold what they are to
hold, their process ids are printed as one line of JSON. They end with this process, and that ends with its stdin.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import NoReturn

import radixkv.client.sync
from bench import workload

WORKERS = 64
SEQUENCES, SEQUENCE_PAGES = 8, 196
WORKER_PAGES = SEQUENCES * SEQUENCE_PAGES
"""Half of each sequence is committed, and so pinned, and half is private. 64 workers: 100,352 pages."""

NAMESPACE = radixkv.Namespace("bench")
PATIENCE_S = 30.0
_PR_SET_PDEATHSIG = 1


def main(endpoint: str, seed: int) -> None:
    holding, holds = os.pipe()
    pids = []
    for number in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            live(endpoint, seed * WORKERS + number, holds)
        pids.append(pid)
    os.close(holds)
    count = 0
    while said := os.read(holding, WORKERS):
        count += len(said)
    if count != WORKERS:
        sys.exit(f"only {count} of {WORKERS} workers got what they were to hold")
    print(json.dumps(pids), flush=True)
    sys.stdin.read()


def live(endpoint: str, seed: int, holds: int) -> NoReturn:
    """Take up sequences, say so, wait to be killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    source = workload.generator(seed)
    pool = radixkv.connect(endpoint, timeout=PATIENCE_S).pool()
    held = []
    for _ in range(SEQUENCES):
        tokens = workload.fresh(source, SEQUENCE_PAGES * workload.PAGE_SIZE)
        held.append(pool.reserve(tokens, namespace=NAMESPACE))
        held[-1].commit(len(tokens) // 2)
    os.write(holds, b"1")
    os.close(holds)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
