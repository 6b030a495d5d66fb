"""The shipped examples, and the programs on the documentation's pages, as a reader would run them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed(endpoint: str, *arguments: str | Path, timeout_s: float = 120.0) -> str:
    """What Python prints with these arguments, beside the daemon at ``endpoint``. Warnings are errors; so is any other
    end than a good one."""
    run = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env={**os.environ, "RADIXKV_ENDPOINT": endpoint, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def as_module(example: str, name: str) -> ModuleType:
    """A copy of an example, in ``sys.modules`` under ``name``, which is where its dataclasses look their module up."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / example)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
