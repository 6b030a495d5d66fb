"""``python -m bench.gpu``: every kernel checked against the reference on a CUDA device, then attention timed.

Needs torch and Triton alone. Without a CUDA device it says so and ends well. Exit 1 if a check fails. The rows are
explained in docs/kernels.md. ``--json``: one object a line.
"""

from __future__ import annotations

import sys

import torch

from bench.gpu_checks import CHECKS
from bench.gpu_times import timings
from bench.rows import report


def failures(device: str) -> list[str]:
    """Names of the checks that fail; each is run, so that one visit to a GPU tells everything."""
    failed = []
    for check in CHECKS:
        name = check.__name__.removeprefix("check_")
        try:
            check(device, False)
            torch.cuda.synchronize()
        except (AssertionError, RuntimeError) as error:
            failed.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            print(f"ok {name}", file=sys.stderr, flush=True)
    return failed


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: no CUDA device", file=sys.stderr)
        return
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", file=sys.stderr)
    failed = failures("cuda")
    report(timings("cuda"), sys.argv[1:])
    if failed:
        sys.exit(f"{len(failed)} of {len(CHECKS)} checks failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
