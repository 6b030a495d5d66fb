"""``python -m bench.daemon``: what a daemon costs: to start, idle, and after a SIGKILL. See docs/performance.md."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import radixkv
from bench.rows import Row, report, row, single
from bench.serving import serving
from bench.stopwatch import process_cpu_s, summarize
from bench.workload import PAGE_SIZE, fresh, generator

NAMESPACE = radixkv.Namespace(model="bench")
STARTS = 5
IDLE_S = 11.0
"""Two heartbeats of a connected client are in it."""

RECOVERIES = 5
RECOVERED_PAGES, SEQUENCE_PAGES = 100_000, 250
RECOVERY_POOL = "name=default,layers=1,kv_heads=1,head_dim=8,dtype=float16,page_size=16,pages="
DEVICE_ALONE, BOTH_TIERS = f"{RECOVERY_POOL}131072", f"{RECOVERY_POOL}{RECOVERED_PAGES},host_pages=131072"

IDLE_BAR_PERCENT, RSS_BAR_MB, START_BAR_S, RECOVER_BAR_S = 1.0, 80.0, 1.0, 1.0


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
    for name, pool, pages in (
        ("daemon.recover_s", DEVICE_ALONE, RECOVERED_PAGES),
        ("daemon.recover_tiers_s", BOTH_TIERS, 2 * RECOVERED_PAGES),
    ):
        yield row(name, "s", summarize(list(recoveries(pool, pages))), RECOVER_BAR_S, reference=median(starts))


def recoveries(memory: str, pages: int) -> Iterator[float]:
    """Seconds from SIGKILL to the first hit that the next daemon serves, connecting and mapping included.

    ``pages`` are cached; those that the device has no room for are in the host tier.
    """
    source = generator(7)
    prompts = [fresh(source, SEQUENCE_PAGES * PAGE_SIZE) for _ in range(pages // SEQUENCE_PAGES)]
    with serving(["--supervised", "--pool", memory]) as daemon:
        with radixkv.connect(daemon.endpoint) as client:
            pool = client.pool("default")
            for prompt in prompts:
                with pool.reserve(prompt, namespace=NAMESPACE) as seq:
                    seq.commit(len(prompt))
            there = client.stats().pools["default"]
            if there.pages["cached"] + there.host_only_pages != pages:
                raise RuntimeError(f"{pages} pages were to be cached: {there}")
        for prompt in prompts[-RECOVERIES:]:
            begin = time.monotonic()
            os.kill(daemon.pid, signal.SIGKILL)
            with radixkv.connect(daemon.endpoint, timeout=60.0) as client:
                with client.pool("default").reserve(prompt, namespace=NAMESPACE) as seq:
                    found = client.pool("default").lookup([prompts[0]], namespace=NAMESPACE)[0]
                    whole = found.device_tokens + found.host_tokens == len(prompts[0])
                    if seq.cached_tokens != len(prompt) - 1 or not whole:
                        raise RuntimeError(f"{seq.cached_tokens} of {len(prompt)} tokens were found, and {found}")
                yield time.monotonic() - begin
            daemon = daemon.next()  # noqa: PLW2901 - the one that goes on


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
