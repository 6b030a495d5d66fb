"""``python -m fuzz.kernels [--seed N] [--count M]``: random problems of all kernels.

Attention, by the torch reference and in Triton's interpreter by the Triton kernels, against its definition; every third
one a problem of the kernels that write, Triton's against torch's. A process of its own: whether Triton interprets is
settled when it is imported. Exits 1 at the first difference; the seed it names makes the same problem again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.kernels.dispatch import Impl

IMPLEMENTATIONS: tuple[Impl, Impl] = ("torch", "triton")


def difference(seed: int) -> tuple[str, str]:
    """(the kind of the problem of this seed, what differs; empty if nothing does)."""
    from bench.kernel_cases import assert_near
    from bench.kernel_problems import Problem
    from bench.write_problems import WriteProblem

    if seed % 3 == 2:
        writes = WriteProblem.of(seed)
        try:
            writes.check(IMPLEMENTATIONS)
        except AssertionError as error:
            return writes.kind, f"torch and triton differ: {writes}\n{error}"
        return writes.kind, ""
    problem = Problem.of(seed)
    wanted = problem.wanted()
    for impl in IMPLEMENTATIONS:
        try:
            assert_near(problem.got(impl), wanted, problem.shape.dtype)
        except AssertionError as error:
            return problem.kind, f"{impl} differs: {problem}\n{error}"
    return problem.kind, ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.kernels", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first problem (default: 0)")
    parser.add_argument("--count", type=int, default=60, metavar="M", help="problems (default: 60)")
    options = parser.parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "1"
    started = time.monotonic()
    kinds: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        kind, what = difference(seed)
        if what:
            print(f"{what}\n  again: python -m fuzz.kernels --seed {seed} --count 1", file=sys.stderr)
            return 1
        kinds[kind] += 1
    met = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    print(f"kernels: {options.count} problems in {time.monotonic() - started:.1f} s; {met}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
