"""The shipped examples, and the programs on the documentation's pages, as a reader would run them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed(endpoint: str, *arguments: str | Path, timeout_s: float = 120.0) -> str:
    """What Python prints with these arguments, beside the daemon at ``endpoint``. Warnings are errors; so is any other
    end than a good one."""
    with started(endpoint, *arguments) as run:
        return rest_printed(run, timeout_s)


@contextlib.contextmanager
def started(endpoint: str, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Killed in the end, if it still runs then."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", *arguments],
        env={**os.environ, "RADIXKV_ENDPOINT": endpoint, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def rest_printed(run: subprocess.Popen[str], timeout_s: float = 120.0) -> str:
    """What nobody has read yet of what a program prints that ends well."""
    said, errors = run.communicate(timeout=timeout_s)
    assert run.returncode == 0, errors
    return said


def as_module(example: str, name: str) -> ModuleType:
    """A copy of an example, in ``sys.modules`` under ``name``, which is where its dataclasses look their module up."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / example)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
