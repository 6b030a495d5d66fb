"""Append with a rotary embedding, and pages to and from a staging buffer, interpreted against the reference."""

import itertools

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from bench import write_problems
from bench.kernel_cases import NAN, Shape, bits, empty_arena, sparse_arena
from bench.write_problems import KINDS, WriteProblem
from radixkv.kernels import LayerPages, Rotary, append, gather_pages, scatter_pages, triton_write

QUICK = settings(deadline=None, derandomize=True, max_examples=15, database=None)
INT = torch.int32


@settings(QUICK, max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_problems_leave_the_same_bytes_as_the_reference(seed: int) -> None:
    """Odd sizes, any strides, all kinds; what is between and around the pages counts, too."""
    problem = WriteProblem.of(seed)
    note(str(problem))
    problem.check()


WRITTEN = {"append": ("append", 2), "append_rotary": ("append", 2), "copy_rows": ("copy_rows", 0),
           "gather": ("gather_pages", 2), "scatter": ("scatter_pages", 1)}  # fmt: skip
"""Of each kind of problem: the kernel, and the place of what it writes into among its arguments."""


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_element_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, place = WRITTEN[kind]
    kernel = getattr(write_problems, name)

    def spoilt(*arguments: torch.Tensor, **named: object) -> object:
        result = kernel(*arguments, **named)
        written = arguments[place]
        if named["impl"] == "triton" and len(written):
            written[(-1,) * written.dim()] = 3.5
        return result

    problem = next(made for made in map(WriteProblem.of, itertools.count()) if made.kind == kind and made.pages == 5)
    problem.check()
    monkeypatch.setattr(write_problems, name, spoilt)
    with pytest.raises(AssertionError):
        problem.check()


def angles(reach: int, positions: list[int]) -> Rotary:
    turn = torch.arange(64)[:, None] * (0.3 ** torch.arange(reach))[None, :]
    return Rotary(turn.cos(), turn.sin(), torch.tensor(positions, dtype=torch.int64))


@QUICK
@given(
    slots=st.lists(st.integers(0, 3 * 16 - 1), min_size=1, max_size=4, unique=True),
    heads=st.sampled_from([(1, 2, 64, 32), (3, 9, 64, 8), (2, 4, 80, 40), (2, 16, 128, 64)]),
    interleaved=st.booleans(),
    with_q=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_rotary_equals_the_reference(
    slots: list[int], heads: tuple[int, int, int, int], interleaved: bool, with_q: bool, dtype: torch.dtype
) -> None:
    kv_heads, query_heads, dim, reach = heads
    shape = Shape([], kv_heads=kv_heads, head_dim=dim, dtype=dtype)
    arenas = [empty_arena(shape.layout, 3, 0.0) for _ in range(2)]
    rotary = angles(reach, [slot % 64 for slot in slots])._replace(interleaved=interleaved)
    k, v = torch.randn(2, len(slots), kv_heads, dim).to(dtype)
    q = torch.randn(len(slots), query_heads, dim).to(dtype) if with_q else None
    turned = [
        append(k, v, each[:, 1, 0], each[:, 1, 1], torch.tensor(slots), rotary=rotary, q=q, impl=impl)
        for each, impl in zip(arenas, ("torch", "triton"), strict=True)
    ]
    # The interpreter cuts bfloat16 off where hardware rounds: one unit in the last place of 8 bits.
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(arenas[1], arenas[0], atol=bound, rtol=bound)
    assert torch.equal(arenas[0][:, :, 1], arenas[1][:, :, 1])
    assert (turned[0] is None) == (turned[1] is None) == (q is None)
    if q is not None:
        torch.testing.assert_close(turned[1], turned[0], atol=bound, rtol=bound)


def test_a_position_without_angles_is_loud_and_skipped_slots_stay_skipped() -> None:
    arena = empty_arena(Shape([], kv_heads=1).layout, 2, 0.0)
    rotary = angles(16, [0, 64, -1, 3])
    ones = torch.ones(4, 1, 64)
    layer = LayerPages(arena[:, 1, 0], arena[:, 1, 1])
    turned = triton_write.append(ones, ones, layer, torch.tensor([0, 1, 2, -1]), rotary, ones)
    for row in (1, 2):
        assert layer.keys[0, row, 0, :32].isnan().all()
        assert layer.keys[0, row, 0, 32:].eq(1).all()
        assert turned[row, 0, :32].isnan().all()
    assert layer.keys[0, 0].eq(1).all()
    assert layer.values[0, :3].eq(1).all()
    assert not arena[0, 1, :, 3:].any()
    assert not arena[1].any()


ids_of = st.lists(st.integers(0, 4), max_size=4, unique=True)


@QUICK
@given(
    ids=ids_of,
    skipped=st.integers(0, 1),
    dims=st.sampled_from([4, 5, 6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_gather_and_scatter_equal_the_reference(ids: list[int], skipped: int, dims: int, dtype: torch.dtype) -> None:
    arena = empty_arena(Shape([], kv_heads=1, head_dim=40, dtype=dtype).layout, 5, NAN)
    arena[..., 1:].copy_(torch.randn(arena[..., 1:].shape))
    pages = {4: arena[:, 1, 0], 5: arena[:, 1], 6: arena}[dims]
    order = torch.tensor([-1] * skipped + ids, dtype=INT)
    staged = [torch.full((len(order), *pages.shape[1:]), 7.0, dtype=dtype) for _ in range(2)]
    for staging, impl in zip(staged, ("torch", "triton"), strict=True):
        gather_pages(pages, order, staging, impl=impl)
    assert torch.equal(bits(staged[0]), bits(staged[1]))
    assert staged[0][:skipped].eq(7).all()
    arenas = [torch.empty_like(arena).copy_(arena) for _ in range(2)]
    moved = torch.where(order >= 0, (order + 1) % 5, -1).int()
    for each, impl in zip(arenas, ("torch", "triton"), strict=True):
        scatter_pages(staged[0], {4: each[:, 1, 0], 5: each[:, 1], 6: each}[dims], moved, impl=impl)
    assert torch.equal(bits(arenas[0]), bits(arenas[1]))


@pytest.mark.parametrize("page", [3, -2, 2**31 - 1])
def test_an_id_out_of_the_pool_that_was_not_checked_is_skipped(page: int) -> None:
    guarded = empty_arena(Shape([], page_size=4, head_dim=8).layout, 4, 0.0)
    guarded[0], guarded[3] = 1, 2
    staging = torch.full((2, *guarded.shape[1:]), 5.0)
    triton_write.gather_pages(guarded[:3], torch.tensor([page, 0], dtype=INT), staging)
    assert staging[0].eq(5).all()
    assert staging[1].eq(1).all()
    triton_write.scatter_pages(staging, guarded[:3], torch.tensor([page, 1], dtype=INT))
    assert [float(guarded[each].max()) for each in range(4)] == [1, 1, 0, 2]


def test_offsets_are_64_bit() -> None:
    arena = sparse_arena(torch.float16)
    last = len(arena) - 1
    arena[last] = torch.randn(arena[last].shape)
    staging = torch.zeros(2, *arena.shape[1:], dtype=torch.float16)
    gather_pages(arena, torch.tensor([last, 0], dtype=INT), staging, impl="triton")
    assert torch.equal(staging[0], arena[last])
    scatter_pages(staging, arena, torch.tensor([2**11, last], dtype=INT), impl="triton")
    assert torch.equal(arena[2**11], staging[0])
    assert torch.equal(arena[last], staging[1])
