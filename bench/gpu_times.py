"""Attention timed on a CUDA device, beside torch's over dense keys and values, others' kernels, and a copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.gpu_peers import peers
from bench.kernel_cases import Case, Shape, random_case
from bench.rows import Row, row, single
from bench.stopwatch import Summary, summarize
from radixkv.config import QUANTIZED
from radixkv.kernels import (
    append,
    decode_attention,
    gather_pages,
    group_prefixes,
    mla_decode_attention,
    prefill_attention,
)

LAUNCHES = 50
BRAIN = torch.bfloat16
TIMED = {
    "gqa_b64_4k": Shape([4096] * 64, 32, 8, 128, 16, BRAIN),
    "gqa_b64_4k_s32": Shape([4096] * 64, 32, 8, 128, 32, BRAIN),
    "gqa_b64_4k_q4": Shape([4096] * 64, 32, 8, 128, 16, BRAIN, queries=4),
    **{f"gqa_b64_4k_{dtype}": Shape([4096] * 64, 32, 8, 128, 16, BRAIN, quantized=dtype) for dtype in QUANTIZED},
    "gqa_b1_32k": Shape([32_768], 32, 8, 128, 16, BRAIN),
    "mha_b16_4k": Shape([4096] * 16, 32, 32, 128, 16, torch.float16),
    "mqa_b64_2k": Shape([2048] * 64, 32, 1, 128, 16, BRAIN),
    "smollm2_b1_2k": Shape([2048], 9, 3, 64, 16, torch.float32),
}
BARRED, SHARE_OF_COPY = "gqa_b64_4k", 0.85
"""Decode attention of this one is to reach this share of a copy's bandwidth."""
SHARED = Shape([4096 + 256] * 64, 32, 8, 128, 16, BRAIN)
"""64 rows, 4,096 tokens of which they have in common."""
UNEVEN = Shape([131_072], 32, 8, 128, 16, BRAIN)
"""One long row, beside which 63 of 512 tokens are decoded."""


def timings(device: str, left_out: list[str], copy_bytes: int = 2**30) -> Iterator[Row]:
    """The rows, those with bars first. ``left_out`` is told what could not be measured here."""
    copied = _copy(device, copy_bytes)
    gbps = 2 * copy_bytes / copied.p50 / 1e3
    yield single("gpu.copy_gbps", "GB/s", gbps)
    for name, shape in TIMED.items():
        case = random_case(shape, device)
        mine = _time(partial(decode_attention, *case.arguments, impl="triton"))
        moved = len(shape.lengths) * shape.lengths[0] * case.token_bytes
        beside = _dense(case, shape) if shape.queries is None and not shape.quantized else 0.0
        yield row(f"gpu.decode_{name}_us", "us", mine, reference=beside)
        yield single(f"gpu.decode_{name}_gbps", "GB/s", moved / mine.p50 / 1e3, reference=gbps)
        if name == BARRED:
            share = moved / mine.p50 / 1e3 / gbps
            yield Row(f"gpu.decode_{name}_of_copy", share, "x", bar=SHARE_OF_COPY, p50=share, p99=share, at_least=True)
            for peer, launch in peers(case, shape, left_out):
                yield row(f"gpu.decode_{name}_beside_{peer}_us", "us", mine, reference=_time(launch).p50)
            yield from _shared_prefix(device)
        del case
    yield from _uneven(device)
    yield from _latent(device)
    yield from _others(device)
    yield from _layouts(device)  # takes most memory


def _dense(case: Case, shape: Shape) -> float:
    """Microseconds that torch's attention takes over the same keys and values, one after the other in memory."""
    batch, length = len(shape.lengths), shape.lengths[0]
    keys, values = (
        pages.index_select(0, case.page_table.flatten())
        .view(batch, length, shape.kv_heads, shape.head_dim).transpose(1, 2).contiguous() for pages in case.rows
    )  # fmt: skip
    attention = torch.nn.functional.scaled_dot_product_attention
    return _time(partial(attention, case.q[:, :, None], keys, values, enable_gqa=True)).p50


def _shared_prefix(device: str, shape: Shape = SHARED, common: int = 256) -> Iterator[Row]:
    """``common`` pages of all rows are those of the first; beside it the flat kernel on the same table."""
    case = random_case(shape, device)
    case.page_table[:, :common] = case.page_table[0, :common]
    prefixes = group_prefixes(case.page_table, case.lengths, shape.page_size)
    flat = _time(partial(decode_attention, *case.arguments, impl="triton"))
    grouped = _time(partial(decode_attention, *case.arguments, prefixes=prefixes, impl="triton"))
    yield row("gpu.decode_shared_prefix_us", "us", grouped, reference=flat.p50)


def _layouts(device: str, shape: Shape = TIMED[BARRED], layers: int = 16) -> Iterator[Row]:
    """Page-major, all layers of a page together, beside layer-major: a decode step's attention in each layer in turn,
    and pages to a staging buffer, which of layer-major pages has to be gathered in pieces of a layer.
    """
    batch, used = len(shape.lengths), -(-shape.lengths[0] // shape.page_size)
    page = shape.page_size * shape.kv_heads * shape.head_dim
    size = (batch * used, layers, 2, shape.page_size, shape.kv_heads, shape.head_dim)
    inner = (shape.kv_heads * shape.head_dim, shape.head_dim, 1)
    memory = torch.zeros(batch * used * layers * 2 * page, dtype=shape.dtype, device=device).normal_()
    case = random_case(dataclasses.replace(shape, lengths=shape.lengths[:1]), device)
    table = torch.randperm(batch * used, device=device).int().view(batch, used)
    q = case.q.repeat(batch, 1, 1)
    lengths = case.lengths.repeat(batch)
    ids = table[0, : min(256, used)].contiguous()
    staging = torch.empty((len(ids), *size[1:]), dtype=shape.dtype, device=device)
    steps, gathers = [], []
    for major in ((layers * 2 * page, 2 * page, page), (2 * page, batch * used * 2 * page, page)):
        arena = memory.as_strided(size, (*major, *inner))
        calls = [partial(decode_attention, q, arena[:, layer, 0], arena[:, layer, 1], table, lengths, impl="triton")
                 for layer in range(layers)]  # fmt: skip
        steps.append(_time(partial(_each, calls)))
        gathers.append(_time(partial(gather_pages, arena, ids, staging, impl="triton")))
    yield row(f"gpu.decode_{layers}_layers_page_major_us", "us", steps[0], reference=steps[1].p50)
    yield row("gpu.gather_page_major_us", "us", gathers[0], reference=gathers[1].p50)


def _each(calls: Sequence[Callable[[], Tensor]]) -> Tensor:
    for call in calls:
        out = call()
    return out


def _latent(device: str, rows: int = 64, tokens: int = 4096, heads: int = 128) -> Iterator[Row]:
    """Latent attention of DeepSeek's size; the bytes are those of the latents, once."""
    used = tokens // 16
    pages = torch.zeros(rows * used, 16, 576, dtype=BRAIN, device=device).normal_()
    table = torch.randperm(rows * used, device=device).int().view(rows, used)
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    q = torch.randn(rows, heads, 576, device=device).to(BRAIN)
    mine = _time(
        partial(mla_decode_attention, q, pages, table, lengths, latent_dim=512, scale=192**-0.5, impl="triton")
    )
    yield row("gpu.decode_latent_us", "us", mine)
    yield single("gpu.decode_latent_gbps", "GB/s", 2 * pages.numel() / mine.p50 / 1e3)


def _uneven(device: str, shape: Shape = UNEVEN, short: int = 512, rows: int = 64) -> Iterator[Row]:
    """A long row by itself, and with short rows beside it: that should cost little more."""
    one = random_case(shape, device)
    alone = _time(partial(decode_attention, *one.arguments, impl="triton"))
    q = one.q.repeat(rows, 1, 1)
    table, lengths = one.page_table.repeat(rows, 1), one.lengths.repeat(rows)
    lengths[1:] = short
    together = _time(partial(decode_attention, q, *one.pages, table, lengths, impl="triton"))
    yield row("gpu.decode_uneven_us", "us", together, reference=alone.p50)


def _others(device: str, tokens: int = 4096) -> Iterator[Row]:
    """A prefill of as many tokens as are cached, an append of them, and 256 pages to a staging buffer."""
    case = random_case(Shape([2 * tokens], 32, 8, 128, 16, BRAIN), device)
    q = torch.randn(tokens, 32, 128, device=device).to(BRAIN)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    arguments = (*case.pages, case.page_table, case.lengths, starts)
    yield row("gpu.prefill_4k_over_4k_us", "us", _time(partial(prefill_attention, q, *arguments, impl="triton")))
    k = torch.randn(tokens, 8, 128, device=device).to(BRAIN)
    slots = torch.arange(tokens, device=device)
    yield row("gpu.append_4k_us", "us", _time(partial(append, k, k, *case.pages, slots, impl="triton")))
    ids = case.page_table[0, :256].contiguous()
    staging = torch.empty((len(ids), *case.arena.shape[1:]), dtype=BRAIN, device=device)
    moved = 2 * staging.numel() * staging.itemsize
    gathered = _time(partial(gather_pages, case.arena, ids, staging, impl="triton"))
    yield single("gpu.gather_256_pages_gbps", "GB/s", moved / gathered.p50 / 1e3)


def _copy(device: str, size: int) -> Summary:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    return _time(partial(torch.empty_like(source).copy_, source))


def _time(launch: Callable[[], object]) -> Summary:
    """Microseconds of one call on the device, the L2 cache washed before each."""
    wash = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        launch()
    event = partial(torch.cuda.Event, enable_timing=True)
    events = [(event(), event()) for _ in range(LAUNCHES)]
    for begin, end in events:
        wash.zero_()
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return summarize(begin.elapsed_time(end) * 1e3 for begin, end in events)
