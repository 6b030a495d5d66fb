"""Which engines are served, by what vLLM's configuration says; ``tests/engines`` has the real one."""

from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.adapters.vllm.door import DoorSettings, check, door_settings
from radixkv.adapters.vllm.engine import check_engine, check_zero_copy, inside_a_block, page_spec
from radixkv.config import KVSpec
from radixkv.errors import ConfigError

SPEC = KVSpec(page_size=32)


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


def engine(tensor: int = 1, pipeline: int = 1, context: int = 1, policy: str = "recompute") -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=tensor * pipeline, tensor_parallel_size=tensor, decode_context_parallel_size=context
        ),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
    )


def caches(kind: type[SimpleNamespace] = FullAttentionSpec, groups: int = 1, **fields: Any) -> SimpleNamespace:
    given = {"num_kv_heads": 3, "head_size": 64, "dtype": "torch.float32", "block_size": 32, "sliding_window": None}
    names = [f"model.layers.{n}.attn" for n in range(30)]
    group = SimpleNamespace(kv_cache_spec=kind(**{**given, **fields}), layer_names=names)
    return SimpleNamespace(kv_cache_groups=[group] * groups)


def test_a_page_holds_a_block() -> None:
    assert page_spec(caches()) == SPEC
    check_engine(engine())
    check_engine(engine(tensor=4))


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (caches(groups=2), "one group of KV layers so far, not with 2"),
        (caches(SlidingWindowSpec), "full attention so far"),
        (caches(sliding_window=4096), "full attention so far"),
    ],
)
def test_other_kinds_of_attention_are_refused_by_name(cache: SimpleNamespace, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        page_spec(cache)


def test_a_quantized_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="uint8"):
        page_spec(caches(dtype="torch.uint8"))
    with pytest.raises(ValueError, match="no quantized KV cache"):
        page_spec(caches(dtype="torch.int8"))


@pytest.mark.parametrize("several", [{"pipeline": 2}, {"tensor": 2, "pipeline": 2}, {"tensor": 2, "context": 2}])
def test_other_ways_to_share_a_model_are_refused(several: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="tensor-parallel engines, and no pipeline- or context-parallel ones"):
        check_engine(engine(**several))


def test_an_engine_that_would_fail_requests_is_refused() -> None:
    with pytest.raises(ValueError, match='"kv_load_failure_policy": "recompute"'):
        check_engine(engine(policy="fail"))


ZERO_COPY = {
    "device_config.device_type": ("cpu", "cuda", "on a CPU"),
    "parallel_config.world_size": (1, 2, "with one worker"),
    "parallel_config.distributed_executor_backend": ("uni", "mp", "in the process of its scheduler"),
    "cache_config.enable_prefix_caching": (True, False, "with enable_prefix_caching"),
    "max_concurrent_batches": (1, 2, "without async scheduling"),
}


def for_zero_copy(wrong: str | None = None) -> SimpleNamespace:
    config = SimpleNamespace()
    for path, (good, bad, _) in ZERO_COPY.items():
        inner, _, name = path.rpartition(".")
        if inner and not hasattr(config, inner):
            setattr(config, inner, SimpleNamespace())
        setattr(getattr(config, inner) if inner else config, name, bad if path == wrong else good)
    return config


@pytest.mark.parametrize("wrong", ZERO_COPY)
def test_zero_copy_says_what_it_needs(wrong: str) -> None:
    check_zero_copy(for_zero_copy(), SimpleNamespace(kv_cache_layout="BLHNC"))
    with pytest.raises(ValueError, match=ZERO_COPY[wrong][2]):
        check_zero_copy(for_zero_copy(wrong), SimpleNamespace(kv_cache_layout="BLHNC"))


def test_zero_copy_needs_all_layers_of_a_block_together() -> None:
    with pytest.raises(ValueError, match="blocks outermost"):
        check_zero_copy(for_zero_copy(), SimpleNamespace(kv_cache_layout="LBHNC"))


def test_engines_that_copy_and_engines_that_do_not_have_the_same_pages() -> None:
    assert inside_a_block("BLHNC") == inside_a_block("LBHNC") == "HNC"
    assert inside_a_block("LBNHC") == "NHC"


def test_the_settings_of_the_door() -> None:
    assert door_settings(SPEC, 2, {}) == DoorSettings(None, "default", SPEC, ranks=2)
    given = {"endpoint": "ipc:///x", "pool": "p", "deadline_s": 1, "pause_first_s": 0.5, "pause_max_s": 9}
    assert door_settings(SPEC, 1, given) == DoorSettings("ipc:///x", "p", SPEC, 1.0, 0.5, 9.0)


@pytest.mark.parametrize(
    "given",
    [
        {"deadline": 1}, {"spec": 1}, {"ranks": 2}, {"deadline_s": 0}, {"pause_max_s": float("nan")},
        {"deadline_s": "0.5"}, {"deadline_s": None}, {"deadline_s": True}, {"deadline_s": [1]}, {7: 1},
        {"pool": 5}, {"pool": ""}, {"pool": None}, {"endpoint": 5}, {"endpoint": "tcp://host:1"}, {"endpoint": "here"},
        {"pause_first_s": 9, "pause_max_s": 1},
    ],
)  # fmt: skip
def test_other_settings_are_refused_with_their_name(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(given)))):
        door_settings(SPEC, 1, given)


def test_a_pool_that_does_not_fit_is_told_with_the_difference() -> None:
    pool = SimpleNamespace(spec=KVSpec(page_size=16), ranks=2)
    with pytest.raises(ConfigError, match="page_size is 16, needed 32, ranks is 2, needed 4"):
        check(pool, DoorSettings(None, "default", SPEC, ranks=4))
    check(pool, DoorSettings(None, "default", pool.spec, ranks=2))
