"""``python -m bench.ipc``: what a request costs the daemon beyond a bare echo of its bytes. See docs/performance.md.

A client reserves a fully cached prompt and frees it; an echo process gets and sends messages of the same sizes. Both go
in turns in one run, both servers on one CPU, the client on another; CPU time is what the processes' own clocks say, all
threads, ZeroMQ's too.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import zmq

import radixkv
from bench import workload
from bench.rows import Row, report, row
from bench.serving import SMALL_POOL, serving
from bench.stopwatch import on_cpu, process_cpu_ns, quiet, summarize, two_cpus
from radixkv.commands import Free, Request, Reserve, Reserved, Step, Stepped
from radixkv.ipc import wire
from radixkv.types import PAGE_ID_BYTES

LENGTHS = {2_048: 120.0, 32_768: 180.0}
"""Prompt tokens, and the bar on the daemon's own CPU time in us."""

NAMESPACE = radixkv.Namespace(model="bench")
PROMPTS = 8
ROUNDS = 100
PAIRS = 50
WARM_ROUNDS = 3


def main() -> None:
    report(rows(), sys.argv[1:])


def rows() -> Iterator[Row]:
    server_cpu, client_cpu = two_cpus()
    with ExitStack() as stack:
        with on_cpu(server_cpu):
            daemon = stack.enter_context(serving(["--pool", SMALL_POOL]))
            echoes = {tokens: stack.enter_context(echoing(tokens)) for tokens in LENGTHS}
        stack.enter_context(on_cpu(client_cpu))
        client = stack.enter_context(radixkv.connect(daemon.endpoint))
        pool = client.pool("default")
        for tokens, bar in LENGTHS.items():
            ours = Server(daemon.pid, reserve_and_free(pool, tokens))
            bare = Server(echoes[tokens].pid, stack.enter_context(echoed(echoes[tokens].endpoint, tokens)))
            yield from compare(ours, bare, tokens, bar)


@dataclass
class Server:
    """``ask(i)`` sends the i-th pair of requests and waits for both answers. The figures: us a pair, one a round."""

    pid: int
    ask: Callable[[int], None]
    cpu_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)

    def take_turn(self) -> None:
        cpu, wall = process_cpu_ns(self.pid), time.perf_counter_ns()
        for i in range(PAIRS):
            self.ask(i)
        wall = time.perf_counter_ns() - wall
        self.cpu_us.append((process_cpu_ns(self.pid) - cpu) / 1000 / PAIRS)
        self.wall_us.append(wall / 1000 / PAIRS)


def compare(ours: Server, bare: Server, tokens: int, bar: float) -> Iterator[Row]:
    with quiet():
        for _ in range(WARM_ROUNDS + ROUNDS):
            ours.take_turn()
            bare.take_turn()
    cpu = [(a, b) for a, b in zip(ours.cpu_us, bare.cpu_us, strict=True)][WARM_ROUNDS:]
    wall = [(a, b) for a, b in zip(ours.wall_us, bare.wall_us, strict=True)][WARM_ROUNDS:]
    bare_cpu, bare_wall = (summarize(b for _, b in pairs).p50 for pairs in (cpu, wall))
    yield row(f"ipc.cpu_us_{tokens}", "us", summarize(a - b for a, b in cpu), bar, bare_cpu)
    yield row(f"ipc.wall_us_{tokens}", "us", summarize(a for a, _ in wall), None, bare_wall)
    yield row(f"ipc.wall_ratio_{tokens}", "x", summarize(a / b for a, b in wall))


def reserve_and_free(pool: radixkv.Pool, tokens: int) -> Callable[[int], None]:
    """What a worker does with one of ``PROMPTS`` fully cached prompts."""
    source = workload.generator(11)
    prompts = [workload.fresh(source, tokens) for _ in range(PROMPTS)]
    for prompt in prompts:
        with pool.reserve(prompt, namespace=NAMESPACE) as seq:
            seq.commit(tokens)
    for prompt in prompts:
        with pool.reserve(prompt, namespace=NAMESPACE) as seq:
            if seq.cached_tokens != tokens - 1:
                raise RuntimeError(f"{seq.cached_tokens} of {tokens} tokens are cached")

    def ask(i: int) -> None:
        pool.reserve(prompts[i % PROMPTS], namespace=NAMESPACE).free()

    return ask


# -- the echo -----------------------------------------------------------------------------------------------------


class Echo(NamedTuple):
    pid: int
    endpoint: str


@contextmanager
def echoing(tokens: int) -> Iterator[Echo]:
    """A process that answers frames of a reserve's and a free's size with as many bytes as their replies have."""
    requests, replies = request_frames(tokens), reply_frames(tokens)
    with tempfile.TemporaryDirectory(prefix="radixkv-bench-") as folder:
        endpoint = f"ipc://{Path(folder, 'echo.sock')}"
        sizes = [len(requests[1]), *map(len, replies)]
        command = [sys.executable, "-m", "bench.echo", endpoint, *map(str, sizes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                yield Echo(process.pid, endpoint)
            finally:
                process.terminate()


@contextmanager
def echoed(endpoint: str, tokens: int) -> Iterator[Callable[[int], None]]:
    requests = request_frames(tokens)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)

        def ask(_: int) -> None:
            for request in requests:
                socket.send(request)
                socket.recv()

        yield ask


def request_frames(tokens: int) -> list[bytes]:
    """A reserve and a free as they travel, with ids of the length they have after a while."""
    bodies = (Reserve("default", 10_000, NAMESPACE.canonical, bytes(4 * tokens)), Step(free=[Free(10_000)]))
    return [wire.encode_request(Request(2**61, 1, 10_000, time.monotonic(), body)) for body in bodies]


def reply_frames(tokens: int) -> list[bytes]:
    table = bytes(tokens // workload.PAGE_SIZE * PAGE_ID_BYTES)
    bodies = (Reserved(table, 2_047, 2_032, [(1_000, 1_001, 15)]), Stepped(free=[None]))
    return [wire.encode_reply(10_000, body) for body in bodies]


if __name__ == "__main__":
    main()
