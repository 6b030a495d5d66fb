"""What a model's ``config.json`` says about its KV cache.

::

    num_hidden_layers                      -> layers
    num_key_value_heads | num_kv_heads | num_attention_heads -> kv_heads   (Falcon's first with multi_query: 1)
    head_dim | hidden_size / num_attention_heads -> head_dim
    dtype | torch_dtype                    -> dtype
    kv_lora_rank, qk_rope_head_dim         -> mla_latent_dim, mla_rope_dim   (multi-head latent attention)

Of a model of several parts, the text part (``text_config``) is read. Every layer is counted as full attention: a layer
with a sliding window needs no more than that. Layers that keep a state instead of keys and values are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from radixkv.config import KVSpec
from radixkv.errors import ConfigError

KEEPS_KV = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
STATES = (
    "mamba_d_state", "ssm_state_size", "conv_L_cache", "lru_width", "linear_num_key_heads", "layers_block_type",
    "attn_layer_period", "attn_layer_indices", "attn_type_list", "hybrid_override_pattern",
)  # fmt: skip
"""Keys that only models have whose layers, or some of them, keep a state. Many of these have no ``layer_types``."""


def spec_of(path: Path, written: Mapping[str, object]) -> KVSpec:
    """The KV spec of the model whose ``config.json`` is at ``path``; keys in ``written`` win over the file's.

    Errors: ConfigError when the file cannot be read, or lacks a key that ``written`` does not give either.
    """
    found = _Model(path, _load(path))
    latent = found.number("mla_latent_dim", "kv_lora_rank", required=False)
    readers: dict[str, Callable[[], int | str]] = {
        "layers": lambda: found.number("layers", "num_hidden_layers"),
        "dtype": found.dtype,
    }
    if latent:
        readers |= {
            "mla_latent_dim": lambda: latent,
            "mla_rope_dim": lambda: found.number("mla_rope_dim", "qk_rope_head_dim"),
        }
    else:
        readers |= {"kv_heads": found.kv_heads, "head_dim": found.head_dim}
    found.refuse_states()
    values: dict[str, Any] = {name: read() for name, read in readers.items() if name not in written} | dict(written)
    try:
        return KVSpec(**values)
    except ConfigError as error:
        name = error.message.partition(" = ")[0]
        raise (error if name in written else found.error(f"{error.message}; {_stand_in(name)}")) from None


def _stand_in(name: str) -> str:
    """What to write when the file is of no use for the key ``name`` of a spec."""
    return f"--{name.replace('_', '-')}, or {name} of the pool, can stand in for it"


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model_config = {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"model_config = {str(path)!r} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"model_config = {str(path)!r} is not a model's config.json: its top is no object")
    return content


class _Model:
    """The keys of one config.json, those of its text part first."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        text = content.get("text_config", {})
        if not isinstance(text, dict):
            raise self.error("text_config is no object")
        self.keys = {**content, **{key: value for key, value in text.items() if value is not None}}

    def number(self, key: str, *names: str, required: bool = True) -> int:
        """The first of ``names`` in the file, for ``key`` of the spec; 0 when it has none and none is required."""
        for name in names:
            value = self.keys.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise self.error(f"{name} = {value!r} is not a whole number; {_stand_in(key)}")
            return value
        if required:
            raise self.lacks(" or ".join(names), key)
        return 0

    def kv_heads(self) -> int:
        if self.keys.get("multi_query") and not self.keys.get("new_decoder_architecture"):
            return 1
        return self.number("kv_heads", "num_key_value_heads", "num_kv_heads", "num_attention_heads")

    def head_dim(self) -> int:
        head_dim = self.number("head_dim", "head_dim", required=False)
        if head_dim:
            return head_dim
        hidden, heads = self.number("head_dim", "hidden_size"), self.number("head_dim", "num_attention_heads")
        if heads == 0 or hidden % heads:
            raise self.lacks(
                f"head_dim, and hidden_size {hidden} is no multiple of {heads} attention heads", "head_dim"
            )
        return hidden // heads

    def dtype(self) -> str:
        value = self.keys.get("dtype") or self.keys.get("torch_dtype")
        if not isinstance(value, str):
            raise self.lacks("dtype or torch_dtype", "dtype")
        return value.removeprefix("torch.")

    def refuse_states(self) -> None:
        """Errors: ConfigError for a model with layers that have no keys and values to cache."""
        kinds = self.keys.get("layer_types")
        strange = sorted({str(kind) for kind in kinds} - KEEPS_KV) if isinstance(kinds, list) else []
        if strange:
            raise self.error(f"layer_types has {', '.join(strange)}; supported: {', '.join(sorted(KEEPS_KV))}")
        states = [key for key in STATES if self.keys.get(key) is not None]
        if states:
            raise self.error(f"{states[0]} means layers that keep a state, of which there are no pages")

    def lacks(self, what: str, key: str) -> ConfigError:
        return ConfigError(f"model_config = {str(self.path)!r} has no {what}; {_stand_in(key)}")

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"model_config = {str(self.path)!r}: {message}")
