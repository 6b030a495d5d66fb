"""Each setting and argument of this release's ``model.generate``: what that gives, or refused by name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, TextStreamer, WatermarkingConfig
from transformers.generation import GenerationMixin
from transformers.generation.logits_process import TopKLogitsWarper

import radixkv
from radixkv.adapters.transformers import generate
from radixkv.adapters.transformers.refusals import KEYWORDS, SETTINGS

NEW, PAD = 10, 96
IDS = torch.tensor([[PAD, PAD, 5, 17, 3, 5], [8, 1, 5, 17, 3, 9]])
MASK = (IDS != PAD).long()
SAMPLED = {"do_sample": True, "top_k": 0}

Free = list[list[int]]
"""What the model says without the setting."""
CHANGES: dict[str, Callable[[Free], dict[str, Any]]] = {
    "bad_words_ids": lambda free: {"bad_words_ids": [[free[0][1]], free[1][:2]]},
    "begin_suppress_tokens": lambda free: {"begin_suppress_tokens": [free[0][0]]},
    "do_sample": lambda _: {"do_sample": True},
    "encoder_repetition_penalty": lambda _: {"encoder_repetition_penalty": 4.0},
    "encoder_no_repeat_ngram_size": lambda _: {"encoder_no_repeat_ngram_size": 1},
    "eos_token_id": lambda free: {"eos_token_id": [free[0][2], free[1][5]]},
    "epsilon_cutoff": lambda _: {**SAMPLED, "epsilon_cutoff": 0.02},
    "eta_cutoff": lambda _: {**SAMPLED, "eta_cutoff": 0.02},
    "exponential_decay_length_penalty": lambda _: {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 60},
    "forced_eos_token_id": lambda _: {"forced_eos_token_id": 60},
    "guidance_scale": lambda _: {"guidance_scale": 3.0},
    "max_length": lambda _: {"max_length": 9, "max_new_tokens": None},
    "max_new_tokens": lambda _: {"max_new_tokens": 3},
    "max_time": lambda _: {"max_time": 1e-9},
    "min_length": lambda free: {"min_length": 12, "eos_token_id": free[0][1]},
    "min_new_tokens": lambda free: {"min_new_tokens": 5, "eos_token_id": free[0][1]},
    "min_p": lambda _: {**SAMPLED, "min_p": 0.1},
    "no_repeat_ngram_size": lambda _: {"no_repeat_ngram_size": 1},
    "pad_token_id": lambda free: {"pad_token_id": 77, "eos_token_id": free[0][2]},
    "remove_invalid_values": lambda _: {"remove_invalid_values": True, **SAMPLED},
    "renormalize_logits": lambda _: {"renormalize_logits": True, **SAMPLED, "temperature": 2.0},
    "repetition_penalty": lambda _: {"repetition_penalty": 5.0},
    "sequence_bias": lambda free: {"sequence_bias": [[free[0][:1], -50.0], [[60], 9.0]]},
    "suppress_tokens": lambda free: {"suppress_tokens": [free[0][1], free[1][2]]},
    "temperature": lambda _: {**SAMPLED, "temperature": 3.0},
    "top_h": lambda _: {**SAMPLED, "top_h": 0.3},
    "top_k": lambda _: {"do_sample": True, "top_k": 3},
    "top_p": lambda _: {**SAMPLED, "top_p": 0.5},
    "typical_p": lambda _: {**SAMPLED, "typical_p": 0.5},
    "watermarking_config": lambda _: {"watermarking_config": WatermarkingConfig(bias=20.0)},
    "logits_processor": lambda _: {"logits_processor": [TopKLogitsWarper(3)], **SAMPLED},
    "stopping_criteria": lambda _: {"stopping_criteria": [lambda ids, _: torch.full((len(ids),), ids.shape[1] > 8)]},
    "prefix_allowed_tokens_fn": lambda _: {"prefix_allowed_tokens_fn": lambda row, ids: [row + 1, 5, 60]},
    "negative_prompt_ids": lambda _: {"negative_prompt_ids": IDS[:, 3:], "guidance_scale": 2.0},
    "negative_prompt_attention_mask": lambda _: {
        "negative_prompt_ids": IDS[:, :4], "negative_prompt_attention_mask": MASK[:, :4], "guidance_scale": 2.0
    },
}  # fmt: skip
"""What changes the output; each has to be seen to."""
SAME: dict[str, Any] = {
    "bos_token_id": 1,
    "disable_compile": True,
    "forced_bos_token_id": 60,
    "max_cache_len": 200,
    "num_return_sequences": 1,
    "output_logits": True,
    "output_scores": True,
    "prefill_chunk_size": 2,
    "return_dict_in_generate": False,
    "use_cache": True,
    "num_beams": 1,
}
"""What a loop with one beam and the usual cache heeds without another output, or hears of and need not heed."""
REFUSED: dict[str, Any] = {
    **dict.fromkeys(SETTINGS, 2),
    **dict.fromkeys(("use_mtp", "is_assistant", "token_healing", "output_attentions", "output_hidden_states"), True),
    "cache_implementation": "static",
    "constraints": ["some"],
    "dola_layers": "low",
    "force_words_ids": [[5]],
    "speculation_type": "dflash",
    "use_cache": False,
    **dict.fromkeys(KEYWORDS, "something"),
}
ELSEWHERE = {"inputs", "generation_config", "stop_strings", "streamer", "kwargs", "self"}
"""Tested in ``test_generate.py``. (num_return_sequences of 2, scores and logits are, too.)"""
OF_OTHER_LOOPS = {
    "assistant_confidence_threshold", "assistant_lookbehind", "diversity_penalty", "early_stopping", "length_penalty",
    "low_memory", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "target_lookbehind", "assistant_ensemble_weight",
    "cache_config", "compile_config", "continuous_batching_config", "decoder_start_token_id",
}  # fmt: skip
"""Details of beams, assistants, other caches and encoders, which are refused where they are asked for; without that
Transformers does not read them either."""
NO_SETTINGS = {"_from_model_config", "transformers_version"}


@pytest.fixture(scope="module")
def models(random_llama: Any) -> tuple[Any, Any]:
    """(for pages, for Transformers alone)"""
    return copy.deepcopy(random_llama), copy.deepcopy(random_llama)


@pytest.fixture(scope="module")
def pool(daemon_factory: Any) -> Iterator[Any]:
    shape = {"layers": 3, "kv_heads": 2, "head_dim": 8, "page_size": 4, "pages": 64}
    with radixkv.connect(daemon_factory(pools=[shape]).endpoint) as client:
        yield client.pool()


def both(models: tuple[Any, Any], pool: Any, asked: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(with pages, by ``model.generate``), both drawn with one seed."""
    ours, theirs = models
    asked = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": NEW, "pad_token_id": PAD, **asked}
    torch.manual_seed(3)
    found = generate(ours, **copy.deepcopy(asked), pool=pool)
    torch.manual_seed(3)
    return found, theirs.generate(**copy.deepcopy(asked))


def test_each_setting_and_argument_of_this_release_is_accounted_for() -> None:
    known = [set(CHANGES), set(SAME), ELSEWHERE, OF_OTHER_LOOPS, NO_SETTINGS, set(SETTINGS), set(KEYWORDS)]
    arguments = set(inspect.signature(GenerationMixin.generate).parameters)
    assert set(GenerationConfig().to_dict()) | arguments <= set().union(*known)


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_output_changes_it_alike(models: tuple[Any, Any], pool: Any, name: str) -> None:
    free = models[1].generate(IDS, attention_mask=MASK, max_new_tokens=NEW, pad_token_id=PAD)
    found, expected = both(models, pool, CHANGES[name](free[:, IDS.shape[1] :].tolist()))
    assert torch.equal(found, expected)
    assert not torch.equal(expected, free)


def test_what_changes_nothing_is_taken(models: tuple[Any, Any], pool: Any) -> None:
    found, expected = both(models, pool, SAME)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_asks_for_something_else_is_refused_by_name(models: tuple[Any, Any], name: str) -> None:
    """Also where a configuration says so."""
    model, _ = models
    asked = {"attention_mask": MASK, "pool": None}
    with pytest.raises(ValueError, match=f"{name}.* not supported with radixkv pages"):
        generate(model, IDS, **asked, max_new_tokens=2, pad_token_id=PAD, **{name: REFUSED[name]})
    if name in SETTINGS:
        config = GenerationConfig(max_new_tokens=2, pad_token_id=PAD)
        setattr(config, name, REFUSED[name])
        with pytest.raises(ValueError, match=name):
            generate(model, IDS, **asked, generation_config=config)


@pytest.mark.parametrize(
    "asked",
    [
        {"inputs": IDS},
        {"inputs": IDS, "attention_mask": MASK.bool()},
        {"input_ids": IDS.int(), "attention_mask": MASK.float()},
        {"inputs": IDS[1:]},
        {"bos_token_id": 5},
    ],
    ids=["no mask: padding is seen by its token", "bool", "other numbers", "one row", "no prompt"],
)
def test_prompts_may_come_as_they_do_there(models: tuple[Any, Any], pool: Any, asked: dict[str, Any]) -> None:
    ours, theirs = models
    asked = {"max_new_tokens": NEW, "pad_token_id": PAD, **asked}
    assert torch.equal(generate(ours, **asked, pool=pool), theirs.generate(**asked))


def test_a_text_streamer_takes_one_row_as_there(models: tuple[Any, Any], pool: Any) -> None:
    ours, theirs = models
    asked = {"max_new_tokens": 2, "pad_token_id": PAD, "streamer": TextStreamer(None)}
    for call in (lambda: generate(ours, IDS, **asked, pool=pool), lambda: theirs.generate(IDS, **asked)):
        with pytest.raises(ValueError, match="batch size 1"):
            call()
    assert pool.client.stats()["pools"]["default"]["sequences"] == 0
