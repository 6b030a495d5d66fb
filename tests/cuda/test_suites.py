"""Suites again, over the fake driver: each in a pytest of its own, because a process has one libcuda.

Where a suite fails, its output is shown; to run one by hand: ``python -m tests.cuda.suites pytest ARGUMENTS``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DEVICE
from tests.cuda import suites

pytestmark = [
    pytest.mark.skipif(suites.compiler() is None, reason="no C compiler to build the fake CUDA driver with"),
    pytest.mark.skipif(DEVICE != "cpu", reason="runs by itself what runs on another device"),
]

SUITES = {
    "driver": (["tests/cuda/on_driver"], 20),
    "copier": (["tests/unit/device/test_copier.py", "-k", "come_back or order_of or sense or in_flight or layer"], 14),
    "contract": (["tests/contract/test_fences.py", "-k", "not aio"], 12),
}
"""Arguments, and how many tests there are at least."""
AT_LENGTH = {
    "bench": (["tests/cuda/on_driver/test_bench.py", "-m", "long"], 1),
    "copier, all": (["tests/unit/device/test_copier.py"], 24),
    "host tier": (["tests/integration/test_host_tier.py", "-k", "not has_the_same_memory"], 12),
    "reserve": (["tests/contract/test_reserve.py"], 60),
    "sequence": (["tests/contract/test_sequence.py"], 60),
    "step": (["tests/contract/test_step.py"], 20),
    "ranks": (["tests/contract/test_ranks.py"], 18),
    "resume": (["tests/contract/test_resume.py", "-k", "not stood_still and not forked_child"], 9),
    "early": (["tests/integration/test_early.py"], 6),
    "suspend": (["tests/contract/test_suspend.py"], 10),
    "deaths": (["tests/integration/test_worker_deaths.py"], 5),
}
"""Those that take minutes: ``-m long``."""


@pytest.mark.parametrize(
    "suite", [*SUITES, *(pytest.param(name, marks=pytest.mark.long) for name in AT_LENGTH)], ids=str
)
def test_it_passes_over_the_fake_driver(tmp_path: Path, suite: str) -> None:
    arguments, least = (SUITES | AT_LENGTH)[suite]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.cuda.on_fake", *arguments]
    ran = subprocess.run(command, env=suites.environment(tmp_path), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-20_000:]}\n{ran.stderr[-2_000:]}"
    found = re.search(r"(\d+) passed", ran.stdout)
    assert found is not None and int(found[1]) >= least, ran.stdout[-2_000:]
