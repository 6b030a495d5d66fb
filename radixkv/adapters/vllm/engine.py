"""What of a vLLM engine matters here: whether it can be served, what a page has to hold, what its keys depend on.

vLLM's configuration is used by its attributes, which is why this file runs without vLLM.
"""

from __future__ import annotations

from typing import Any

from radixkv.config import KVSpec


def check_engine(config: Any) -> None:
    """Errors: ValueError for what is not built, or would break the promise that a request never fails."""
    parallel = config.parallel_config
    others = parallel.world_size // parallel.tensor_parallel_size
    if others != 1 or getattr(parallel, "decode_context_parallel_size", 1) != 1:
        raise ValueError("radixkv serves tensor-parallel engines, and no pipeline- or context-parallel ones so far")
    policy = config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise ValueError(
            f'radixkv needs "kv_load_failure_policy": "recompute" in the KV transfer config, not {policy!r}'
        )


def check_zero_copy(config: Any, kv_cache_config: Any) -> None:
    """What computing in radixkv's pages needs besides. Errors: ValueError."""
    wrong = {
        "on a CPU": config.device_config.device_type != "cpu",
        "with one worker, in the process of its scheduler (executor uni)": (
            config.parallel_config.world_size != 1 or config.parallel_config.distributed_executor_backend != "uni"
        ),
        "with enable_prefix_caching": not config.cache_config.enable_prefix_caching,
        "without async scheduling": config.max_concurrent_batches != 1,
        "with blocks outermost in memory": kv_cache_config.kv_cache_layout not in (None, "BLHNC"),
    }
    missing = [what for what, is_wrong in wrong.items() if is_wrong]
    if missing:
        raise ValueError(f"zero copy serves engines {', '.join(missing)}")


def page_spec(kv_cache_config: Any) -> KVSpec:
    """What a page has to hold. Errors: ValueError for models of more than one kind of attention; ConfigError."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(f"radixkv serves models with one group of KV layers so far, not with {len(groups)}")
    spec, names = groups[0].kv_cache_spec, groups[0].layer_names
    if type(spec).__name__ != "FullAttentionSpec" or spec.sliding_window is not None:
        raise ValueError(f"radixkv serves full attention so far, not {spec}")
    if str(spec.dtype) == "torch.int8":  # what radixkv calls int8 has its scales in the page
        raise ValueError(f"radixkv serves no quantized KV cache of vLLM's, as of {spec.dtype}")
    return KVSpec(
        layers=len(names),
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        page_size=spec.block_size,
    )


def engine_settings(config: Any, kv_cache_config: Any, version: str) -> dict[str, Any]:
    """Everything but the request that keys and values, or their bytes in a block, depend on."""
    model = config.model_config
    group = kv_cache_config.kv_cache_groups[0]
    return {
        "vllm": version,
        "revision": [model.revision, model.code_revision, getattr(model.hf_config, "_commit_hash", None)],
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "architecture": model.hf_config.to_dict(),
        "max_model_len": model.max_model_len,  # some kinds of rope depend on it
        "load_format": [config.load_config.load_format, model.seed if config.load_config.load_format == "dummy" else 0],
        "attention": [str(config.attention_config.backend), inside_a_block(kv_cache_config.kv_cache_layout)],
        "cache": [config.cache_config.cache_dtype, str(group.kv_cache_spec), group.layer_names],
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "device": config.device_config.device_type,
    }


def inside_a_block(layout: str | None) -> str:
    """Of a layout such as LBHNC, axes outermost first, what lies inside a block: HNC."""
    return "".join(axis for axis in layout or "" if axis not in "LB")
