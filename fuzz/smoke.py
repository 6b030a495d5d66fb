"""All fuzzers shortly. Passing without having met the rare events would say nothing, so they are counted."""

from __future__ import annotations

import time

from fuzz.registry import Failed, run, shrunk
from fuzz.targets.catalogue import FUZZERS


def smoke(seed: int) -> bool:
    """Run every fuzzer for its ``smoke_steps``. Prints what happened; True if nothing was found nor met too seldom."""
    good = True
    for fuzzer in FUZZERS.values():
        started = time.monotonic()
        try:
            report = run(fuzzer, seed, fuzzer.smoke_steps)
        except Failed as failed:
            print(failed, shrunk(fuzzer, failed), sep="\n", flush=True)
            good = False
            continue
        print(f"{fuzzer.name:<12}{report.steps:>8} steps {time.monotonic() - started:6.1f} s", flush=True)
        if fuzzer.wanted:
            print("  " + ", ".join(f"{name} {report.events[name]}" for name in fuzzer.wanted))
        short = [f"{name} {report.events[name]} of {n}" for name, n in fuzzer.wanted.items() if report.events[name] < n]
        if short:
            print("  too few to mean anything: " + ", ".join(short))
            good = False
    return good
