"""GGUF to safetensors, once: reading GGUF takes tens of CPU seconds at every start, reading safetensors under three."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from radixkv.adapters.smollm2.source import ModelError

EXPECTED = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49_152,
}
"""What the configuration must say after conversion: the pool's KV spec rests on it."""


def convert_weights(gguf: Path, target: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (fp32). Raises ModelError for another model."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config: dict[str, Any] = model.config.to_dict()
    wrong = {key: config.get(key) for key, value in EXPECTED.items() if config.get(key) != value}
    if wrong:
        raise ModelError(f"the converted configuration has {wrong}, expected {EXPECTED}")
    # The model calls itself quantized and save_pretrained refuses it, but the tensors are plain fp32 by now.
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    state = model.state_dict()
    # lm_head is the embedding under a second name; safetensors stores each memory once.
    tensors = {name: tensor.contiguous() for name, tensor in state.items() if name != "lm_head.weight"}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model.generation_config.save_pretrained(target)


def convert_tokenizer(gguf: Path, target: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    from transformers import AutoTokenizer

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep transformers' own progress bars off the terminal while ours is shown."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
