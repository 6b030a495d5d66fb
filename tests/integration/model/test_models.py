"""Other models than Llama: those whose attention can read pages give what they give without, others are refused.

Whether a model can is not in its configuration: some have no cache, some change keys or values behind it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from radixkv.adapters.transformers import PagedModel, generate

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
READS: dict[str, dict[str, Any]] = {
    "gpt2": SIZES, "gpt_neox": SIZES, "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}, "phi3": SIZES,
    "qwen3": GROUPED, "mixtral": {**GROUPED, "num_local_experts": 4}, "gemma": GROUPED, "cohere": GROUPED,
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM is not supported; .* attention interface", SIZES),
    "gptj": ("GPTJForCausalLM is not supported", {**SIZES, "rotary_dim": 4}),
    "xlm-roberta": ("is_causal = False", SIZES),
    "jetmoe": (r"the attention of layers \[0, 1\] does not read", {**SIZES, "num_local_experts": 4, "kv_channels": 8}),
    "diffllama": ("DiffLlamaAttention is not supported .* changes values", GROUPED),
    "youtu": ("heads of 16 dims are not supported", {**GROUPED, **LATENT}),
    "rwkv": ("RwkvConfig has no num_attention_heads", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}),
    "t5": ("is_encoder_decoder", {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
}
ASKED = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def model_of(kind: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **sizes)
    if kind == "t5":
        from transformers import T5ForConditionalGeneration

        return T5ForConditionalGeneration(config).eval()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def prompts() -> torch.Tensor:
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[1, :5] = ids[0, :5]
    return ids


@pytest.mark.parametrize("kind", READS)
def test_models_that_read_pages_say_what_they_say_without(kind: str) -> None:
    model = model_of(kind, READS[kind])
    asked = {**ASKED, "return_dict_in_generate": True, "output_logits": True}
    wanted = model.generate(prompts(), **asked)
    got = generate(model, prompts(), pool=None, **asked)
    assert torch.equal(got.sequences, wanted.sequences)
    for mine, right in zip(got.logits, wanted.logits, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=1e-4)


def test_a_compiled_model_is_refused() -> None:
    model = model_of("gpt2", SIZES)
    with pytest.raises(ValueError, match=r"torch\.compile"):
        PagedModel(torch.compile(model))


def test_a_model_may_be_wrapped() -> None:
    """As PEFT does it: ``generate`` of the wrapper is that of the model within, which has the wrapper's layers."""
    model = model_of("gpt2", SIZES)
    paged = PagedModel(Wrapped(model))
    wanted = model.generate(prompts(), **ASKED)
    assert torch.equal(model.generate(prompts(), custom_generate=paged.decode, **ASKED), wanted)
    with pytest.raises(ValueError, match="another one"):
        model_of("gpt2", SIZES).generate(prompts(), custom_generate=paged.decode, **ASKED)


class Wrapped(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.within = model

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.within(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "within" else getattr(self.within, name)


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_would_say_something_else_are_refused_by_name(kind: str) -> None:
    says, sizes = REFUSED[kind]
    model = model_of(kind, sizes)
    with pytest.raises(ValueError, match=says):
        PagedModel(model).greedy([5, 6, 7], 2)
