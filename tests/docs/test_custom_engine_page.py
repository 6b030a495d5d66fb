"""docs/custom-engine.md: what it says the example prints and how it goes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import radixkv
from tests.examples import EXAMPLES, printed

PAGE = (Path(__file__).parents[2] / "docs" / "custom-engine.md").read_text()
EXAMPLE = EXAMPLES / "custom_engine.py"
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
    assert f"```\n{printed(daemon.endpoint, EXAMPLE)}```" in PAGE
    with radixkv.connect(daemon.endpoint) as client:
        assert client.stats().pools["default"].pages.private == 0
