"""Runs ``interpreted/`` with TRITON_INTERPRET=1, where the Triton kernels need no GPU: a process for each file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LEAST = {
    "test_attention.py": 20, "test_gpu_checks.py": 15, "test_latent.py": 5, "test_quantized.py": 18,
    "test_triton.py": 20, "test_write.py": 5,
}  # fmt: skip
"""Tests in each file, at least: a run that collected nothing would pass, too."""
LONG = {"test_gpu_checks.py"}
"""The checks of ``bench.gpu`` on small problems: what they call is tested by the other files."""


def test_all_files_are_run() -> None:
    assert {path.name for path in (HERE / "interpreted").glob("test_*.py")} == set(LEAST)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in LEAST])
def test_the_triton_kernels_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted" / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= LEAST[name]
    assert re.search(r"\d+ skipped", done.stdout) is None
