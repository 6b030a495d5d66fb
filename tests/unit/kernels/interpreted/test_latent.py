"""Multi-head latent attention, interpreted, against the definition."""

import pytest
import torch

from bench.kernel_cases import INF, LATENT_SCALE, NAN, Shape, assert_near, bits, latent_case, sparse_arena
from bench.traffic import counted
from radixkv.errors import BadRequest
from radixkv.kernels import group_prefixes, mla_decode_attention
from radixkv.kernels.attention_launch import Slicing, attention
from radixkv.kernels.layout import LayerPages
from radixkv.kernels.options import Attention, Batch


@pytest.mark.parametrize(
    ("heads", "queries", "dims", "dtype"),
    [
        (16, None, (512, 64), torch.bfloat16),
        (128, None, (512, 64), torch.float16),
        (20, 3, (256, 32), torch.float32),
        (16, 2, (64, 8), torch.bfloat16),
    ],
)
def test_it_equals_the_definition(heads: int, queries: int | None, dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = latent_case(Shape([0, 70, 33], heads, 1, 0, 16, dtype, queries=queries), *dims)
    options = {"latent_dim": dims[0], "scale": LATENT_SCALE, "return_lse": True, "impl": "triton"}
    assert_near(mla_decode_attention(*case.arguments, **options), case.wanted, dtype)


def test_groups_slices_and_garbage() -> None:
    shape = Shape([70, 52, 145], 16, 1, 0, 16, shared=True)
    results = []
    for fill in (0.0, NAN, INF):
        case = latent_case(shape, 64, 16, fill=fill)
        pages = LayerPages(case.pages[:, :, None], case.pages[:, :, None, :64])
        batch = Batch(case.q, pages, case.page_table, case.lengths, 1)
        prefixes = group_prefixes(case.page_table, case.lengths, 16)
        results.append(attention(batch, Attention.of(80, None, scale=LATENT_SCALE), prefixes, Slicing(5, 64)))
        assert_near(results[-1], case.wanted, torch.float32)
    assert torch.equal(bits(results[1][0]), bits(results[0][0]))
    assert torch.equal(bits(results[2][0]), bits(results[0][0]))


def test_a_latent_is_read_once_as_key_and_as_value() -> None:
    case = latent_case(Shape([64, 40], 16, 1, 0, 16, torch.float16), 512, 64)
    with counted(case.pages) as traffic:
        mla_decode_attention(*case.arguments, latent_dim=512, scale=LATENT_SCALE, impl="triton")
    assert traffic.pages_read == (64 + 40) * 576 * 2


def test_offsets_are_64_bit() -> None:
    arena = sparse_arena(torch.float16)  # its last page begins beyond element 2**31
    pages = arena[:, 0, 0, :, 0]
    last = len(pages) - 1
    table, lengths = torch.tensor([[last, 0, last - 1]], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    pages[table[0].long()] = torch.randn(3, 16, 64).half()
    q = torch.randn(1, 4, 64).half()
    got, wanted = (
        mla_decode_attention(q, pages, table, lengths, latent_dim=48, scale=0.1, return_lse=True, impl=impl)
        for impl in ("triton", "torch")
    )
    assert_near(got, wanted, torch.float16)
    assert got[0].any()


def test_a_latent_beyond_the_kernels_is_refused() -> None:
    case = latent_case(Shape([4], 1, 1, 0, 16), 513, 8)
    with pytest.raises(BadRequest, match="head dims up to 512"):
        mla_decode_attention(*case.arguments, latent_dim=513, scale=1.0, impl="triton")
    with pytest.raises(BadRequest, match="up to 256 dims behind them"):
        mla_decode_attention(*case.arguments, latent_dim=264, scale=1.0, impl="triton")
