"""What ``generate`` does not do, by name: each would silently give something else than ``model.generate`` gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

SETTINGS: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (),
    "dola_layers": (),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "use_mtp": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "constraints": (),
    "force_words_ids": (),
    "is_assistant": (False,),
    "speculation_type": (),
    "token_healing": (False,),
    "cache_implementation": ("dynamic",),
    "use_cache": (True,),
}
"""Generation settings that ask for another loop, cache or prompt, and what they may be beside None."""

KEYWORDS = ("assistant_model", "assistant_tokenizer", "custom_generate", "inputs_embeds", "past_key_values",
            "position_ids", "synced_gpus")  # fmt: skip
"""Arguments of ``model.generate`` that must be absent, None or False."""

MODEL_KWARGS = ("attention_mask", "logits_to_keep", "past_key_values", "position_ids", "use_cache")
"""What ``model.generate`` prepares for a loop and ours knows."""


def refuse_settings(given: Mapping[str, Any]) -> None:
    """Raises ValueError for a generation setting that asks for another loop."""
    for name, allowed in SETTINGS.items():
        value = given.get(name)
        if value is not None and value not in allowed:
            options = ", ".join(repr(each) for each in (None, *allowed))
            raise ValueError(f"{name} = {value!r} is not supported with radixkv pages; allowed: {options}")


def refuse_keywords(given: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument that our loop would not see, or not heed."""
    for name in KEYWORDS:
        value = given.get(name)
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported with radixkv pages; allowed: leave it out")


def refuse_inputs(model_kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for model inputs other than tokens and their padding."""
    for name, value in model_kwargs.items():
        if value is not None and name not in MODEL_KWARGS:
            raise ValueError(f"{name} is not supported with radixkv pages; allowed: input_ids, attention_mask")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("past_key_values is not supported with radixkv pages: the pages are the cache")
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is not None and not torch.equal(positions, _natural(positions, mask)):
        raise ValueError("position_ids is not supported with radixkv pages; allowed: those that padding leaves")


def _natural(positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Positions counted from the first token that is not padding, as Transformers prepares them."""
    if mask is None:
        return torch.arange(positions.shape[-1]).expand_as(positions)
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
