"""A rotary embedding as rotation of complex numbers, and pages to and from a staging buffer, page by page."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.kernel_cases import NAN, Shape, bits, empty_arena, sparse_arena
from radixkv.kernels import Rotary, append, gather_pages, scatter_pages

QUICK = settings(deadline=None, derandomize=True, max_examples=60, database=None)
INT = torch.int32


def rotary_of(reach: int, positions: list[int], interleaved: bool) -> tuple[Rotary, torch.Tensor]:
    """(the tables, e^(i angle) of each token and pair)."""
    turn = torch.arange(100)[:, None].double() * (10.0 ** (-torch.arange(reach).double() / reach))[None, :]
    at = torch.tensor(positions, dtype=torch.int64)
    return Rotary(turn.cos().float(), turn.sin().float(), at, interleaved), torch.polar(torch.ones_like(turn), turn)[at]


@QUICK
@given(
    positions=st.lists(st.integers(0, 99), min_size=1, max_size=5),
    dims=st.sampled_from([(8, 4), (64, 32), (64, 16), (80, 1), (7, 3)]),
    interleaved=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_a_rotary_embedding_turns_pairs(
    positions: list[int], dims: tuple[int, int], interleaved: bool, dtype: torch.dtype
) -> None:
    dim, reach = dims
    rotary, turns = rotary_of(reach, positions, interleaved)
    arena = empty_arena(Shape([], page_size=4, head_dim=dim, dtype=dtype).layout, 2, 0.0)
    k, v = torch.randn(2, len(positions), 2, dim).to(dtype)
    q = torch.randn(len(positions), 6, dim).to(dtype)
    got_q = append(k, v, arena[:, 1, 0], arena[:, 1, 1], torch.arange(len(positions)), rotary=rotary, q=q)
    got_k = arena[:, 1, 0].flatten(0, 1)[: len(positions)]
    assert torch.equal(arena[:, 1, 1].flatten(0, 1)[: len(positions)], v)
    for x, got in ((k, got_k), (q, got_q)):
        assert got.dtype == dtype
        wanted = x.double().clone()
        for pair in range(reach):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + reach)
            turned = torch.complex(x[..., first].double(), x[..., second].double()) * turns[:, pair, None]
            wanted[..., first], wanted[..., second] = turned.real, turned.imag
        bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(got.double(), wanted, atol=bound, rtol=bound)
        assert torch.equal(got[..., 2 * reach :], x[..., 2 * reach :])


@QUICK
@given(ids=st.lists(st.integers(-1, 4), max_size=6), dims=st.sampled_from([4, 5, 6]))
def test_gather_and_scatter_page_by_page(ids: list[int], dims: int) -> None:
    arena = empty_arena(Shape([], page_size=4, head_dim=8).layout, 5, NAN)
    arena.copy_(torch.randn(arena.shape))
    pages = {4: arena[:, 1, 0], 5: arena[:, 1], 6: arena}[dims]
    staging = torch.full((len(ids), *pages.shape[1:]), 7.0)
    gather_pages(pages, torch.tensor(ids, dtype=INT), staging)
    for place, page in enumerate(ids):
        assert torch.equal(staging[place], pages[page]) if page >= 0 else staging[place].eq(7).all()
    once = [page if page not in ids[:place] else -1 for place, page in enumerate(ids)]
    wanted = arena.clone()
    part = {4: wanted[:, 1, 0], 5: wanted[:, 1], 6: wanted}[dims]
    staging = torch.randn(staging.shape)
    for place, page in enumerate(once):
        if page >= 0:
            part[page] = staging[place]
    scatter_pages(staging, pages, torch.tensor(once, dtype=INT))
    assert torch.equal(bits(arena), bits(wanted))


@pytest.mark.parametrize("page", [2**11 + 1, 0])
def test_offsets_are_64_bit(page: int) -> None:
    arena = sparse_arena(torch.float16)
    arena[page] = torch.randn(arena[page].shape)
    staging = torch.zeros(1, *arena.shape[1:], dtype=torch.float16)
    gather_pages(arena, torch.tensor([page], dtype=INT), staging)
    assert torch.equal(staging[0], arena[page])
    scatter_pages(staging, arena, torch.tensor([2**11], dtype=INT))
    assert torch.equal(arena[2**11], staging[0])
