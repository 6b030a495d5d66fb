"""CUDA pools where there is no CUDA: refused with what would mend it, and nothing else is touched by its absence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.config import PoolConfig
from radixkv.errors import ConfigError

SERVE = """
import sys
sys.modules[sys.argv[1]] = None  # as if it were not installed
from radixkv.cli.app import main
sys.exit(main(sys.argv[2:]))
"""


def test_without_the_bindings_serve_says_what_to_install(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    pool = "device=cuda,layers=1,kv_heads=1,head_dim=8,page_size=4,pages=8"
    serve = ["serve", "--endpoint", f"ipc://{tmp_path}/sock", "--pool", pool]
    ran = subprocess.run(
        [sys.executable, "-c", SERVE, "cuda.bindings", *serve], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 2 and ran.stdout == ""
    assert "cuda-bindings is not installed; pip install -e '.[cuda]'" in ran.stderr
    assert list(tmp_path.iterdir()) == [], "the endpoint is given back"


@pytest.mark.parametrize(
    ("device", "ranks", "names"),
    [
        ("cpu", 3, ()),
        ("cuda", 3, ("0", "1", "2")),
        ("cuda:1+0", 2, ("1", "0")),
        ("cuda:GPU-00112233-4455-6677-8899-aabbccddeeff", 1, ("GPU-00112233-4455-6677-8899-aabbccddeeff",)),
    ],
)
def test_a_device_for_each_rank(device: str, ranks: int, names: tuple[str, ...]) -> None:
    pool = PoolConfig(device=device, ranks=ranks, pages=8, host_pages=2)
    assert pool.cuda_devices == names
    on_the_machine = pool.host_arena_bytes + (0 if names else pool.arena_bytes)
    assert pool.machine_bytes == ranks * on_the_machine


@pytest.mark.parametrize(("device", "ranks"), [("gpu", 1), ("cuda:", 1), ("cuda:0", 2), ("cuda:0+1", 1), ("cuda:x", 1)])
def test_what_is_no_device(device: str, ranks: int) -> None:
    with pytest.raises(ConfigError, match=r"pool\.device = '"):
        PoolConfig(device=device, ranks=ranks, pages=8)
