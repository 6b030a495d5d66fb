"""docs/own-loop.md: its loop is the shipped example, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv.adapters.transformers import refusals
from tests.examples import EXAMPLES, printed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-loop.md").read_text()
POOL = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32", "page_size": 4, "pages": 64}


def test_the_programs_are_the_shipped_files() -> None:
    own, generate = re.findall(r"```python\n(\"\"\".*?)```", PAGE, flags=re.DOTALL)
    assert own == (EXAMPLES / "own_loop.py").read_text()
    assert generate == (EXAMPLES / "generate.py").read_text()


def test_the_pool_of_the_page_is_the_one_tested() -> None:
    assert "pool name=default," + ",".join(f"{key}={value}" for key, value in POOL.items()) in PAGE


def test_the_loop_prints_what_the_page_says(daemon_factory: Any) -> None:
    daemon = daemon_factory(pools=[POOL])
    assert f"```\n{printed(daemon.endpoint, EXAMPLES / 'own_loop.py')}```" in PAGE
    with radixkv.connect(daemon.endpoint) as client:
        assert client.stats()["pools"]["default"]["pages"]["private"] == 0


@pytest.mark.parametrize("name", [*refusals.KEYWORDS, *refusals.SETTINGS])
def test_what_generate_refuses_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE
