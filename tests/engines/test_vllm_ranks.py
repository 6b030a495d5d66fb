"""A tensor-parallel vLLM engine on a CPU, its two workers as ranks of one pool: ``make test-engines``.

SmolLM2 has 9 heads, which two workers cannot share: the model is a small one made here, with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv.adapters.vllm.bench.process import EngineProcess
from radixkv.adapters.vllm.bench.run import transfer
from tests.engines.test_vllm import BLOCK, PYTHON, prompt

RANKS = 2
POOL = {
    "layers": 3, "kv_heads": 2 // RANKS, "head_dim": 32, "dtype": "float32", "page_size": BLOCK, "pages": 64,
    "ranks": RANKS,
}  # fmt: skip
LONG = [token % 1000 for token in prompt(1, 200)]
POSSIBLE = (len(LONG) - 1) // BLOCK * BLOCK

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM in .venv-vllm: `make engines` installs it (3.5 GB)"),
]


class Engine(EngineProcess):
    def __init__(self, endpoint: str, model: Path, log: Path) -> None:
        settings = {
            "model": str(model), "skip_tokenizer_init": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 26,
            "tensor_parallel_size": RANKS, "distributed_executor_backend": "mp", "enable_prefix_caching": False,
            "kv_transfer_config": transfer(endpoint, pause_max_s=2.0),
        }  # fmt: skip
        super().__init__(PYTHON, settings, log)

    def one(self, **job: Any) -> tuple[list[int], int]:
        ((output, cached, finished),) = self.generate([LONG], **job)["results"]
        assert finished
        return output, cached


@pytest.fixture(scope="module")
def daemon(daemon_factory: Any) -> Any:
    return daemon_factory(pools=[POOL])


@pytest.fixture(scope="module")
def first(daemon: Any, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[int], int]]:
    """What an engine that is gone said, and how much of it was cached the second time."""
    engine = Engine(daemon.endpoint, small_model, tmp_path_factory.mktemp("vllm") / "first.log")
    try:
        output, cached = engine.one()
        assert cached == 0
        again, cached = engine.one()
        assert again == output
        assert engine.one(salt="somebody else's") == (output, 0)
    finally:
        engine.end()
    yield output, cached


def test_an_engine_of_two_workers_gets_its_own_tokens_back(first: tuple[list[int], int]) -> None:
    assert first[1] == POSSIBLE


def test_a_fresh_engine_of_two_workers_gets_them_too(
    daemon: Any, small_model: Path, first: tuple[list[int], int], tmp_path: Path, wait_until: Any
) -> None:
    """The pages of both workers: with one of them wrong the output is another one. Then the daemon is killed."""
    engine = Engine(daemon.endpoint, small_model, tmp_path / "second.log")
    try:
        assert engine.one() == (first[0], POSSIBLE)
        with radixkv.connect(daemon.endpoint) as client:
            wait_until(lambda: client.stats().pools["default"]["sequences"] == 0)
            pages = client.stats().pools["default"]["pages"]
        assert pages["private"] == pages["quarantined"] == 0
        daemon.kill()
        assert engine.one() == (first[0], 0)
    finally:
        engine.end()
