"""``python -m bench.replay``: how fast a request trace goes through the engine. See docs/performance.md.

The trace is Mooncake's conversation trace, looked for in $RADIXKV_REFERENCE_DIR/traces; without it there is no figure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.rows import Row, report, row
from bench.stopwatch import summarize
from radixkv.simulate.replay import Memory, replay
from radixkv.simulate.trace import load

TRACE = Path("traces") / "mooncake_conversation_trace.jsonl.gz"
BLOCKS = 9_139
ROUNDS = 5
REQUEST_BAR_US = 500.0
"""2,000 requests a second."""


def main() -> None:
    report(rows(), sys.argv[1:])


def rows() -> Iterator[Row]:
    folder = os.environ.get("RADIXKV_REFERENCE_DIR")
    if not folder or not (Path(folder) / TRACE).exists():
        print("bench.replay: $RADIXKV_REFERENCE_DIR has no traces, so there is no figure", file=sys.stderr)
        return
    trace = load(Path(folder) / TRACE)
    measured = []
    for _ in range(ROUNDS):
        done = replay(trace, Memory(BLOCKS))
        measured.append(1e6 * done.seconds / done.requests)
    yield row("replay.request_us", "us", summarize(measured), REQUEST_BAR_US)


if __name__ == "__main__":
    main()
