"""All fuzzers shortly. Passing without having met the rare events would say nothing, so they are counted."""

from __future__ import annotations

import time
from collections import Counter

from fuzz.registry import Failed, run
from fuzz.targets.catalogue import FUZZERS

QUOTA = 100
WANTED = ("split", "merge", "evict", "shadow", "grant", "fork", "truncate")
"""What must have happened to the whole engine; ``grant``: a reserve that had waited got its pages."""


def smoke(seed: int) -> bool:
    """Run every fuzzer for its ``smoke_steps``. Prints what happened; True if nothing was found nor met too seldom."""
    events: Counter[str] = Counter()
    good = True
    for fuzzer in FUZZERS.values():
        started = time.monotonic()
        try:
            report = run(fuzzer, seed, fuzzer.smoke_steps)
        except Failed as failed:
            print(failed)
            good = False
            continue
        if fuzzer.name == "engine":
            events = report.events
        print(f"{fuzzer.name:<12}{report.steps:>7} steps {time.monotonic() - started:6.1f} s")
    print("engine: " + ", ".join(f"{name} {events[name]}" for name in WANTED))
    short = [f"{name} {events[name]} of {QUOTA}" for name in WANTED if events[name] < QUOTA]
    if short:
        print("too few to mean anything: " + ", ".join(short))
    return good and not short
