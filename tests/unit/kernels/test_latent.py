"""Multi-head latent attention in plain torch, and what it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.kernel_cases import INF, LATENT_SCALE, NAN, Shape, assert_near, bits, latent_case
from radixkv.errors import BadRequest
from radixkv.kernels import group_prefixes, mla_decode_attention

QUICK = settings(deadline=None, derandomize=True, max_examples=40, database=None)


@QUICK
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    heads=st.sampled_from([1, 16, 20]),
    dims=st.sampled_from([(32, 8), (64, 16), (512, 64)]),
    page_size=st.sampled_from([1, 16, 64]),
    queries=st.sampled_from([None, 1, 3]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_it_equals_the_definition(
    lengths: list[int], heads: int, dims: tuple[int, int], page_size: int, queries: int | None, dtype: torch.dtype
) -> None:
    case = latent_case(Shape(lengths, heads, 1, 0, page_size, dtype, queries=queries), *dims)
    got = mla_decode_attention(*case.arguments, latent_dim=dims[0], scale=LATENT_SCALE, return_lse=True)
    assert got[0].shape == (*case.q.shape[:-1], dims[0])
    assert_near(got, case.wanted, dtype)


def test_groups_and_garbage() -> None:
    shape = Shape([40, 52, 45], 16, 1, 0, 16, shared=True)
    case = latent_case(shape, 64, 16)
    prefixes = group_prefixes(case.page_table, case.lengths, 16)
    options = {"latent_dim": 64, "scale": LATENT_SCALE, "return_lse": True}
    assert_near(mla_decode_attention(*case.arguments, prefixes=prefixes, **options), case.wanted, torch.float32)
    clean = mla_decode_attention(*latent_case(shape, 64, 16, fill=0.0).arguments, **options)
    for fill in (NAN, INF):
        dirty = mla_decode_attention(*latent_case(shape, 64, 16, fill=fill).arguments, **options)
        assert torch.equal(bits(dirty[0]), bits(clean[0]))


ERRORS = {
    "latent_dim is not a part": {"latent_dim": 80},
    "latent_dim is not a part ": {"latent_dim": 0},
    "scale is not a finite": {"scale": NAN},
    "pages has the wrong number of dimensions": {"pages": torch.zeros(2, 16, 1, 80)},
    "q and the pages differ in head dim": {"q": torch.zeros(1, 16, 64)},
    "q and the pages differ in dtype": {"q": torch.zeros(1, 16, 80).half()},
    "beyond the page table": {"lengths": torch.tensor([999], dtype=torch.int32)},
}


@pytest.mark.parametrize("says", ERRORS)
def test_it_refuses(says: str) -> None:
    case = latent_case(Shape([20], 16, 1, 0, 16), 64, 16)
    names = ("q", "pages", "page_table", "lengths")
    arguments = dict(zip(names, case.arguments, strict=True)) | {"latent_dim": 64, "scale": LATENT_SCALE}
    mla_decode_attention(**arguments)
    with pytest.raises(BadRequest, match=says.strip()):
        mla_decode_attention(**{**arguments, **ERRORS[says]})
