"""What engine tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and an even number of heads: 3 layers, 4 heads, 2 KV heads, token ids below 1024."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256}
    config = LlamaConfig(**heads, **sizes, initializer_range=0.3, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder
