"""docs/own-loop.md: its loop is the shipped example, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv.adapters.transformers import refusals
from tests.examples import EXAMPLES, printed, rest_printed, started

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-loop.md").read_text()
POOL = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32", "page_size": 4, "pages": 64}
ANSWER = "[53, 84, 13, 22, 69, 74, 67, 53, 84, 11, 33, 73]"


def test_the_programs_are_the_shipped_files() -> None:
    own, generate = re.findall(r"```python\n(\"\"\".*?)```", PAGE, flags=re.DOTALL)
    assert own == (EXAMPLES / "own_loop.py").read_text()
    assert generate == (EXAMPLES / "generate.py").read_text()


def test_the_pool_of_the_page_is_the_one_tested() -> None:
    assert "pool name=default," + ",".join(f"{key}={value}" for key, value in POOL.items()) in PAGE


def test_the_loop_prints_what_the_page_says(daemon_factory: Any) -> None:
    daemon = daemon_factory(pools=[POOL])
    said = printed(daemon.endpoint, EXAMPLES / "own_loop.py")
    assert ANSWER in said and f"```\n{said}```" in PAGE
    with radixkv.connect(daemon.endpoint) as client:
        assert client.stats()["pools"]["default"]["pages"]["private"] == 0


def test_a_loop_that_finds_no_page_gives_its_own_back_and_waits(daemon_factory: Any) -> None:
    """10 of 17 pages are somebody's: 7 are enough for 28 tokens, and not for all 32."""
    daemon = daemon_factory(pools=[{**POOL, "pages": 17}])
    with radixkv.connect(daemon.endpoint) as client, client.pool("default").reserve(range(200, 240)) as somebody:
        with started(daemon.endpoint, "-u", EXAMPLES / "own_loop.py") as loop:
            assert loop.stdout is not None
            said = loop.stdout.readline() + loop.stdout.readline()
            assert said == "0 of 20 tokens are cached\nagain, after out_of_pages\n"
            somebody.free()
            said = rest_printed(loop)
        assert [line for line in said.splitlines() if "cached" not in line] == [ANSWER, "True True"]
        assert client.stats()["pools"]["default"]["pages"]["private"] == 0


def test_a_loop_in_a_pool_that_is_too_small_says_so(daemon_factory: Any) -> None:
    said = printed(daemon_factory(pools=[{**POOL, "pages": 7}]).endpoint, EXAMPLES / "own_loop.py").splitlines()
    assert said[1] == "the pool is too small for the rest" and ANSWER.startswith(said[2].rstrip("]"))


@pytest.mark.parametrize("name", [*refusals.KEYWORDS, *refusals.SETTINGS])
def test_what_generate_refuses_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE
