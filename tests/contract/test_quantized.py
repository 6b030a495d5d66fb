"""Quantized pools: whoever moves pages knows nothing of scales, and what is read is always what was written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import radixkv
from radixkv.config import QUANTIZED
from radixkv.kernels import QuantizedPages, append, decode_attention
from radixkv.kernels.quantized import dequantize, quantize

PAGE, PAGES, HEADS, DIM, LAYERS = 4, 12, 3, 40, 2
SHAPE = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "page_size": PAGE, "pages": PAGES, "host_pages": 24}
NAMESPACE = radixkv.Namespace("quantized")


@pytest.fixture(scope="module")
def daemon(daemon_factory: Any) -> Any:
    pools = [{**SHAPE, "name": dtype, "dtype": dtype} for dtype in QUANTIZED]
    return daemon_factory(pools=pools, supervised=True, heartbeat_s=30.0)


@pytest.fixture(params=QUANTIZED)
def pool(request: Any, daemon: Any) -> Any:
    with radixkv.connect(daemon.endpoint, timeout=20) as client:
        yield client.pool(request.param)


def numbers(tokens: int, layer: int, kind: int) -> torch.Tensor:
    """[tokens, heads, dim]: keys (0) or values (1) of a prompt's first tokens, the same however many there are."""
    draw = torch.Generator().manual_seed(10 * layer + kind)
    return torch.randn((100, HEADS, DIM), generator=draw)[:tokens] * 3


def write(seq: Any, begin: int) -> None:
    pool, token = seq.pool, torch.arange(begin, seq.length)
    slots = torch.tensor(seq.page_table).long()[token // PAGE] * PAGE + token % PAGE
    for layer in range(LAYERS):
        k, v = (numbers(seq.length, layer, kind)[begin:] for kind in (0, 1))
        append(k, v, pool.keys(layer), pool.values(layer), slots)
    seq.commit(seq.length)


def check(seq: Any, tokens: int) -> None:
    """Of the first ``tokens`` all layers hold what was written, to the bit."""
    token = torch.arange(tokens)
    place = (torch.tensor(seq.page_table).long()[token // PAGE], token % PAGE)
    for layer in range(LAYERS):
        for kind, side in enumerate((seq.pool.keys(layer), seq.pool.values(layer))):
            assert isinstance(side, QuantizedPages)
            codes = side.codes.view(torch.uint8)[place].view(side.codes.dtype)
            found = dequantize(codes, None if side.scales is None else side.scales[place])
            assert torch.equal(found, dequantize(*quantize(numbers(tokens, layer, kind), side.dtype)))


def test_pages_are_shared_copied_moved_to_the_host_and_outlive_the_daemon(pool: Any, daemon: Any) -> None:
    prompt = list(range(16))
    with pool.reserve(prompt, namespace=NAMESPACE) as seq:
        write(seq, 0)
        check(seq, 16)
        (child,) = seq.share(at=10)  # the partial page's rows are copied
        check(child, 10)
        child.free()
        seq.suspend()
        seq.resume()
        check(seq, 16)
    with pool.reserve(prompt, namespace=NAMESPACE) as seq:
        assert seq.cached_tokens == 15  # of the last page too, by copy_rows
        check(seq, 15)
        daemon.kill_daemon()
        daemon.wait_ready()
        seq.extend([99])
        check(seq, 15)
        assert seq.valid()
    loaded = pool.client.stats()["counters"]["loaded_pages"]
    with pool.reserve(range(1000, 1000 + PAGES * PAGE), namespace=NAMESPACE, timeout=20):
        pass  # the whole device, for a moment: the prompt goes to the host tier
    with pool.reserve(prompt, namespace=NAMESPACE, timeout=20) as seq:
        assert seq.cached_tokens == 15
        check(seq, 15)
    assert pool.client.stats()["counters"]["loaded_pages"] > loaded


def test_another_process_would_decode_the_same(pool: Any, daemon: Any) -> None:
    """A second client has a mapping of its own."""
    with radixkv.connect(daemon.endpoint, timeout=20) as other, pool.reserve([7] * 9, namespace=NAMESPACE) as seq:
        write(seq, 0)
        q, lengths = torch.ones(1, 2 * HEADS, DIM), torch.tensor([9], dtype=torch.int32)
        table = torch.tensor(seq.page_table)[None]
        mine, theirs = (
            decode_attention(q, each.keys(1), each.values(1), table, lengths) for each in (pool, other.pool(pool.name))
        )
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()


def test_a_page_has_the_bytes_that_the_spec_says(pool: Any) -> None:
    row = {"fp8_e4m3": 120, "int8": 144, "int4": 80}[pool.spec.dtype]  # 120; 120 + 12; 60 + 12, up to multiples of 16
    assert pool.spec.row_bytes == row
    assert pool.spec.page_bytes == -(-LAYERS * 2 * PAGE * row // 256) * 256
    assert pool.layout.page_stride == pool.spec.page_bytes
