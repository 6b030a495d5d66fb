"""Quantized pages in the Triton kernels, interpreted: the reference's bytes, and attention over them."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.kernel_cases import INF, NAN, Case, Shape, assert_near, bits, make_case, naive_attention, sliced
from bench.kernel_problems import KINDS, Problem
from bench.traffic import counted
from radixkv.config import QUANTIZED, KVSpec, Layout
from radixkv.errors import BadRequest
from radixkv.kernels import (
    LayerPages,
    Rotary,
    append,
    arena_view,
    copy_rows,
    decode_attention,
    group_prefixes,
    scatter_pages,
    views,
)
from radixkv.kernels.dispatch import Impl

QUICK = settings(deadline=None, derandomize=True, max_examples=4, database=None)
INT = torch.int32
IMPLEMENTATIONS: tuple[Impl, Impl] = ("torch", "triton")


def appended(impl: Impl, layout: Layout, k: Tensor, v: Tensor, slots: Tensor, **turn: object) -> tuple[Tensor, object]:
    """(the bytes of three pages, what append gives back)."""
    memory = torch.full((3 * layout.page_stride,), 0xFF, dtype=torch.uint8)
    return memory, append(k, v, *views(memory, layout, 3)[1], slots, impl=impl, **turn)  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", QUANTIZED)
@QUICK
@given(
    seed=st.integers(0, 2**20),
    heads=st.sampled_from([1, 3, 9]),
    dim=st.sampled_from([2, 8, 32, 64, 80, 128]),
    power=st.sampled_from([-20, -6, 0, 6]),
    x_dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_append_writes_the_bytes_of_the_reference(
    dtype: str, seed: int, heads: int, dim: int, power: int, x_dtype: torch.dtype
) -> None:
    layout = Layout.of(KVSpec(2, heads, dim, dtype, 4))
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn((2, 6, heads, dim), generator=draw) * 2.0**power).to(x_dtype)
    k[1] = (k[1] * 4).round() / 4  # ties
    k[2, 0], v[2, 0] = 0.0, -0.0
    v[3, 0, :2], k[3, 0, -1:] = torch.tensor([INF, 1.0]), NAN
    slots = torch.tensor([9, 0, -1, 3, 11, 4])
    both = [appended(impl, layout, k, v, slots)[0] for impl in IMPLEMENTATIONS]
    one, other = (one_nan(memory, layout) for memory in both)
    assert torch.equal(one, other)


def one_nan(memory: Tensor, layout: Layout) -> Tensor:
    """The memory with the same bits in each NaN: which ones it has is nobody's business."""
    memory = memory.clone()
    for layer in views(memory, layout, 3):
        for side in layer:
            if side.scales is None:
                side.codes.view(torch.uint8)[side.codes.float().isnan()] = 0x7F
            else:
                side.scales[side.scales.isnan()] = NAN
    return memory


def test_every_fp8_number_and_what_lies_between_them() -> None:
    """Append rounds as torch does; reading gives back all 256 codes, NaN as NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    finite = numbers[numbers.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    near = [torch.nextafter(middles, torch.tensor(side)) for side in (-INF, INF)]
    x = torch.cat([finite, middles, *near, torch.tensor([448.1, 464.0, -465.0, 1e30, INF, -INF, NAN, 1e-30, -1e-45])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 128)).view(-1, 1, 128)
    layout = Layout.of(KVSpec(1, 1, 128, "fp8_e4m3", 16))
    memory = torch.zeros(layout.page_stride, dtype=torch.uint8)
    keys, values = views(memory, layout, 1)[0]
    append(x, x, keys, values, torch.arange(len(x)), impl="triton")
    got = keys.codes.flatten(0, 1)[: len(x)].view(torch.uint8)
    wanted = torch.where(x.isfinite(), x.clamp(-448, 448), NAN).to(torch.float8_e4m3fn)
    assert torch.equal(
        torch.where((got & 0x7F) == 0x7F, 0x7F, got), torch.where(wanted.float().isnan(), 0x7F, bits(wanted))
    )

    keys.codes.view(torch.uint8)[0, :2, 0] = codes.view(2, 128)
    values.codes.view(torch.uint8)[0, :2, 0] = codes.view(2, 128)
    q, table = torch.zeros(1, 1, 128), torch.zeros(1, 1, dtype=INT)
    for token in range(2):  # attention to one token gives its value
        keys.codes.view(torch.uint8)[0, 0, 0] = 0
        values.codes.view(torch.uint8)[0, 0, 0] = codes.view(2, 128)[token]
        out = decode_attention(q, keys, values, table, torch.ones(1, dtype=INT), impl="triton")
        assert torch.equal(bits(out[0, 0].nan_to_num(7.0)), bits(numbers.view(2, 128)[token].nan_to_num(7.0) + 0.0))


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int4"])
def test_append_turns_keys_and_queries_first(dtype: str) -> None:
    layout = Layout.of(KVSpec(2, 3, 80, dtype, 4))
    draw = torch.Generator().manual_seed(5)
    k, v, q = (torch.randn((3, heads, 80), generator=draw) for heads in (3, 3, 9))
    angles = torch.rand((50, 20), generator=draw) * 6
    for interleaved in (False, True):
        turn = Rotary(angles.cos(), angles.sin(), torch.tensor([0, 7, 49]), interleaved)
        (mine, my_q), (right, right_q) = (
            appended(impl, layout, k, v, torch.arange(3), rotary=turn, q=q) for impl in ("triton", "torch")
        )
        torch.testing.assert_close(my_q, right_q)
        for a, b in zip(*(views(memory, layout, 3)[1] for memory in (mine, right)), strict=True):
            assert (a.codes.view(torch.uint8) != b.codes.view(torch.uint8)).float().mean() < 0.01  # a rounding apart
            if a.scales is not None:
                torch.testing.assert_close(a.scales[0, :3], b.scales[0, :3])


@pytest.mark.parametrize(("kind", "dtype"), list(zip(KINDS, [*QUANTIZED] * 2, strict=True)))
def test_every_kind_of_attention_over_quantized_pages(kind: str, dtype: str) -> None:
    """The random problems have all pairs; ``python -m fuzz.kernels`` runs more of them."""
    seed = next(seed for seed in itertools.count(300) if Problem.of(seed).kind == kind)
    problem = Problem.of(seed)
    problem = dataclasses.replace(problem, shape=dataclasses.replace(problem.shape, quantized=dtype))
    assert_near(problem.got("triton"), problem.wanted(), problem.shape.dtype)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_garbage_changes_no_bit(dtype: str) -> None:
    results = []
    for fill, padding in ((0.0, 0), (NAN, 2**31 - 1), (INF, -1)):
        case = make_case(Shape([33, 17, 70], 2, 1, shared=True, quantized=dtype), fill=fill, padding=padding)
        results.append(sliced(case, 3, group_prefixes(case.page_table, case.lengths, 16)))
    for out, lse in results[1:]:
        assert torch.equal(bits(out), bits(results[0][0]))
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_each_byte_of_a_group_is_read_once(dtype: str) -> None:
    case = make_case(Shape([96 + 3 * row for row in range(3)], 4, 2, 64, 16, shared=True, quantized=dtype))
    prefixes = group_prefixes(case.page_table, case.lengths, 16)
    with counted(case.arena) as traffic:
        got = sliced(case, 0, prefixes)
    assert_near(got, naive_attention(case), torch.float32)
    tokens = {(page, row) for pages, length in zip(case.page_table.tolist(), case.lengths.tolist(), strict=True)
              for page, row in ((pages[token // 16], token % 16) for token in range(length))}  # fmt: skip
    assert traffic.pages_read == len(tokens) * case.token_bytes


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_offsets_are_64_bit_and_rows_move_as_bytes(dtype: str) -> None:
    stride, pool = 2**21, 2**10 + 2
    layout = dataclasses.replace(Layout.of(KVSpec(1, 1, 64, dtype, 16)), page_stride=stride)
    memory = torch.empty(pool * stride, dtype=torch.uint8)  # untouched memory takes none
    arena, pages = arena_view(memory, layout, pool), views(memory, layout, pool)[0]
    far = pool - 1
    assert arena[far].storage_offset() > 2**31
    draw = torch.Generator().manual_seed(1)
    k, v = torch.randn((2, 40, 1, 64), generator=draw)
    ids = torch.tensor([far, 0, 2**10 - 1])
    token = torch.arange(40)
    append(k, v, *pages, ids[token // 16] * 16 + token % 16, impl="triton")
    q, lengths = torch.randn((1, 2, 64), generator=draw), torch.tensor([40], dtype=INT)
    got = decode_attention(q, *pages, ids.int()[None], lengths, impl="triton")
    torch.testing.assert_close(got, decode_attention(q, *pages, ids.int()[None], lengths), atol=2e-5, rtol=2e-5)
    copy_rows(arena, torch.tensor([[far, far - 1, 16]], dtype=INT), impl="triton")
    assert torch.equal(arena[far - 1], arena[far])
    scatter_pages(arena[far - 1 :].clone(), arena, torch.tensor([1, 2], dtype=INT), impl="triton")
    assert torch.equal(arena[2], arena[far])


def test_a_page_out_of_the_pool_makes_its_row_nan_and_heads_lie_in_one_piece() -> None:
    case: Case = make_case(Shape([20, 20], quantized="int4"))
    wanted = sliced(case, 0)[0]
    case.page_table[0, 1] = len(case.arena)
    got = sliced(case, 0)[0]
    assert got[0].isnan().all()
    assert torch.equal(got[1], wanted[1])
    keys, values = case.pages
    torn = dataclasses.replace(keys, codes=keys.codes.transpose(2, 3).contiguous().transpose(2, 3))
    with pytest.raises(BadRequest, match="in one piece"):
        decode_attention(case.q, torn, values, case.page_table.clamp(0, 1), case.lengths, impl="triton")
    with pytest.raises(BadRequest, match="in one piece"):
        layer = LayerPages(torn, values)
        append(torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), *layer, torch.zeros(1, dtype=torch.int64), impl="triton")
