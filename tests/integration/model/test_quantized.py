"""Quantized pools under the Transformers adapter: a tiny random Llama over a daemon; SmolLM2 in 8 and 4 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import radixkv
from radixkv.adapters.transformers import PagedCache, PagedModel
from radixkv.adapters.transformers.pages import LocalPages
from radixkv.config import QUANTIZED, KVSpec
from radixkv.demo.options import DOCUMENT

TINY_POOL = {"layers": 3, "kv_heads": 2, "head_dim": 8, "page_size": 4, "pages": 64}
NAMESPACE = radixkv.Namespace("tiny")


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 97, length).tolist()


@pytest.fixture()
def pools(daemon_factory: Any) -> Any:
    daemon = daemon_factory(pools=[{**TINY_POOL, "name": dtype, "dtype": dtype} for dtype in QUANTIZED])
    with radixkv.connect(daemon.endpoint) as client:
        yield client.pool


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_cached_or_not_in_a_pool_or_not_the_answer_is_the_same(llama: Any, pools: Any, dtype: str) -> None:
    """What a prompt's tokens see are quantized keys, whoever computed them; the last page's rows are copied."""
    pool = pools(dtype)
    assert pool.spec.dtype == dtype
    tokens = prompt_of(24)
    paged = PagedModel(llama, pool, NAMESPACE, chunk_tokens=10)
    first, again = paged.greedy(tokens, 12), paged.greedy(tokens, 12)
    assert (first.cached_tokens, again.cached_tokens) == (0, 23)
    assert again.shared
    alone = PagedModel(llama, kv_dtype=dtype).greedy(tokens, 12)
    assert first.tokens == again.tokens == alone.tokens
    both = paged.batch([tokens, tokens[:20]], 4)
    with both:
        logits = both.prefill()
        assert int(logits[0].argmax()) == first.tokens[0]


def test_errors_grow_as_bits_are_dropped(llama: Any) -> None:
    tokens = prompt_of(40)
    exact = _last_logits(PagedModel(llama, kv_dtype="float32"), tokens)
    off = {
        dtype: float((_last_logits(PagedModel(llama, kv_dtype=dtype), tokens) - exact).abs().max())
        for dtype in QUANTIZED
    }
    assert 0.0 < off["int8"] < off["fp8_e4m3"] < off["int4"]
    assert off["int8"] < 0.05 * float(exact.abs().max())


def _last_logits(paged: PagedModel, tokens: list[int]) -> torch.Tensor:
    with paged.open(tokens) as sequence:
        return sequence.logits()


def test_refusals(llama: Any, pools: Any) -> None:
    with pytest.raises(ValueError, match="kv_dtype = 'int4', but the pool has 'int8'"):
        PagedModel(llama, pools("int8"), NAMESPACE, kv_dtype="int4")
    with pytest.raises(radixkv.RadixKVError, match="allowed: float32, float16, bfloat16, fp8_e4m3, int8, int4"):
        PagedModel(llama, kv_dtype="int2")
    with pytest.raises(ValueError, match="dtype = 'float16', the model needs 'float32'"):
        PagedModel(llama, kv_dtype="float16")


TOKENS = 192
LOGITS_OFF_AT_MOST = {"float32": 1e-3, "int8": 2.0, "fp8_e4m3": 8.0, "int4": 25.0}
"""Of the figures in docs/kernels.md, rounded up: they are measured on one text."""


@pytest.mark.model
def test_smollm2_in_8_and_4_bits(smollm2_model: Any) -> None:
    """192 tokens of the handbook through pages of each dtype, against Transformers' own cache in fp32; prints both."""
    model, tokenizer = smollm2_model
    tokens = torch.tensor([tokenizer(DOCUMENT.read_text())["input_ids"][:TOKENS]])
    PagedModel(model)  # its attention now reads pages, where there are some
    with torch.inference_mode():
        exact = model(input_ids=tokens).logits[0]
    worst: dict[str, float] = {}
    for dtype, allowed in LOGITS_OFF_AT_MOST.items():
        cache = PagedCache(LocalPages(KVSpec(dtype=dtype), TOKENS), seen=0)
        with torch.inference_mode():
            first = model(input_ids=tokens[:, :-1], past_key_values=cache, use_cache=True).logits[0]
            last = model(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True).logits[0]  # decoded
        logits = torch.cat([first, last])
        off = (logits - exact).abs()
        divergence = torch.nn.functional.kl_div(
            logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none"
        )
        same = float((logits.argmax(-1) == exact.argmax(-1)).double().mean())
        worst[dtype] = float(off.max())
        print(
            f"{dtype}: {KVSpec(dtype=dtype).bytes_per_token} bytes a token; logits off by {off.max():.3g} at most, "
            f"{off.mean():.3g} on average; KL {divergence.sum(-1).mean():.3g} nats; {same:.1%} same first token"
        )
        assert worst[dtype] <= allowed, dtype
        assert float(off[-1].max()) <= allowed
        assert same >= (0.95 if dtype in {"float32", "int8"} else 0.7), dtype
    assert worst["float32"] < worst["int8"] < worst["int4"]
