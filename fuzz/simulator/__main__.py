"""``python -m fuzz.simulator KEY [--steps N] [--workers N] [--without FAULT,...] [--shrink]``: one world again, told.

Exits 0 when nothing was found, 1 with what led to it otherwise.
"""

from __future__ import annotations

import argparse
import sys

from fuzz.simulator import shrink
from fuzz.simulator.odds import FAULTS
from fuzz.simulator.stage import HABITS, TIERS, Setup


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.simulator", description="One simulated world again, told.")
    parser.add_argument("key", metavar="KEY", help="what seeds all of its randomness")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="how many at once (default: drawn)")
    parser.add_argument("--without", default="", metavar="NAMES", help=f"of {', '.join((*FAULTS, *HABITS, TIERS))}")
    parser.add_argument("--events", type=int, default=100, metavar="N", help="how many of the last to print")
    parser.add_argument("--shrink", action="store_true", help="look for a smaller one that fails as well")
    options = parser.parse_args(arguments)
    off = frozenset(filter(None, options.without.split(",")))
    setup = Setup(options.key, options.workers, off)
    found = shrink.run(setup, options.steps)
    if found is None:
        print(f"nothing found in {options.steps} steps")
        return 0
    print(shrink.report(shrink.shrink(found) if options.shrink else found, options.events))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
