"""``python -m bench``: every figure in one table (with ``--json``: one object a line). Fails if a module does.

Each module runs in a process of its own, one after the other; a bar that is missed is shown, not an error, because the
machine may be busy: run the module again by itself before you believe it.
"""

from __future__ import annotations

import subprocess
import sys

from bench.rows import Row, print_table, wants_json

MODULES = ("index", "ipc", "daemon", "deaths", "copy", "events", "replay")


def rows_of(module: str) -> list[Row]:
    command = [sys.executable, "-m", f"bench.{module}", "--json"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [Row.from_json(line) for line in printed.splitlines()]


def main() -> None:
    as_json = wants_json(sys.argv[1:])
    rows: list[Row] = []
    for module in MODULES:
        print(f"bench.{module} is measuring", file=sys.stderr, flush=True)
        rows += rows_of(module)
    if as_json:
        print("\n".join(made.as_json() for made in rows))
    else:
        print_table(rows, "radixkv: figures and their bars")


if __name__ == "__main__":
    main()
