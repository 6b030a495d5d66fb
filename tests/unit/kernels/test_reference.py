"""The plain torch kernels against answers made another way: float64 by definition, and loops over single rows."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.kernel_cases import INF, NAN, Shape, assert_near, bits, empty_arena, make_case, naive_attention, sparse_arena
from radixkv.kernels import append, copy_rows, decode_attention

QUICK = settings(deadline=None, derandomize=True, max_examples=60, database=None)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

shapes = st.builds(
    lambda lengths, kv_heads, group, head_dim, page_size, dtype, shared: Shape(
        lengths, kv_heads * group, kv_heads, head_dim, page_size, dtype, shared=shared
    ),
    lengths=st.lists(st.integers(0, 70), max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([1, 8, 64, 80, 128]),
    page_size=st.sampled_from([1, 3, 16, 32]),
    dtype=st.sampled_from(DTYPES),
    shared=st.booleans(),
)


@QUICK
@given(shape=shapes, seed=st.integers(0, 9))
def test_decode_equals_the_definition_in_float64(shape: Shape, seed: int) -> None:
    case = make_case(shape, seed)
    got = decode_attention(*case.arguments, return_lse=True)
    assert got[0].dtype == shape.dtype
    assert got[1].dtype == torch.float32
    assert_near(got, naive_attention(case), shape.dtype)


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("fill", [NAN, INF, -INF, 1e38])
def test_garbage_outside_the_valid_tokens_changes_no_bit(fill: float, page_size: int) -> None:
    for length in range(34):
        shape = Shape([length, 33 - length], page_size=page_size)
        clean = decode_attention(*make_case(shape, fill=0.0, padding=0).arguments)
        for padding in (-1, 0, 1, 2**31 - 1):
            dirty = decode_attention(*make_case(shape, fill=fill, padding=padding).arguments)
            assert torch.equal(bits(dirty), bits(clean)), (length, padding)


def test_page_size_and_page_order_do_not_matter() -> None:
    wanted = None
    for page_size in (1, 2, 3, 5, 16, 256):
        got, _ = naive_attention(case := make_case(Shape([50, 7], page_size=page_size)))
        assert_near(decode_attention(*case.arguments, return_lse=True), naive_attention(case), torch.float32)
        wanted = got if wanted is None else wanted
        assert torch.equal(got, wanted)


def test_an_empty_row_gives_zeros_and_no_weight() -> None:
    out, lse = decode_attention(*make_case(Shape([0, 5, 0])).arguments, return_lse=True)
    assert torch.equal(out[[0, 2]], torch.zeros(2, 4, 64))
    assert (lse[[0, 2]] == -INF).all()
    assert torch.isfinite(lse[1]).all()


def test_no_rows_and_a_page_table_without_columns() -> None:
    assert decode_attention(*make_case(Shape([])).arguments).shape == (0, 4, 64)
    out, lse = decode_attention(*make_case(Shape([0], spare_entries=0)).arguments, return_lse=True)
    assert not out.any()
    assert (lse == -INF).all()


def test_scale_is_used() -> None:
    case = make_case(Shape([40]))
    assert_near(
        decode_attention(*case.arguments, scale=0.5, return_lse=True), naive_attention(case, scale=0.5), torch.float32
    )


def test_strides_of_another_order_and_of_q() -> None:
    case = make_case(Shape([40, 3]))
    plain = decode_attention(*case.arguments)
    q, keys, values, table, lengths = case.arguments
    head_major = [pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (keys, values)]
    assert not head_major[0][0].is_contiguous()
    wide = torch.full((2, 8, 64), NAN)
    wide[:, ::2] = q
    torch.testing.assert_close(decode_attention(wide[:, ::2], *head_major, table, lengths), plain)


def test_inference_mode_inside_and_outside_and_threads_of_their_own() -> None:
    case = make_case(Shape([64], kv_heads=4))
    with torch.inference_mode():
        first = decode_attention(*make_case(Shape([1])).arguments)
        inside = decode_attention(*case.arguments)
    assert torch.isfinite(first).all()
    outside = decode_attention(*case.arguments)
    assert torch.equal(inside, outside)

    results: dict[int, list[bool]] = {0: [], 1: []}

    def decode_often(number: int) -> None:
        mine = make_case(Shape([40 + number, 90 * number]), seed=number)
        wanted = naive_attention(mine)[0].float()
        results[number] = [
            torch.allclose(decode_attention(*mine.arguments), wanted, atol=1e-4) for _ in range(100)
        ]  # fmt: skip

    threads = [threading.Thread(target=decode_often, args=(number,)) for number in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [True] * 100, 1: [True] * 100}


@QUICK
@given(
    slots=st.lists(st.integers(0, 5 * 4 - 1), max_size=20, unique=True),
    skipped=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_append_writes_its_slots_and_nothing_else(slots: list[int], skipped: int, dtype: torch.dtype) -> None:
    arena = empty_arena(Shape([], page_size=4, head_dim=8, dtype=dtype).layout, 5, NAN)
    order = [*slots, *[-1] * skipped]
    k, v = torch.randn(2, len(order), 2, 8).to(dtype)
    expected = arena.clone()
    for token, slot in enumerate(slots):
        expected[slot // 4, 1, 0, slot % 4] = k[token]
        expected[slot // 4, 1, 1, slot % 4] = v[token]
    append(k, v, arena[:, 1, 0], arena[:, 1, 1], torch.tensor(order, dtype=torch.int64))
    assert torch.equal(bits(arena), bits(expected))


entries = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))


@QUICK
@given(rows=st.lists(entries, max_size=6), dims=st.sampled_from([4, 5, 6]))
def test_copy_rows_copies_the_first_rows_in_order(rows: list[tuple[int, int, int]], dims: int) -> None:
    arena = empty_arena(Shape([], page_size=4, head_dim=8).layout, 5, NAN)
    arena.copy_(torch.randn(arena.shape))
    pages = {4: arena[:, 1, 0], 5: arena[:, 1], 6: arena}[dims]
    untouched = arena[:, [0, 2]].clone()
    expected = pages.clone()
    for source, target, count in rows:
        for row in range(count):
            expected[target, ..., row, :, :] = expected[source, ..., row, :, :]
    copy_rows(pages, torch.tensor(rows, dtype=torch.int32).reshape(-1, 3))
    assert torch.equal(bits(pages), bits(expected))
    if dims < 6:
        assert torch.equal(arena[:, [0, 2]], untouched)


def test_offsets_are_64_bit() -> None:
    arena = sparse_arena(torch.float16)
    last = len(arena) - 1
    assert arena[last].storage_offset() > 2**31
    k, v = torch.randn(2, 40, 1, 64).to(torch.float16)
    ids = torch.tensor([last, 0, 2**11 - 1])
    token = torch.arange(40)
    append(k, v, arena[:, 0, 0], arena[:, 0, 1], ids[token // 16] * 16 + token % 16)
    near = empty_arena(Shape([], kv_heads=1, dtype=torch.float16).layout, 3, NAN)
    append(k, v, near[:, 1, 0], near[:, 1, 1], token)
    q, lengths = torch.randn(1, 2, 64).to(torch.float16), torch.tensor([40], dtype=torch.int32)
    far = decode_attention(q, arena[:, 0, 0], arena[:, 0, 1], ids.int()[None], lengths)
    assert torch.equal(far, decode_attention(q, near[:, 1, 0], near[:, 1, 1], torch.arange(3).int()[None], lengths))
    copy_rows(arena, torch.tensor([[last, 2**11, 16]], dtype=torch.int32))
    assert torch.equal(arena[2**11, 0, 0], k[:16])
