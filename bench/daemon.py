"""``python -m bench.daemon``: what an idle daemon costs: CPU, memory, time to start. See docs/performance.md."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import radixkv
from bench.rows import Row, report, row, single
from bench.serving import serving
from bench.stopwatch import process_cpu_s, summarize

STARTS = 5
IDLE_S = 11.0
"""Two heartbeats of a connected client are in it."""

IDLE_BAR_PERCENT, RSS_BAR_MB, START_BAR_S = 1.0, 80.0, 1.0


def main() -> None:
    report(rows(), sys.argv[1:])


def rows() -> Iterator[Row]:
    """Of ``radixkv serve`` as it comes: one pool of 512 MiB."""
    starts = []
    for _ in range(STARTS):
        with serving() as daemon:
            starts.append(daemon.start_s)
    yield row("daemon.start_s", "s", summarize(starts), START_BAR_S)
    with serving() as daemon:
        client = radixkv.connect(daemon.endpoint)
        client.pool("default")
        yield single("daemon.idle_cpu_percent", "%", idle_cpu_percent(daemon.pid), IDLE_BAR_PERCENT)
        yield single("daemon.rss_mb", "MB", resident_bytes(daemon.pid) / 1e6, RSS_BAR_MB)
        client.close()


def idle_cpu_percent(pid: int) -> float:
    cpu, wall = process_cpu_s(pid), time.monotonic()
    time.sleep(IDLE_S)
    return 100 * (process_cpu_s(pid) - cpu) / (time.monotonic() - wall)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages included, as ``ps`` shows it."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
