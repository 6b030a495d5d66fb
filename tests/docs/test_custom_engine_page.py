"""docs/custom-engine.md: what it says the example prints and how it goes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import radixkv

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "custom-engine.md").read_text()
EXAMPLE = ROOT / "examples" / "custom_engine.py"
POOL = {"layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "page_size": 4, "pages": 64}


def test_the_pool_is_the_one_tested() -> None:
    flag = "--pool name=default," + ",".join(f"{key}={value}" for key, value in POOL.items())
    assert flag in PAGE
    assert flag in EXAMPLE.read_text()


def test_the_code_shown_is_that_of_the_example() -> None:
    shown = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(shown) == 1
    assert shown[0] in EXAMPLE.read_text()


def test_each_part_has_its_line() -> None:
    engine = EXAMPLE.read_text().split("class Engine")[1].split("def random_llama")[0]
    parts = re.findall(r"^ *def (\w+)\(", engine, flags=re.MULTILINE)
    assert {"admit", "verify", "guess", "forward"} <= set(parts)
    for part in set(parts) - {"__init__", "run", "step", "attend"}:
        assert f"| `{part}` |" in PAGE, part


def test_it_prints_what_the_page_says(daemon_factory: Any) -> None:
    daemon = daemon_factory(pools=[POOL])
    run = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE],
        env={**os.environ, "RADIXKV_ENDPOINT": daemon.endpoint, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert f"```\n{run.stdout}```" in PAGE
    with radixkv.connect(daemon.endpoint) as client:
        assert client.stats().pools["default"].pages.private == 0
