"""What grows with the pool: the time of a reserve among a million leaves, and resident memory a page and a node.

The memory figures are taken in fresh processes (``python -m bench.scale PART`` prints bytes), because a process that
has worked already has room in its heap that would hide what new pages take.
"""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench import workload
from bench.core import NAMESPACE, NOW, Core
from bench.rows import Row, row, single
from bench.stopwatch import quiet, summarize, time_each
from radixkv.allocator.page_states import Event, State
from radixkv.commands import Request

FEW, MANY = 1_000, 1_000_000
RATIO_BAR = 1.5
RESERVES = 4_000
CHUNK = 200

MEMORY_PAGES = 400_000
BYTES_BAR = {"page": 110.0, "node": 700.0}


def rows() -> Iterator[Row]:
    yield from reserve_rows()
    for part, bar in BYTES_BAR.items():
        command = [sys.executable, "-m", "bench.scale", part]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        yield single(f"index.bytes_per_{part}", "bytes", float(printed), bar)


# -- time ---------------------------------------------------------------------------------------------------------


def reserve_rows() -> Iterator[Row]:
    """A reserve of one page in a full pool, 1,000,000 one-page leaves against 1,000, in turns."""
    cores = {leaves: leafy(leaves) for leaves in (FEW, MANY)}
    source = workload.generator(8)
    times: dict[int, list[int]] = {leaves: [] for leaves in cores}
    with quiet():
        for chunk in range(-1, RESERVES // CHUNK):
            for leaves, core in cores.items():
                measured = reserve_chunk(core, source)
                if chunk >= 0:
                    times[leaves] += measured
    few, many = (summarize(times[leaves]).scaled(1e-3) for leaves in (FEW, MANY))
    yield row("index.reserve_full_1k_us", "us", few)
    yield row("index.reserve_full_1m_us", "us", many)
    p50, p99 = many.p50 / few.p50, many.p99 / few.p99
    yield Row("index.reserve_full_1m_over_1k", p50, "x", few.p50, RATIO_BAR, many.n, p50, p99)


def leafy(leaves: int) -> Core:
    """A core whose pool is full of one-page leaves that nobody holds.

    The first goes in by commands; the others by the moves that the engine makes of such commands, in a fraction of
    the time.
    """
    core = Core(leaves)
    source = workload.generator(7)
    core.admit(workload.fresh(source, workload.PAGE_SIZE).tobytes())
    pool = core.pool
    namespace = pool.namespaces.find(NAMESPACE)
    assert namespace is not None
    root, tree = namespace.root, pool.tree
    for tokens in pages_of_tokens(source, leaves - 1):
        page = pool.pages.take(1)
        pool.pages.move(page, State.PRIVATE, Event.PUBLISH)
        node = tree.grow(root, tokens, page.tobytes())
        pool.fallen_idle(tree.unpin(node, pool.next_stamp())[0], retired=False)
        pool.writes.clear()
    return core


def pages_of_tokens(source: np.random.Generator, count: int) -> Iterator[bytes]:
    at_once = 10_000
    for start in range(0, count, at_once):
        tokens = workload.fresh(source, at_once * workload.PAGE_SIZE).tobytes()
        size = len(tokens) // at_once
        for i in range(min(at_once, count - start)):
            yield tokens[i * size : (i + 1) * size]


def reserve_chunk(core: Core, source: np.random.Generator) -> list[int]:
    """Nanoseconds of ``CHUNK`` reserves of one page. Each page is committed and let go, so that the pool stays full."""
    admissions = [core.admission(tokens) for tokens in pages_of_tokens(source, CHUNK)]
    counters = core.pool.counters
    committed, evicted = counters["committed_pages"], counters["evicted_pages"]
    step = core.engine.step

    def reserves() -> Iterator[Request]:
        for reserve, free in admissions:
            yield reserve
            step(free, NOW)

    measured = time_each(lambda reserve: step(reserve, NOW), reserves())
    core.check(committed, CHUNK)
    if counters["evicted_pages"] - evicted != CHUNK:
        raise RuntimeError("every reserve in a full pool should evict one page")
    return measured


# -- memory -------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Anonymous resident memory of this process, free heap given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def bytes_per_page() -> float:
    """Full pool of long conversations (32,768 tokens, built in 16 turns): all that the engine holds, a page."""
    Core(FEW).admit(bytes(4 * workload.PAGE_SIZE))
    before = resident_bytes()
    core = Core(MEMORY_PAGES)
    source = workload.generator(9)
    turns = range(workload.TURN_TOKENS, workload.LONG_TOKENS + 1, workload.TURN_TOKENS)
    for _ in range(MEMORY_PAGES * workload.PAGE_SIZE // workload.LONG_TOKENS):
        tokens = workload.fresh(source, workload.LONG_TOKENS).tobytes()
        for length in turns:
            core.admit(tokens[: 4 * length])
    return (resident_bytes() - before) / core.pool.tree.cached_pages


def bytes_per_node() -> float:
    """Full pool of one-page leaves: all that the engine holds, a leaf. Its page is in it, and its share of the pool."""
    leafy(FEW)
    before = resident_bytes()
    core = leafy(MEMORY_PAGES)
    return (resident_bytes() - before) / core.pool.tree.nodes


if __name__ == "__main__":
    print({"page": bytes_per_page, "node": bytes_per_node}[sys.argv[1]]())
