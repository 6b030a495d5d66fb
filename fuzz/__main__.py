"""``python -m fuzz list | smoke | canary | NAME [--seed N] [--steps M]``.

Exits 0 when nothing was found; 1 with invariant, seed and step when something was, when a rare event was met too
seldom to mean anything, or when a canary's bug was not found.
"""

from __future__ import annotations

import argparse
import sys
import time

from fuzz.canary import canary
from fuzz.registry import Failed, run
from fuzz.smoke import smoke
from fuzz.targets.catalogue import FUZZERS


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("name", choices=["list", "smoke", "canary", *FUZZERS], metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10_000)
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
        print(failed, file=sys.stderr)
        return 1
    events = ", ".join(f"{name} {count}" for name, count in sorted(report.events.items()))
    print(f"{options.name}: {report.steps} steps in {time.monotonic() - started:.1f} s; {events}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
