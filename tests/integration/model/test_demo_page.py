"""The worker in docs/demo.md is run as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from radixkv.demo.scenario import POOL
from tests import examples

pytestmark = pytest.mark.model

PAGE = (Path(__file__).parents[3] / "docs" / "demo.md").read_text()


def test_the_worker_prints_what_the_page_says(daemon_factory: Any, smollm2_files: Any, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    daemon = daemon_factory(
        pools=[{"name": POOL, "layers": 30, "kv_heads": 3, "head_dim": 64, "page_size": 16, "pages": 32}]
    )
    printed = [examples.printed(daemon.endpoint, "-c", code) for _ in range(2)]
    assert f"```\n{''.join(printed)}```" in PAGE
