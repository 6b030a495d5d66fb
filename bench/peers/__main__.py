"""``python -m bench.peers``: W3, W4 and W4b by radixkv's engine and by every peer, in one run, in turns.

Needs the standard library alone (radixkv's own worker runs in the environment of this command). Environments that are
missing are made first, which downloads about 1 GB once. Then every worker builds its state and stays; in each round
each does a slice of each work, so that whatever else the machine does hits all alike. Exit 1 unless all ran and radixkv
was faster than each of them.
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
    """A row a peer and work: its median beside ours; ``bar`` for ours is the fastest peer's median."""
    made = []
    ours = next((worker for worker in workers if worker.peer.name == OURS), None)
    for work in SLICES:
        fastest = min((w.summary(work).p50 for w in workers if w is not ours), default=None)
        for worker in workers:
            found = worker.summary(work)
            name = f"peers.{work}.{worker.peer.name.replace(' ', '_')}"
            bar = fastest if worker is ours else None
            reference = 0.0 if ours is None or worker is ours else ours.summary(work).p50
            made.append(Row(name, found.p50, "us", reference, bar, found.n, found.p50, found.p99))
    return made


def table(workers: Sequence[Worker]) -> str:
    """Medians in us; in brackets how often ours fits into it: over all, and in the worst round."""
    ours = next((worker for worker in workers if worker.peer.name == OURS), None)
    lines = ["us an admission, median (times radixkv's: all rounds, least favourable round)", ""]
    lines.append(f"{'peer':26s}" + "".join(f"{work:>27s}" for work in SLICES))
    for worker in workers:
        cells = ""
        for work in SLICES:
            median = worker.summary(work).p50
            cell = f"{median:,.1f}"
            if ours is not None and worker is not ours:
                ratios = [a / b for a, b in zip(worker.medians(work), ours.medians(work), strict=True)]
                cell += f" ({median / ours.summary(work).p50:.1f}x, {min(ratios):.1f}x)"
            cells += f"{cell:>27s}"
        lines.append(f"{worker.peer.name + ' ' + worker.version:26s}{cells}")
    return "\n".join(lines)


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
