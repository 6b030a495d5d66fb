"""SmolLM2 decodes through the kernels: a shared prefix, several query tokens a row, within the bound of the adapter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import radixkv
from tests.integration.model.through_kernels import worst_difference

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[3]
LOGITS_DIFFER_AT_MOST = 2e-3
"""As in test_smollm2.py."""
POOL = {"layers": 30, "kv_heads": 3, "head_dim": 64, "page_size": 4, "pages": 40}


def test_through_the_torch_reference(smollm2_model: Any, daemon_factory: Any) -> None:
    with radixkv.connect(daemon_factory(pools=[POOL]).endpoint) as client:
        worst, sharing = worst_difference(smollm2_model, client.pool(), "torch", (2, 3, 2))
    print(f"worst difference of a logit: {worst:.1e}")
    assert 0.0 < worst <= LOGITS_DIFFER_AT_MOST
    assert sharing == 2


@pytest.mark.long
@pytest.mark.parametrize(("rows", "guesses"), [(1, 1), (2, 7)])
def test_through_the_triton_kernels_interpreted(
    smollm2_files: Any, daemon_factory: Any, rows: int, guesses: int
) -> None:
    """A decode step of two query tokens (or of two rows that share pages, eight each), in all 30 layers."""
    daemon = daemon_factory(pools=[POOL])
    module = "tests.integration.model.through_kernels"
    command = [sys.executable, "-m", module, daemon.endpoint, str(rows), str(guesses)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    worst, sharing = done.stdout.split()
    print(f"worst difference of a logit: {float(worst):.1e}")
    assert 0.0 < float(worst) <= LOGITS_DIFFER_AT_MOST
    assert int(sharing) == rows - 1
