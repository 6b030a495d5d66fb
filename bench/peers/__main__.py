"""``python -m bench.peers``: W3, W4 and W4b by radixkv's engine and by every peer, in one run, in turns.

Needs the standard library alone (radixkv's own worker runs in the environment of this command). Environments that are
missing are made first, which downloads about 1 GB once. Then every worker builds its state and stays; in each round
each does a slice of each work, so that whatever else the machine does hits all alike. A peer that fails is named and
left out. Each pair of peer and work has its verdict. Exit 1 unless all ran and radixkv was faster than each of them at
everything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.peers.recipes import OURS, PEERS, ROOT, Peer
from bench.peers.report import Figures, rows, table, verdict

SLICES = {"W3": (5, 60), "W4": (5, 60), "W4b": (10, 200)}
"""Admissions of one slice: unmeasured ones, to warm the caches that another worker has cooled, then measured ones."""


class PeerFailed(Exception):
    """A worker ended or never got ready."""


@dataclass
class Worker:
    """A peer's process, its state built."""

    process: subprocess.Popen[str]
    found: Figures

    def slice(self, work: str) -> None:
        warm, count = SLICES[work]
        assert self.process.stdin is not None
        print(work, warm, count, file=self.process.stdin, flush=True)
        measured = json.loads(_line(self.process, self.found.peer))
        self.found.rounds[work].append([nanoseconds / 1000 for nanoseconds in measured])


def close(process: subprocess.Popen[str]) -> None:
    """A worker ends when its input does, and it is waited for."""
    with process:
        assert process.stdin is not None
        process.stdin.close()


def _line(process: subprocess.Popen[str], peer: Peer) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise PeerFailed(f"{peer.name}: its process ended with {process.wait()} (its words are above)")
    return line


def start(peer: Peer) -> subprocess.Popen[str]:
    """The worker's process; it builds its state, which takes seconds, and then says so."""
    single_threaded = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        peer.command(), cwd=ROOT, env=single_threaded, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def wait_ready(peer: Peer, process: subprocess.Popen[str]) -> Worker:
    ready = json.loads(_line(process, peer))
    say(f"{peer.name} {ready['version']} is ready")
    return Worker(process, Figures(peer, ready["version"]))


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def with_environment(peers: Sequence[Peer]) -> list[Peer]:
    """Those peers whose environment is there, or could be made now."""
    broken = set()
    for environment in dict.fromkeys(peer.environment for peer in peers if peer.environment is not None):
        if not environment.ready():
            say(f"making {environment.folder} (once, some minutes)")
            try:
                environment.make()
            except (subprocess.CalledProcessError, OSError) as error:
                say(f"FAILED: {environment.folder}: {error}")
                broken.add(environment)
    return [peer for peer in peers if peer.environment not in broken]


def measure(workers: Sequence[Worker], rounds: int) -> None:
    for number in range(rounds):
        turn = number % max(1, len(workers))
        order = [*workers[turn:], *workers[:turn]]
        for work in SLICES:
            for worker in order:
                worker.slice(work)
        say(f"round {number + 1} of {rounds} is done")


def run(peers: Sequence[Peer], rounds: int, as_json: bool) -> bool:
    """Measure and print. True if all of it went as it should and radixkv was faster than each peer at everything."""
    processes = [(peer, start(peer)) for peer in with_environment(peers)]
    workers: list[Worker] = []
    try:
        for peer, process in processes:
            try:
                workers.append(wait_ready(peer, process))
            except PeerFailed as error:
                say(f"FAILED: {error}")
        measure(workers, rounds)
    finally:
        for _, process in processes:
            close(process)
    found = [worker.found for worker in workers]
    made = rows(found)
    print("\n".join(row.as_json() for row in made) if as_json else table(found))
    say(verdict(made))
    return len(workers) == len(peers) and all(row.ok for row in made)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="append", choices=[p.name for p in PEERS], help="only this one (repeatable)")
    parser.add_argument("--three", action="store_true", help="radixkv's admissions in three commands, not two")
    parser.add_argument("--json", action="store_true", help="one object a line instead of the table")
    arguments = parser.parse_args()
    chosen = [peer for peer in PEERS if not arguments.peer or peer.name in arguments.peer]
    if arguments.three:
        chosen = [replace(peer, arguments=("three",)) if peer.name == OURS else peer for peer in chosen]
    try:
        sys.exit(0 if run(chosen, arguments.rounds, arguments.json) else 1)
    except PeerFailed as error:
        sys.exit(f"FAILED: {error}")


if __name__ == "__main__":
    main()
