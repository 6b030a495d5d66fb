"""Quantized pages in plain torch: where each byte lies, how far a number may be off, and that bytes can be moved."""

import dataclasses
import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.kernel_cases import INF, NAN, Shape, bits, make_case
from radixkv.config import QUANTIZED, KVSpec, Layout
from radixkv.errors import BadRequest
from radixkv.kernels import (
    LayerPages,
    QuantizedPages,
    append,
    arena_view,
    copy_rows,
    decode_attention,
    gather_pages,
    mla_decode_attention,
    scatter_pages,
    views,
)
from radixkv.kernels.quantized import dequantize, quantize, read

QUICK = settings(deadline=None, derandomize=True, max_examples=40, database=None)
INT = torch.int32
PAGES = 4


def pool(dtype: str, heads: int = 2, head_dim: int = 64, page_size: int = 4) -> tuple[Tensor, list[LayerPages]]:
    """(the arena's memory, all bits set; its two layers)."""
    layout = Layout.of(KVSpec(2, heads, head_dim, dtype, page_size))
    memory = torch.full((PAGES * layout.page_stride,), 0xFF, dtype=torch.uint8)
    return memory, views(memory, layout, PAGES)


def kept(x: Tensor, dtype: str) -> Tensor:
    """What is read of numbers [T, heads, D] after they were appended."""
    _, layers = pool(dtype, x.shape[1], x.shape[2])
    append(x, -x, *layers[1], torch.arange(len(x)))
    keys, values = (read(side, torch.arange(PAGES))[: len(x)] for side in layers[1])
    assert torch.equal(bits(values.nan_to_num(7.0)), bits(dequantize(*quantize(-x, dtype)).nan_to_num(7.0)))
    return keys


def bound(x: Tensor, dtype: str) -> Tensor:
    """How far a number may be off, as docs/kernels.md and ``kernels.quantized`` state it; float64."""
    size = x.double().abs()
    if dtype == "fp8_e4m3":
        return torch.maximum(size / 16, torch.tensor(2.0**-10).double())
    width = min(x.shape[-1], QUANTIZED[dtype].group)
    groups = torch.nn.functional.pad(size, (0, -x.shape[-1] % width)).unflatten(-1, (-1, width))
    largest = groups.amax(-1, keepdim=True)
    if dtype == "int8":
        steps = largest / 127 / 2 * (1 + 2**-15) + 2.0**-140
    else:
        steps = largest / 8 * (1 + 2**-7) + 2.0**-21
    return steps.expand_as(groups).flatten(-2)[..., : x.shape[-1]]


heads = st.builds(
    lambda seed, tokens, dim, power, spread: (
        torch.randn((tokens, 2, dim), generator=torch.Generator().manual_seed(seed))
        * 2.0**power
        * torch.exp2(spread * torch.randn((tokens, 2, dim), generator=torch.Generator().manual_seed(seed + 1)))
    ),
    seed=st.integers(0, 2**20),
    tokens=st.integers(1, 8),
    dim=st.sampled_from([2, 8, 30, 64, 80, 128]),
    power=st.sampled_from([-30, -12, -3, 0, 4]),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
)


@pytest.mark.parametrize("dtype", QUANTIZED)
@QUICK
@given(x=heads)
@example(x=torch.zeros(1, 2, 64))
@example(x=torch.full((1, 2, 64), -1e-30))
@example(x=torch.tensor([1.0, -1.0] * 32).expand(1, 2, 64))
def test_no_number_is_further_off_than_the_stated_bound(dtype: str, x: Tensor) -> None:
    if dtype == "fp8_e4m3":
        x = x.clamp(-448, 448)
    off = (kept(x, dtype).double() - x.double()).abs()
    assert (off <= bound(x, dtype)).all(), float((off - bound(x, dtype)).max())


@QUICK
@given(x=heads)
def test_of_4_bits_only_the_other_sign_is_more_than_half_a_step_off(x: Tensor) -> None:
    x = x[..., : min(32, x.shape[-1])]  # one group
    codes, scales = quantize(x, "int4")
    assert scales is not None
    steps = (x.double() / scales.double()).nan_to_num(0.0)
    off = (dequantize(codes, scales).double() - x.double()).abs()
    inside = (steps < 7.5) & (scales.abs() > 2.0**-14)  # below, a scale has fewer than its 11 bits
    assert (off <= scales.double().abs() * (0.5 + 2**-7))[inside].all()


def test_the_bounds_are_reached() -> None:
    """So they are no wider than need be."""
    x = torch.tensor([1.0, -1.0] * 16).expand(1, 2, 32)
    assert float((kept(x, "int4") - x).abs().max()) == 0.125  # 8 steps of 1/8, of which 7 can be said
    x = torch.tensor([127.0, 0.5, 1.5, 63.49] * 8).expand(1, 2, 32)
    assert float((kept(x, "int8") - x).abs().max()) == 0.5
    x = torch.tensor([1.0625, 17.0, 2.0**-10] * 2).expand(1, 2, 6)
    assert (kept(x, "fp8_e4m3") - x)[0, 0, :3].abs().tolist() == [0.0625, 1.0, 2.0**-10]


def test_what_is_a_code_comes_back_as_it_is() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = codes[codes.isfinite()].view(1, 2, 127)
    assert torch.equal(bits(kept(x, "fp8_e4m3")), bits(x))
    x = (torch.arange(-127.0, 128.0) / 4).expand(2, 2, 255)
    assert torch.equal(kept(x, "int8"), x)
    x = (torch.arange(-8.0, 8.0) / 2).repeat(4).expand(2, 2, 64)
    assert torch.equal(kept(x, "int4"), x)


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("damage", [NAN, INF, -INF])
def test_a_nan_or_an_infinity_stays_loud_in_its_group_and_nowhere_else(dtype: str, damage: float) -> None:
    x = torch.linspace(-3, 3, 2 * 96).view(1, 2, 96).clone()
    clean = kept(x, dtype)
    x[0, 1, 40] = damage
    got = kept(x, dtype)
    group = {"fp8_e4m3": slice(40, 41), "int8": slice(0, 96), "int4": slice(32, 64)}[dtype]
    assert got[0, 1, group].isnan().all()
    got[0, 1, group] = clean[0, 1, group]
    assert torch.equal(got, clean)


@pytest.mark.parametrize(("number", "dtype"), [(1000.0, "fp8_e4m3"), (-1e30, "fp8_e4m3"), (6e5, "int4")])
def test_what_is_too_large(number: float, dtype: str) -> None:
    got = kept(torch.tensor([number, 1.0] * 16).expand(1, 2, 32), dtype)[0, 0]
    if dtype == "int4":
        assert got.isnan().all()  # its scale is no float16: 524,032 is the most
    else:
        assert got[:2].tolist() == [math.copysign(448.0, number), 1.0]


def q4_0(numbers: list[float]) -> tuple[bytes, float]:
    """llama.cpp's rule for a group, number by number: (two codes a byte, the scale as it is kept)."""
    extreme = 0.0
    for number in numbers:
        if abs(number) > abs(extreme):
            extreme = number
    (scale,) = struct.unpack("<e", struct.pack("<e", extreme / -8))
    codes = [8 if scale == 0 else min(15, max(0, round(number / scale) + 8)) for number in numbers]
    return bytes(low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)), scale


@QUICK
@given(x=heads)
def test_bytes_lie_where_the_documentation_says(x: Tensor) -> None:
    """A row by itself: codes of all heads, then scales of all heads; int4 group by group by Q4_0's own rule."""
    tokens, count, dim = x.shape
    for dtype in QUANTIZED:
        memory, layers = pool(dtype, count, dim)
        spec = KVSpec(2, count, dim, dtype, 4)
        append(x, -x, *layers[1], torch.arange(tokens))
        row = memory[(1 * 2 + 1) * 4 * spec.row_bytes + (tokens - 1) % 4 * spec.row_bytes :]  # of layer 1's values
        if tokens > 4:
            row = row[spec.page_bytes :]
        row_bytes = bytes(row[: spec.row_bytes].numpy())
        number = -x[tokens - 1]
        if dtype == "fp8_e4m3":
            assert row_bytes == bytes(bits(number.clamp(-448, 448).to(torch.float8_e4m3fn)).numpy())
        elif dtype == "int8":
            scales = struct.unpack_from(f"<{count}f", row_bytes, -(-count * dim // 4) * 4)
            for head, scale in enumerate(scales):
                largest = max(abs(value) for value in number[head].tolist())
                assert scale == pytest.approx(largest / 127, rel=1e-6, abs=1e-44)
                for at, value in enumerate(number[head].tolist()):
                    code = struct.unpack_from("b", row_bytes, head * dim + at)[0]
                    assert abs(code - (value / scale if scale else 0)) <= 0.5001
        else:
            groups = -(-dim // 32)
            for head in range(count):
                for group in range(groups):
                    values = number[head, group * 32 : (group + 1) * 32].tolist()
                    codes, scale = q4_0(values)
                    at = (head * dim + group * 32) // 2
                    assert row_bytes[at : at + len(codes)] == codes
                    place = -(-count * dim // 2 // 2) * 2 + 2 * (head * groups + group)
                    assert struct.unpack_from("<e", row_bytes, place)[0] == scale


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_rows_and_pages_are_moved_as_the_bytes_they_are(dtype: str) -> None:
    memory, layers = pool(dtype)
    layout = Layout.of(KVSpec(2, 2, 64, dtype, 4))
    x = torch.randn(2, 8, 2, 64, generator=torch.Generator().manual_seed(3))
    for layer in layers:
        append(x[0], x[1], *layer, torch.arange(8))
    arena = arena_view(memory, layout, PAGES)
    before = [read(side, torch.arange(PAGES)) for layer in layers for side in layer]
    copy_rows(arena, torch.tensor([[1, 2, 3]], dtype=INT))
    for side, old in zip([side for layer in layers for side in layer], before, strict=True):
        new = read(side, torch.arange(PAGES))
        assert torch.equal(new[8:11], old[4:7])
        assert torch.equal(bits(new[[*range(8), *range(11, 16)]]), bits(old[[*range(8), *range(11, 16)]]))
    staging = torch.zeros(2, *arena.shape[1:], dtype=torch.uint8)
    gather_pages(arena, torch.tensor([1, 0], dtype=INT), staging)
    scatter_pages(staging, arena, torch.tensor([3, 2], dtype=INT))
    for side, old in zip([side for layer in layers for side in layer], before, strict=True):
        new = read(side, torch.arange(PAGES))
        assert torch.equal(new[8:], torch.cat([old[:4], old[4:8]]))


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_garbage_outside_the_valid_tokens_changes_no_bit(dtype: str) -> None:
    for length in range(0, 34, 3):
        shape = Shape([length, 33 - length], page_size=4, quantized=dtype)
        clean = decode_attention(*make_case(shape, fill=0.0, padding=0).arguments)
        for fill, padding in ((NAN, -1), (INF, 2**31 - 1)):
            dirty = decode_attention(*make_case(shape, fill=fill, padding=padding).arguments)
            assert torch.equal(bits(dirty), bits(clean)), (length, padding)


@pytest.mark.parametrize("dtype", QUANTIZED)
@settings(QUICK, max_examples=25)
@given(seed=st.integers(0, 2**20), length=st.integers(1, 40), dim=st.sampled_from([32, 64, 80]))
def test_attention_is_no_further_off_than_follows_from_its_numbers(
    dtype: str, seed: int, length: int, dim: int
) -> None:
    """Keys off by e: scores by d = scale |q|_1 e, weights by a factor of exp(2 d). Values off by e as well."""
    draw = torch.Generator().manual_seed(seed)
    keys, values = torch.randn((2, length, 1, dim), generator=draw)
    q = torch.randn((1, 2, dim), generator=draw)
    layout = Layout.of(KVSpec(1, 1, dim, dtype, 16))
    pages = views(torch.zeros(3 * layout.page_stride, dtype=torch.uint8), layout, 3)[0]
    append(keys, values, *pages, torch.arange(length))
    table, lengths = torch.arange(3, dtype=INT)[None], torch.tensor([length], dtype=INT)
    out, lse = decode_attention(q, *pages, table, lengths, return_lse=True)
    scores = q[0].double() @ keys[:, 0].double().T / math.sqrt(dim)
    wanted = scores.softmax(-1) @ values[:, 0].double()
    shift = q[0].double().abs().sum(-1) / math.sqrt(dim) * bound(keys, dtype).max()
    allowed = bound(values, dtype).max() + (torch.exp(2 * shift) - 1) * values.double().abs().max() + 1e-5
    assert ((out[0].double() - wanted).abs() <= allowed[:, None]).all()
    assert ((lse[0].double() - scores.logsumexp(-1)).abs() <= shift + 1e-5).all()


def test_a_quantized_view_says_what_it_is() -> None:
    for dtype in QUANTIZED:
        _, layers = pool(dtype, 3, 80)
        assert [(side.dtype, side.shape) for side in layers[0]] == [(dtype, (PAGES, 4, 3, 80))] * 2


def refused() -> dict[str, tuple[object, object]]:
    """Words of the refusal, and the pages it is about."""
    (_, int8), (_, int4), (_, fp8) = pool("int8"), pool("int4"), pool("fp8_e4m3")
    good, four, eight = int8[0].keys, int4[0].keys, fp8[0].keys
    plain = torch.zeros(PAGES, 4, 2, 64)
    return {
        "of k_pages and v_pages one is quantized": (good, plain),
        "of one dtype": (good, eight),
        "the scales of k_pages are not those": (QuantizedPages(good.codes), good),
        "the scales of v_pages are not those": (eight, QuantizedPages(eight.codes, good.scales)),
        "scales of dtype torch.float16": (QuantizedPages(good.codes, good.scales.half()), good),
        "codes of dtype torch.int32": (QuantizedPages(plain.int(), None), good),
        "wrong number of dimensions": (QuantizedPages(good.codes[0], good.scales), good),
        "differ in head dim": (QuantizedPages(four.codes[..., :16], four.scales[..., :1]),) * 2,
    }


@pytest.mark.parametrize("says", refused())
def test_refusals_name_the_argument(says: str) -> None:
    keys, values = refused()[says]
    table, lengths = torch.zeros(1, 1, dtype=INT), torch.ones(1, dtype=INT)
    with pytest.raises(BadRequest, match=says):
        decode_attention(torch.zeros(1, 2, 64), keys, values, table, lengths)


def test_what_wants_plain_pages_or_bytes_refuses_quantized_ones() -> None:
    _, layers = pool("int8", 1, 64)
    keys = layers[0].keys
    table, lengths = torch.zeros(1, 1, dtype=INT), torch.ones(1, dtype=INT)
    with pytest.raises(BadRequest, match="give the arena_view"):
        copy_rows(keys, torch.zeros(1, 3, dtype=INT))
    with pytest.raises(BadRequest, match="give the arena_view"):
        gather_pages(keys, torch.zeros(1, dtype=INT), torch.zeros(1, 4, 1, 64))
    with pytest.raises(BadRequest, match="quantized pages are not meant here"):
        mla_decode_attention(torch.zeros(1, 2, 64), keys, table, lengths, latent_dim=32, scale=1.0)


@pytest.mark.parametrize("change", [{"token_stride": 160}, {"head_stride": 65}, {"dim_stride": 2}, {"kv_stride": 577}])
def test_a_layout_that_tears_rows_apart_is_refused(change: dict[str, int]) -> None:
    layout = Layout.of(KVSpec(2, 2, 64, "int8", 4))
    memory = bytearray(2 * PAGES * layout.page_stride)
    assert len(views(memory, layout, PAGES)) == 2
    with pytest.raises(BadRequest, match="not those of whole rows"):
        views(memory, dataclasses.replace(layout, **change), PAGES)
