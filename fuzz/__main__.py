"""``python -m fuzz list | smoke | canary | NAME [--seed N] [--steps M]``.

Exits 0 when nothing was found; 1 with invariant, seed and step when something was, when a rare event was met too
seldom to mean anything, or when a canary's bug was not found.
"""

from __future__ import annotations

import argparse
import sys
import time

from fuzz.canary import canary
from fuzz.registry import Failed, run, shrunk
from fuzz.smoke import smoke
from fuzz.targets.catalogue import FUZZERS

ABOUT = """Random steps against a model of what they should do. Exits 0 when nothing was found; 1 with invariant, seed
and step when something was, when a rare event was met too seldom to mean anything, or when a canary's bug was not
found."""

NAMES = """a fuzzer; or list: say which there are; smoke: run each of them shortly; canary: check that they find bugs
put in on purpose"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=ABOUT)
    parser.add_argument("name", choices=["list", "smoke", "canary", *FUZZERS], metavar="NAME", help=NAMES)
    seed = "a number; the same seed gives the same steps (default: %(default)s)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=seed)
    steps = "how many random steps one fuzzer takes; smoke has its own numbers (default: %(default)s)"
    parser.add_argument("--steps", type=int, default=10_000, metavar="M", help=steps)
    options = parser.parse_args(arguments)
    if options.name == "list":
        for fuzzer in FUZZERS.values():
            print(f"{fuzzer.name:<12}{fuzzer.about}")
        return 0
    if options.name == "smoke":
        return 0 if smoke(options.seed) else 1
    if options.name == "canary":
        return 0 if canary() else 1
    started = time.monotonic()
    try:
        report = run(FUZZERS[options.name], options.seed, options.steps)
    except Failed as failed:
        print(failed, shrunk(FUZZERS[options.name], failed), sep="\n", file=sys.stderr)
        return 1
    events = ", ".join(f"{name} {count}" for name, count in sorted(report.events.items()))
    print(f"{options.name}: {report.steps} steps in {time.monotonic() - started:.1f} s; {events}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
