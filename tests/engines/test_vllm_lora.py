"""LoRA adapters in a real vLLM engine: what one adapter computed, the others never get. ``make test-engines``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import radixkv
from radixkv.adapters.vllm.bench.process import EngineProcess
from radixkv.adapters.vllm.bench.run import transfer
from tests.engines.test_vllm_ranks import BLOCK, LONG, POSSIBLE, PYTHON, pytestmark  # noqa: F401 - read by pytest

POOL = {"layers": 3, "kv_heads": 2, "head_dim": 32, "dtype": "float32", "page_size": BLOCK, "pages": 64}
RANK = 8


def adapter(folder: Path, seed: int) -> Path:
    """Of the small model: random changes of queries and values."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.{part}.weight": torch.randn(shape, generator=generator)
        for layer in range(3)
        for name, outputs in (("q_proj", 128), ("v_proj", 64))
        for part, shape in (("lora_A", (RANK, 128)), ("lora_B", (outputs, RANK)))
    }
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj", "v_proj"]}))
    return folder


def test_another_adapter_never_hits(daemon_factory: Any, small_model: Path, tmp_path: Path) -> None:
    daemon = daemon_factory(pools=[POOL])
    settings = {
        "model": str(small_model), "skip_tokenizer_init": True, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 26,
        "enable_prefix_caching": False, "enable_lora": True, "max_lora_rank": RANK, "max_loras": 2,
        "kv_transfer_config": transfer(daemon.endpoint),
    }  # fmt: skip
    first, second = (adapter(tmp_path / f"adapter-{n}", n) for n in (1, 2))
    engine = EngineProcess(PYTHON, settings, tmp_path / "engine.log")
    try:
        said = []
        for lora, expected in (
            (None, 0), ([1, str(first)], 0), ([2, str(second)], 0),
            (None, POSSIBLE), ([1, str(first)], POSSIBLE), ([2, str(second)], POSSIBLE),
        ):  # fmt: skip
            ((output, cached, finished),) = engine.generate([LONG], lora=lora)["results"]
            assert finished
            assert cached == expected
            said.append(output)
        assert said[:3] == said[3:]
        assert said[0] != said[1] != said[2]
    finally:
        engine.kill()
    with radixkv.connect(daemon.endpoint) as client:
        assert client.stats().pools["default"]["sequences"] == 0
