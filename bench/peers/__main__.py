"""``python -m bench.peers``: W3, W4 and W4b by radixkv's engine and by every peer, in one run, in turns.

Needs the standard library alone (radixkv's own worker runs in the environment of this command). Environments that are
missing are made first, which downloads about 1 GB once. Then every worker builds its state and stays; in each round
each does a slice of each work, so that whatever else the machine does hits all alike. Each pair of peer and work has
its verdict. Exit 1 unless all ran and radixkv was faster than each of them at everything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.peers.recipes import OURS, PEERS, ROOT, Peer
from bench.rows import Row
from bench.stopwatch import Summary, summarize

SLICES = {"W3": (5, 60), "W4": (5, 60), "W4b": (10, 200)}
"""Admissions of one slice: unmeasured ones, to warm the caches that another worker has cooled, then measured ones."""


class PeerFailed(Exception):
    """A worker ended or never got ready."""


@dataclass
class Worker:
    """A peer's process and what it has measured: per work, microseconds per round."""

    peer: Peer
    process: subprocess.Popen[str]
    version: str
    rounds: dict[str, list[list[float]]] = field(default_factory=lambda: {work: [] for work in SLICES})

    def slice(self, work: str) -> None:
        warm, count = SLICES[work]
        assert self.process.stdin is not None
        print(work, warm, count, file=self.process.stdin, flush=True)
        self.rounds[work].append([nanoseconds / 1000 for nanoseconds in json.loads(_line(self.process, self.peer))])

    def summary(self, work: str) -> Summary:
        return summarize(us for measured in self.rounds[work] for us in measured)

    def medians(self, work: str) -> list[float]:
        return [summarize(measured).p50 for measured in self.rounds[work]]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def _line(process: subprocess.Popen[str], peer: Peer) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise PeerFailed(f"{peer.name}: its process ended with {process.wait()} (its words are above)")
    return line


def start(peer: Peer) -> Worker:
    """The worker of a peer, its state built."""
    single_threaded = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    process = subprocess.Popen(
        peer.command(), cwd=ROOT, env=single_threaded, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    ready = json.loads(_line(process, peer))
    say(f"{peer.name} {ready['version']} is ready")
    return Worker(peer, process, ready["version"])


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def make_environments(peers: Sequence[Peer]) -> None:
    for environment in dict.fromkeys(peer.environment for peer in peers if peer.environment is not None):
        if not environment.ready():
            say(f"making {environment.folder} (once, some minutes)")
            environment.make()


def measure(workers: Sequence[Worker], rounds: int) -> None:
    for number in range(rounds):
        turn = number % len(workers)
        order = [*workers[turn:], *workers[:turn]]
        for work in SLICES:
            for worker in order:
                worker.slice(work)
        say(f"round {number + 1} of {rounds} is done")


def rows(workers: Sequence[Worker]) -> list[Row]:
    """Each one's median; and for each peer how much of its time radixkv takes, which should be less than all.

    The latter is of all rounds; its p50 and p99 are the median and the least favourable round.
    """
    made = []
    for work in SLICES:
        for worker in workers:
            found = worker.summary(work)
            made.append(Row(_row_name(work, worker), found.p50, "us", 0.0, None, found.n, found.p50, found.p99))
    ours, others = _apart(workers)
    if ours is None:
        return made
    for work in SLICES:
        for worker in others:
            theirs, ratios = worker.summary(work).p50, sorted(_ratios(work, ours, worker))
            name = f"{_row_name(work, ours)}_over_{worker.peer.slug}"
            value = ours.summary(work).p50 / theirs
            made.append(Row(name, value, "x", theirs, 1.0, len(ratios), summarize(ratios).p50, ratios[-1]))
    return made


def _row_name(work: str, worker: Worker) -> str:
    return f"peers.{work}.{worker.peer.slug}"


def _apart(workers: Sequence[Worker]) -> tuple[Worker | None, list[Worker]]:
    others = [worker for worker in workers if worker.peer.name != OURS]
    return next((worker for worker in workers if worker.peer.name == OURS), None), others


def _ratios(work: str, ours: Worker, theirs: Worker) -> list[float]:
    """radixkv's median by the other's, a round each."""
    return [a / b for a, b in zip(ours.medians(work), theirs.medians(work), strict=True)]


def table(workers: Sequence[Worker]) -> str:
    """Medians in us; in brackets how many times radixkv's that is: over all rounds, and in the least favourable one."""
    ours, _ = _apart(workers)
    lines = [
        "us an admission, median (times radixkv's: all rounds, least favourable round; LOST: radixkv is slower)",
        "",
    ]
    lines.append(f"{'':22s}" + "".join(f"{work:>30s}" for work in SLICES))
    for worker in workers:
        cells = "".join(f"{_cell(work, ours, worker):>30s}" for work in SLICES)
        lines.append(f"{worker.peer.name + ' ' + worker.version:22s}{cells}")
    lines += ["", "timed:", *(f"  {worker.peer.name:14s}{worker.peer.timed}" for worker in workers)]
    return "\n".join(lines)


def _cell(work: str, ours: Worker | None, worker: Worker) -> str:
    median = worker.summary(work).p50
    if ours is None or worker is ours:
        return f"{median:,.1f}"
    times = median / ours.summary(work).p50
    lost = " LOST" if times < 1 else ""
    return f"{median:,.1f} ({times:.1f}x, {1 / max(_ratios(work, ours, worker)):.1f}x){lost}"


def run(peers: Sequence[Peer], rounds: int, as_json: bool) -> bool:
    """Measure and print. True if all of it went as it should and radixkv was the fastest at everything."""
    make_environments(peers)
    workers: list[Worker] = []
    failed = False
    try:
        for peer in peers:
            try:
                workers.append(start(peer))
            except PeerFailed as error:
                say(f"FAILED: {error}")
                failed = True
        measure(workers, rounds)
    finally:
        for worker in workers:
            worker.close()
    made = rows(workers)
    print("\n".join(row.as_json() for row in made) if as_json else table(workers))
    return not failed and all(row.ok for row in made)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="append", choices=[p.name for p in PEERS], help="only this one (repeatable)")
    parser.add_argument("--json", action="store_true", help="one object a line instead of the table")
    arguments = parser.parse_args()
    chosen = [peer for peer in PEERS if not arguments.peer or peer.name in arguments.peer]
    sys.exit(0 if run(chosen, arguments.rounds, arguments.json) else 1)


if __name__ == "__main__":
    main()
