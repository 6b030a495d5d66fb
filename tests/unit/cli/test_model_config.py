"""KV specs from models' config.json files."""

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.cli import model_config
from radixkv.config import KVSpec
from radixkv.errors import ConfigError

LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "dtype": "float32",
}


def spec(folder: Path, content: Any, **written: object) -> KVSpec:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return model_config.spec_of(path, written)


def refusal(folder: Path, content: Any, **written: object) -> str:
    with pytest.raises(ConfigError) as caught:
        spec(folder, content, **written)
    assert str(folder / "config.json") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "bytes_per_token"),
    [
        (LLAMA_70B, 327_680),
        ({**LLAMA_70B, "num_key_value_heads": 64}, 2_621_440),
        ({**LLAMA_70B, "num_key_value_heads": None}, 2_621_440),
        (DEEPSEEK, 70_272),
        (SMOLLM2, 46_080),
    ],
)
def test_bytes_of_a_token(tmp_path: Path, content: dict[str, Any], bytes_per_token: int) -> None:
    assert spec(tmp_path, content).bytes_per_token == bytes_per_token


@pytest.mark.parametrize(("new", "heads"), [(False, 1), (True, 8)])
def test_falcons_have_fewer_kv_heads_than_they_say_attention_heads(tmp_path: Path, new: bool, heads: int) -> None:
    falcon = {**SMOLLM2, "num_key_value_heads": None, "multi_query": True, "num_kv_heads": 8}
    assert spec(tmp_path, {**falcon, "new_decoder_architecture": new}).kv_heads == heads


def test_head_dim_wins_over_the_quotient(tmp_path: Path) -> None:
    assert spec(tmp_path, {**LLAMA_70B, "head_dim": 96}).head_dim == 96
    assert spec(tmp_path, {**LLAMA_70B, "head_dim": None}).head_dim == 128


def test_the_text_part_of_a_model_of_several_parts_is_read(tmp_path: Path) -> None:
    content = {"text_config": SMOLLM2, "vision_config": LLAMA_70B, "torch_dtype": "float16", "hidden_size": 1}
    assert spec(tmp_path, content) == KVSpec()
    nested = {key: value for key, value in SMOLLM2.items() if key != "dtype"}
    assert spec(tmp_path, {"text_config": {**nested, "dtype": None}, "torch_dtype": "float16"}).dtype == "float16"


def test_torch_prefixes_are_dropped(tmp_path: Path) -> None:
    assert spec(tmp_path, {**SMOLLM2, "dtype": "torch.float16"}).dtype == "float16"


def test_written_keys_win_and_stand_in_for_missing_ones(tmp_path: Path) -> None:
    made = spec(tmp_path, {}, layers=2, kv_heads=1, head_dim=8, dtype="float16", page_size=4)
    assert made == KVSpec(layers=2, kv_heads=1, head_dim=8, dtype="float16", page_size=4)
    assert spec(tmp_path, SMOLLM2, layers=2).layers == 2


@pytest.mark.parametrize(
    ("missing", "part"),
    [
        ("num_hidden_layers", "config.json' has no num_hidden_layers; --layers, or layers of the pool, can stand in"),
        ("hidden_size", "has no hidden_size; --head-dim, or head_dim of the pool"),
        ("num_attention_heads", "has no num_attention_heads"),
        ("dtype", "has no dtype or torch_dtype; --dtype, or dtype of the pool"),
    ],
)
def test_a_missing_key_is_named(tmp_path: Path, missing: str, part: str) -> None:
    assert part in refusal(tmp_path, {key: value for key, value in SMOLLM2.items() if key != missing})


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "is not JSON"),
        ("[]", "its top is no object"),
        ({**SMOLLM2, "num_hidden_layers": "30"}, "num_hidden_layers = '30' is not a whole number; --layers, or"),
        ({**SMOLLM2, "num_hidden_layers": -1}, "num_hidden_layers = -1 is not a whole number"),
        ({**SMOLLM2, "num_hidden_layers": True}, "num_hidden_layers = True is not a whole number"),
        ({**SMOLLM2, "hidden_size": 577}, "hidden_size 577 is no multiple of 9 attention heads"),
        ({**SMOLLM2, "num_attention_heads": 0}, "is no multiple of 0 attention heads"),
        ({**SMOLLM2, "layer_types": ["full_attention", "linear_attention"]}, "layer_types has linear_attention"),
        ({**SMOLLM2, "mamba_d_state": 16}, "mamba_d_state means layers that keep a state"),
        ({**SMOLLM2, "layer_types": ["full_attention"], "conv_L_cache": 3}, "conv_L_cache means layers that keep"),
        ({**SMOLLM2, "dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn' is not allowed"),
        ({**SMOLLM2, "text_config": 3}, "text_config is no object"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, content: Any, part: str) -> None:
    assert part in refusal(tmp_path, content)


def test_a_key_that_is_null_says_nothing(tmp_path: Path) -> None:
    assert spec(tmp_path, {**SMOLLM2, "mamba_d_state": None, "layer_types": None}) == KVSpec()


def test_layers_with_a_window_count_as_full_ones(tmp_path: Path) -> None:
    content = {**SMOLLM2, "layer_types": ["sliding_attention", "full_attention"] * 15}
    assert spec(tmp_path, content) == KVSpec()
