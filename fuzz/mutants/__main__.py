"""``python -m fuzz.mutants [DIR] [--json] [--write]``: every mutant must be found by the suite's pure part.

Prints a line for each patch: the test that caught it and after how many seconds. Without a mutant the pure part must
pass, else nothing here means anything. Exits 1 if a mutant survived, 2 if a patch does not apply or there is none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from fuzz.mutants.patching import PATCHES, DoesNotApply, copy_tree, patches_in
from fuzz.mutants.report import write
from fuzz.mutants.trial import Trial, Way, try_none, try_one

ABOUT = "Apply each patch to a copy of the working tree and run the suite's pure part there, until it finds something."


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.mutants", description=ABOUT)
    parser.add_argument("patches", type=Path, nargs="?", default=PATCHES, help="a folder of *.patch, or one of them")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="so many at once (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longer is taken for a hang")
    parser.add_argument("--tests", nargs="+", default=(), metavar="FILE", help="only these files of the pure part")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--write", action="store_true", help="put the table into docs/testing.md")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        patches = patches_in(options.patches)
    except DoesNotApply as error:
        print(error, file=sys.stderr)
        return 2
    trials = []
    for trial in _all(patches, options.jobs, Way(options.timeout, tuple(options.tests))):
        trials.append(trial)
        print(json.dumps(asdict(trial)) if options.json else trial.line(), flush=True)
    if options.write:
        write(trials)
    bad = [trial for trial in trials if not trial.good]
    if not options.json:
        print(f"{len(trials) - len(bad)} of {len(trials)} as they should be, {time.monotonic() - started:.0f} s")
    if any(trial.outcome == "unusable" for trial in trials):
        return 2
    return 1 if bad else 0


def _all(patches: list[Path], jobs: int, way: Way) -> Iterator[Trial]:
    """The tree as it is first; if that fails, nothing else."""
    with tempfile.TemporaryDirectory(prefix="unmutated-") as folder, ThreadPoolExecutor(max(1, jobs)) as pool:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        control = try_none(tree, way)
        yield control
        if control.good:
            yield from map(Future.result, as_completed(pool.submit(try_one, patch, tree, way) for patch in patches))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
