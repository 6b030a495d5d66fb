"""The worker in docs/demo.md is run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixkv.demo.scenario import POOL

pytestmark = pytest.mark.model

PAGE = (Path(__file__).parents[3] / "docs" / "demo.md").read_text()


def test_the_worker_prints_what_the_page_says(daemon_factory: Any, smollm2_files: Any, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    daemon = daemon_factory(
        pools=[{"name": POOL, "layers": 30, "kv_heads": 3, "head_dim": 64, "page_size": 16, "pages": 32}]
    )
    environment = {**os.environ, "RADIXKV_ENDPOINT": daemon.endpoint, "OMP_NUM_THREADS": "1"}
    printed = ""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    assert f"```\n{printed}```" in PAGE
