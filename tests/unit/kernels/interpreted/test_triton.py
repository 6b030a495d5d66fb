"""The Triton kernels, interpreted, against the torch reference. Shapes are small: a program costs milliseconds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.kernel_cases import (
    INF,
    NAN,
    Shape,
    assert_near,
    bits,
    empty_arena,
    make_case,
    naive_attention,
    sliced,
    sparse_arena,
)
from radixkv.errors import BadRequest
from radixkv.kernels import LayerPages, append, attention_launch, copy_rows, decode_attention

QUICK = settings(deadline=None, derandomize=True, max_examples=20, database=None)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INT = torch.int32

shapes = st.builds(
    lambda lengths, heads, head_dim, page_size, dtype, shared: Shape(
        lengths, *heads, head_dim, page_size, dtype, shared=shared
    ),
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (9, 3), (5, 1)]),
    head_dim=st.sampled_from([64, 128]),
    page_size=st.sampled_from([16, 32]),
    dtype=st.sampled_from(DTYPES),
    shared=st.booleans(),
)


def test_this_is_the_interpreter() -> None:
    assert attention_launch.INTERPRETED


@QUICK
@given(shape=shapes, splits=st.sampled_from([0, 2, 3, 7]), seed=st.integers(0, 9))
def test_decode_equals_the_reference(shape: Shape, splits: int, seed: int) -> None:
    case = make_case(shape, seed)
    wanted = decode_attention(*case.arguments, return_lse=True)
    assert_near(sliced(case, splits), wanted, shape.dtype)


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim", "page_size"),
    [
        (2, 2, 64, 16),  # MHA
        (2, 2, 128, 32),
        (8, 2, 128, 16),  # GQA
        (8, 2, 64, 32),
        (8, 1, 64, 16),  # MQA
        (8, 1, 128, 32),
        (71, 1, 64, 16),  # more query heads than one block: three blocks, the last one padded
        (2, 1, 80, 16),  # head dims that are no power of two, or small
        (2, 1, 8, 4),
        (2, 1, 256, 16),
        (2, 1, 64, 1),  # page sizes that are no power of two, or 1
        (2, 1, 64, 5),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_of_each_kind(
    query_heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    case = make_case(Shape([0, 97], query_heads, kv_heads, head_dim, page_size, dtype))
    got = decode_attention(*case.arguments, return_lse=True, impl="triton")
    assert got[0].dtype == dtype
    assert_near(got, naive_attention(case), dtype)
    assert not got[0][0].any()
    assert (got[1][0] == -INF).all()


@pytest.mark.parametrize("splits", [0, 4])
@pytest.mark.parametrize("fill", [NAN, INF, 1e38])
def test_garbage_outside_the_valid_tokens_changes_no_bit(fill: float, splits: int) -> None:
    shape = Shape([0, 1, 16, 17, 64, 65, 100], 1, 1)
    clean = sliced(make_case(shape, fill=0.0, padding=0), splits)
    for padding in (-1, 2**31 - 1):
        dirty = sliced(make_case(shape, fill=fill, padding=padding), splits)
        assert torch.equal(bits(dirty[0]), bits(clean[0]))
        assert torch.equal(dirty[1], clean[1])


def test_more_splits_than_tokens_and_the_most_splits() -> None:
    case = make_case(Shape([0, 130], 1, 1))
    wanted = decode_attention(*case.arguments, return_lse=True)
    for splits in (17, 128):
        assert_near(sliced(case, splits), wanted, torch.float32)


def test_no_rows_and_a_page_table_without_columns() -> None:
    assert sliced(make_case(Shape([])), 2)[0].shape == (0, 4, 64)
    out, lse = sliced(make_case(Shape([0], spare_entries=0)), 2)
    assert not out.any()
    assert (lse == -INF).all()


@pytest.mark.parametrize("splits", [0, 3])
def test_what_was_not_checked_is_loud_and_harms_no_other_row(splits: int) -> None:
    case = make_case(Shape([40, 150, 5, 20], 2, 1, spare_entries=0))
    wanted = decode_attention(*case.arguments)
    for page in (-1, len(case.arena), 2**31 - 1, -(2**31)):
        case.page_table[1, 7] = page
        out, lse = sliced(case, splits)
        assert out[1].isnan().all()
        assert lse[1].isnan().all()
        torch.testing.assert_close(out[[0, 2, 3]], wanted[[0, 2, 3]], atol=2e-5, rtol=2e-5)
    for length in (161, 2**31 - 1):
        case.lengths[1] = length
        case.page_table[1] = 0
        out, lse = sliced(case, splits)
        assert out[1].isnan().all()
        torch.testing.assert_close(out[[0, 2, 3]], wanted[[0, 2, 3]], atol=2e-5, rtol=2e-5)
    for length in (-1, -(2**31)):
        case.lengths[1] = length
        out, lse = sliced(case, splits)
        assert not out[1].any()
        assert (lse[1] == -INF).all()


def test_what_these_kernels_cannot_read_is_refused() -> None:
    q, table, lengths = torch.zeros(1, 2, 64), torch.zeros(1, 1, dtype=INT), torch.ones(1, dtype=INT)
    with pytest.raises(BadRequest, match="beyond the page table"):
        decode_attention(q, *torch.zeros(2, 2, 16, 1, 64), table, lengths + 16, impl="triton")

    apart = torch.zeros(2, 16, 2, 128)[..., ::2]
    with pytest.raises(BadRequest, match="keys in one piece"):
        decode_attention(q, apart, apart, table, lengths, impl="triton")
    with pytest.raises(BadRequest, match="in one piece"):
        copy_rows(apart, torch.zeros(1, 3, dtype=INT), impl="triton")
    with pytest.raises(BadRequest, match="in one piece"):
        append(torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), apart, apart, torch.tensor([0]), impl="triton")

    wide = torch.zeros(2, 16, 1, 257)
    with pytest.raises(BadRequest, match="head dims up to 256"):
        decode_attention(torch.zeros(1, 1, 257), wide, wide, table, lengths, impl="triton")

    far = sparse_arena(torch.float16).as_strided((1, 2, 1, 64), (1, 2**31, 64, 1))
    with pytest.raises(BadRequest, match="too far apart"):
        decode_attention(q.half(), far, far, table, lengths, impl="triton")


def test_q_and_new_tokens_may_be_strided() -> None:
    case = make_case(Shape([40, 3], 2, 1))
    q, keys, values, table, lengths = case.arguments
    wanted = decode_attention(*case.arguments)
    by_dim = torch.full((2, 4, 128), NAN)[:, ::2, ::2]
    by_dim.copy_(q)
    table = torch.cat([table, table], 1)[:, : table.shape[1]]
    assert not table.is_contiguous()
    got = decode_attention(by_dim, keys, values, table, lengths, impl="triton")
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)

    fused = torch.randn(3, 3, 64)  # q, k and v of a token side by side, as a fused projection leaves them
    arenas = [empty_arena(Shape([], kv_heads=1).layout, 2, NAN) for _ in range(2)]
    slots = torch.tensor([[5, 0], [31, 0], [0, 0]])[:, 0]
    for arena, impl in zip(arenas, ("torch", "triton"), strict=True):
        append(fused[:, 1:2], fused[:, 2:3], arena[:, 1, 0], arena[:, 1, 1], slots, impl=impl)
    assert torch.equal(bits(arenas[0]), bits(arenas[1]))


@QUICK
@given(
    slots=st.lists(st.integers(0, 3 * 16 - 1), max_size=6, unique=True),
    skipped=st.integers(0, 2),
    heads=st.sampled_from([(1, 64), (3, 64), (2, 128), (9, 128), (2, 5)]),
    dtype=st.sampled_from(DTYPES),
)
def test_append_equals_the_reference(
    slots: list[int], skipped: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    shape = Shape([], kv_heads=heads[0], head_dim=heads[1], dtype=dtype)
    arenas = [empty_arena(shape.layout, 3, NAN) for _ in range(2)]
    order = torch.tensor([*slots, *[-1] * skipped], dtype=torch.int64)
    k, v = torch.randn(2, len(order), *heads).to(dtype)
    for arena, impl in zip(arenas, ("torch", "triton"), strict=True):
        append(k, v, arena[:, 1, 0], arena[:, 1, 1], order, impl=impl)
    assert torch.equal(bits(arenas[0]), bits(arenas[1]))


def test_append_skips_a_slot_out_of_the_pool_that_was_not_checked() -> None:
    from radixkv.kernels import triton_write

    guarded = empty_arena(Shape([], kv_heads=1).layout, 4, 0.0)
    pool = guarded[:3]
    slots = torch.tensor([3 * 16, 2**62, -(2**62), -2, 47])
    layer = LayerPages(pool[:, 1, 0], pool[:, 1, 1])
    triton_write.append(torch.ones(5, 1, 64), torch.ones(5, 1, 64), layer, slots, None, None)
    assert guarded[2, 1, :, 15].all()
    guarded[2, 1, :, 15] = 0
    assert not guarded.any()


rows_of_copy = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 16)), max_size=5)


@QUICK
@given(rows=rows_of_copy, dims=st.sampled_from([4, 5, 6]), dtype=st.sampled_from(DTYPES))
def test_copy_rows_equals_the_reference(rows: list[tuple[int, int, int]], dims: int, dtype: torch.dtype) -> None:
    arena = empty_arena(Shape([], kv_heads=1, dtype=dtype).layout, 4, NAN)
    arena[..., 1:].copy_(torch.randn(arena[..., 1:].shape))
    arenas = [arena, torch.empty_like(arena).copy_(arena)]
    for each, impl in zip(arenas, ("torch", "triton"), strict=True):
        pages = {4: each[:, 1, 0], 5: each[:, 1], 6: each}[dims]
        copy_rows(pages, torch.tensor(rows, dtype=INT).reshape(-1, 3), impl=impl)
    assert torch.equal(bits(arenas[0]), bits(arenas[1]))


def test_copy_rows_skips_an_entry_out_of_range_that_was_not_checked() -> None:
    from radixkv.kernels import triton_write

    guarded = empty_arena(Shape([], page_size=4, head_dim=8).layout, 4, 0.0)
    guarded[0] = 1
    entries = [(0, 3, 4), (3, 1, 4), (0, -1, 4), (-1, 1, 4), (0, 1, 5), (0, 1, -1), (0, 2, 2)]
    triton_write.copy_rows(guarded[:3], torch.tensor(entries, dtype=INT))
    assert guarded[2, :, :, :2].all()
    guarded[2, :, :, :2] = 0
    assert not guarded[1:].any()


def test_offsets_are_64_bit() -> None:
    arena = sparse_arena(torch.float16)
    last = len(arena) - 1
    pages = LayerPages(arena[:, 0, 0], arena[:, 0, 1])
    ids = torch.tensor([last, 0, 2**11 - 1])
    token = torch.arange(40)
    k, v = torch.randn(2, 40, 1, 64).to(torch.float16)
    append(k, v, *pages, ids[token // 16] * 16 + token % 16, impl="triton")
    assert torch.equal(arena[last, 0, 0], k[:16])
    q, lengths = torch.randn(1, 2, 64).to(torch.float16), torch.tensor([40], dtype=INT)
    wanted = decode_attention(q, *pages, ids.int()[None], lengths, return_lse=True, impl="torch")
    got = decode_attention(q, *pages, ids.int()[None], lengths, return_lse=True, impl="triton")
    assert_near(got, wanted, torch.float16)
    copy_rows(arena, torch.tensor([[last, 2**11, 16]], dtype=INT), impl="triton")
    assert torch.equal(arena[2**11, 0, 0], k[:16])
