"""bench.roofline: all bars are kept, and there are rows for every kernel that moves bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_all_bars_are_kept() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.roofline", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["name"].removeprefix("roofline."): row for row in map(json.loads, done.stdout.splitlines())}
    assert [name for name, row in rows.items() if not row["ok"]] == []
    shared = [name for name in rows if name.startswith("decode_shared") and name.endswith("_pages")]
    assert len(shared) >= 4
    assert {rows[name]["bar"] for name in shared} == {1.1}
    for name in ("decode", "decode_latent", "prefill_32_over_a_prefix", "append", "copy_rows", "gather", "scatter"):
        assert rows[name]["bar"] is not None, name
