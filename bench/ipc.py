"""``python -m bench.ipc``: what a request costs the daemon beyond a bare echo of its bytes. See docs/performance.md.

A client reserves a fully cached prompt and frees it; an echo process gets and sends messages of the same sizes. Both go
in turns in one run, all on one CPU; CPU time is what the processes' own clocks say, all threads, ZeroMQ's too.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zmq

import radixkv
from bench import workload
from bench.rows import Row, report, row
from bench.serving import SMALL_POOL, serving
from bench.stopwatch import one_cpu, process_cpu_ns, quiet, summarize
from radixkv.commands import Free, Request, Reserve, Reserved, Step, Stepped
from radixkv.ipc import wire

LENGTHS = {2_048: 120.0, 32_768: 180.0}
"""Prompt tokens, and the bar on the daemon's own CPU time in us."""

PROMPTS = 8
ROUNDS = 40
PAIRS = 50
WARM_ROUNDS = 3


def main() -> None:
    report(rows(), sys.argv[1:])


def rows() -> Iterator[Row]:
    with one_cpu(), serving(["--pool", SMALL_POOL]) as daemon:
        client = radixkv.connect(daemon.endpoint)
        pool = client.pool("default")
        namespace = radixkv.Namespace(model="bench")
        for tokens, bar in LENGTHS.items():
            yield from compare(daemon.pid, pool, namespace, tokens, bar)
        client.close()


@dataclass
class Turns:
    """One side's figures, one entry a round: us a pair of requests."""

    cpu_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)

    def take(self, pid: int, work: Callable[[int], None]) -> None:
        cpu, wall = process_cpu_ns(pid), time.perf_counter_ns()
        for i in range(PAIRS):
            work(i)
        wall = time.perf_counter_ns() - wall
        self.cpu_us.append((process_cpu_ns(pid) - cpu) / 1000 / PAIRS)
        self.wall_us.append(wall / 1000 / PAIRS)


def compare(pid: int, pool: radixkv.Pool, namespace: radixkv.Namespace, tokens: int, bar: float) -> Iterator[Row]:
    source = workload.generator(11)
    prompts = [workload.fresh(source, tokens) for _ in range(PROMPTS)]
    for prompt in prompts:
        with pool.reserve(prompt, namespace=namespace) as seq:
            seq.commit(tokens)
    table = check_cached(pool, namespace, prompts[0])

    def ask(i: int) -> None:
        pool.reserve(prompts[i % PROMPTS], namespace=namespace).free()

    ours, bare = Turns(), Turns()
    with echoing(tokens, table) as (echo_pid, echo), quiet():
        for number in range(WARM_ROUNDS + ROUNDS):
            ours.take(pid, ask)
            bare.take(echo_pid, echo)
            if number < WARM_ROUNDS:
                ours, bare = Turns(), Turns()
    cpu = summarize(a - b for a, b in zip(ours.cpu_us, bare.cpu_us, strict=True))
    yield row(f"ipc.cpu_us_{tokens}", "us", cpu, bar, summarize(bare.cpu_us).p50)
    wall = summarize(a / b for a, b in zip(ours.wall_us, bare.wall_us, strict=True))
    yield row(f"ipc.wall_us_{tokens}", "us", summarize(ours.wall_us), None, summarize(bare.wall_us).p50)
    yield row(f"ipc.wall_ratio_{tokens}", "x", wall)


def check_cached(pool: radixkv.Pool, namespace: radixkv.Namespace, prompt: workload.Tokens) -> bytes:
    """The page table of a prompt that must be cached but for its last token."""
    with pool.reserve(prompt, namespace=namespace) as seq:
        if seq.cached_tokens != len(prompt) - 1:
            raise RuntimeError(f"{seq.cached_tokens} of {len(prompt)} tokens are cached")
        return np.asarray(seq.page_table).tobytes()


# -- the echo -----------------------------------------------------------------------------------------------------


@contextmanager
def echoing(tokens: int, table: bytes) -> Iterator[tuple[int, Callable[[int], None]]]:
    """The echo's pid and a function that sends it a reserve's and a free's bytes and waits for as many as they get."""
    requests = request_frames(tokens)
    replies = reply_frames(table)
    with tempfile.TemporaryDirectory(prefix="radixkv-bench-") as folder:
        endpoint = f"ipc://{Path(folder, 'echo.sock')}"
        sizes = [len(requests[1]), *map(len, replies)]
        command = [sys.executable, "-m", "bench.echo", endpoint, *map(str, sizes)]
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                socket.connect(endpoint)

                def pair(_: int) -> None:
                    for request in requests:
                        socket.send(request)
                        socket.recv()

                yield process.pid, pair
            finally:
                socket.close(0)
                context.term()
                process.terminate()


def request_frames(tokens: int) -> list[bytes]:
    """A reserve and a free as they travel, with ids of the length they have after a while."""
    canonical = radixkv.Namespace(model="bench").canonical
    bodies = (Reserve("default", 10_000, canonical, bytes(4 * tokens)), Step(free=[Free(10_000)]))
    return [wire.encode_request(Request(1, 1, 10_000, time.monotonic(), body)) for body in bodies]


def reply_frames(table: bytes) -> list[bytes]:
    bodies = (Reserved(table, 2_047, 2_032, [(1_000, 1_001, 15)]), Stepped(free=[None]))
    return [wire.encode_reply(10_000, body) for body in bodies]


if __name__ == "__main__":
    main()
