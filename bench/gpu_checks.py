"""Every kernel against the reference on a device. Run by ``bench.gpu`` and ``tests/gpu``.

A check takes the device and whether to keep it small; small ones also run in Triton's interpreter, in the unit tests.
By itself: ``python -m bench.gpu_checks NAME``, with ``cpu`` behind it small, on the CPU.

Each kind of launch is compiled before it runs, which takes seconds: what decides how many there are is kept small, and
what would take long by that is in parts, which ``bench.gpu`` runs side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from bench.kernel_cases import (
    INF,
    LATENT_SCALE,
    NAMES,
    NAN,
    Case,
    Shape,
    assert_near,
    bits,
    empty_arena,
    latent_case,
    make_case,
    naive_attention,
    random_case,
    sliced,
    sparse_arena,
)
from bench.kernel_problems import Problem
from radixkv.config import QUANTIZED
from radixkv.kernels import (
    LayerPages,
    Rotary,
    append,
    copy_rows,
    decode_attention,
    gather_pages,
    group_prefixes,
    mla_decode_attention,
    prefill_attention,
    scatter_pages,
    triton_write,
)
from radixkv.kernels.dispatch import Impl
from radixkv.kernels.layout import heads_of

Check = Callable[[str, bool], None]
BRAIN = torch.bfloat16
DTYPES = (torch.float32, torch.float16, BRAIN)
BOTH: tuple[Impl, Impl] = ("torch", "triton")
PARTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda arena: arena,
    lambda arena: arena[:, 1],
    lambda arena: arena[:, 1, 0],
)
"""What copy_rows takes of an arena: all of it, one layer, one layer's keys."""


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_")


def _named(check: Check, name: str) -> Check:
    """One of several checks made alike."""
    check.__name__ = name
    return check


def _decode_kinds(dtype: torch.dtype) -> Check:
    def check(device: str, small: bool) -> None:
        """Head dims and page sizes, for MHA, GQA and MQA, against the reference and (one of them) float64."""
        lengths = [0, 1, 70] if small else [0, 1, 16, 1000, 4097]
        for head_dim, page_size in ((64, 16), (128, 32)):
            for heads in ((4, 2),) if small else ((8, 8), (32, 8), (9, 3), (32, 1), (71, 1)):
                case = make_case(Shape(lengths, *heads, head_dim, page_size, dtype, shared=True), device=device)
                got = decode_attention(*case.arguments, return_lse=True, impl="triton")
                assert_near(got, decode_attention(*case.arguments, return_lse=True, impl="torch"), dtype)
                if heads in {(9, 3), (4, 2)}:
                    assert_near(got, naive_attention(case), dtype)
                assert not got[0][0].any(), "an empty row is not zero"
                assert (got[1][0] == -INF).all(), "an empty row has weight"

    return _named(check, f"decode_kinds_{NAMES[dtype]}")


def check_other_head_dims_and_page_sizes(device: str, small: bool) -> None:
    for head_dim, page_size in ((80, 16), (64, 5)) if small else ((8, 4), (80, 16), (96, 16), (256, 16), (64, 5)):
        for dtype in DTYPES[1:]:
            case = make_case(Shape([0, 100], 4, 2, head_dim, page_size, dtype), device=device)
            got = decode_attention(*case.arguments, return_lse=True, impl="triton")
            assert_near(got, naive_attention(case), dtype)


def _random_problems(first: int) -> Check:
    def check(device: str, small: bool) -> None:
        """Every option and kind together, against the definition in float64."""
        for seed in range(first, first + 10)[:: 10 if small else 1]:
            problem = Problem.of(seed)
            try:
                assert_near(problem.got("triton", device), problem.wanted(), problem.shape.dtype)
            except AssertionError as difference:
                raise AssertionError(f"seed {seed}: {problem}: {difference}") from difference

    return _named(check, f"random_problems_from_{first}")


def check_latent_attention(device: str, small: bool) -> None:
    """MLA: 16 to 128 query heads over latents of 512 and 64 dims, several query tokens, in groups and slices."""
    lengths = [0, 40] if small else [0, 1, 700]
    for dtype, heads, queries in ((BRAIN, 16, None),) if small else (
        (BRAIN, 16, None), (BRAIN, 128, None), (torch.float16, 32, 4), (torch.float32, 16, None)
    ):  # fmt: skip
        case = latent_case(Shape(lengths, heads, 1, 0, 16, dtype, queries=queries, shared=True), 512, 64, device)
        prefixes = group_prefixes(case.page_table, case.lengths, 16, queries=queries or 1)
        for groups in (None, prefixes):
            got = mla_decode_attention(
                *case.arguments, latent_dim=512, scale=LATENT_SCALE, return_lse=True, prefixes=groups, impl="triton"
            )
            assert_near(got, case.wanted, dtype)


def check_shared_prefixes(device: str, small: bool) -> None:
    """Grouped and flat are equal within rounding, whatever the size of the group."""
    for rows in (3,) if small else (2, 5, 16, 64, 200):
        shape = Shape([40 if small else 1000 + row % 40 for row in range(rows)], 4 if small else 32, 2 if small else 8,
                      64 if small else 128, 16, torch.bfloat16, shared=True)  # fmt: skip
        case = make_case(shape, device=device)
        prefixes = group_prefixes(case.page_table, case.lengths, 16)
        got = decode_attention(*case.arguments, return_lse=True, prefixes=prefixes, impl="triton")
        assert_near(got, decode_attention(*case.arguments, return_lse=True, impl="torch"), torch.bfloat16)


def check_a_prefill_over_a_prefix(device: str, small: bool) -> None:
    lengths, new = ([40, 9, 0], [17, 9, 0]) if small else ([5000, 300, 0, 70], [2000, 300, 0, 1])
    for dtype in DTYPES[:1] if small else DTYPES:
        for window in (None,) if small else (None, 200):
            case = make_case(Shape(lengths, 4, 2, 64, 16, dtype, new_tokens=new), device=device)
            assert case.starts is not None
            arguments = (*case.arguments, case.starts)
            got, wanted = (
                prefill_attention(*arguments, return_lse=True, window=window, impl=impl) for impl in BOTH[::-1]
            )
            assert_near(got, wanted, dtype)


def check_the_order_of_the_batch_changes_no_bit(device: str, small: bool) -> None:
    case = make_case(Shape([70, 0, 17] if small else [3000, 0, 17, 70, 1200, 64] * 5, 4, 2), device=device)
    out, lse = sliced(case, 3)
    order = torch.randperm(len(case.lengths), device=device)
    turned = Case(case.arena, case.q[order], case.page_table[order], case.lengths[order], [], [])
    again = sliced(turned, 3)
    assert torch.equal(bits(again[0]), bits(out[order]))
    assert torch.equal(bits(again[1]), bits(lse[order]))


def check_any_number_of_splits(device: str, small: bool) -> None:
    case = make_case(Shape([0, 130] if small else [0, 5000, 64], 4, 1), device=device)
    wanted = decode_attention(*case.arguments, return_lse=True, impl="torch")
    for splits in (0, 3) if small else (0, 1, 2, 3, 7, 16, 17, 127, 128):
        assert_near(sliced(case, splits), wanted, torch.float32)


def check_garbage_changes_no_bit(device: str, small: bool) -> None:
    lengths = [0, 17, 65] if small else [*range(34), 63, 64, 65, 500]
    for splits in (2,) if small else (0, 2, 5):
        for dtype in DTYPES[1:2] if small else DTYPES:
            shape = Shape(lengths, 4, 2, 128, dtype=dtype)
            clean = sliced(make_case(shape, fill=0.0, padding=0, device=device), splits)
            for fill, padding in ((NAN, -1), (INF, 2**31 - 1), (-INF, 1), (3e4, 0)):
                dirty = sliced(make_case(shape, fill=fill, padding=padding, device=device), splits)
                assert torch.equal(bits(dirty[0]), bits(clean[0])), (dtype, splits, fill)
                assert torch.equal(bits(dirty[1]), bits(clean[1])), (dtype, splits, fill)


def check_wrong_values_are_loud_and_harmless(device: str, small: bool) -> None:
    case = make_case(Shape([40, 150, 20], 2, 1, spare_entries=0), device=device)
    wanted = decode_attention(*case.arguments, impl="torch")[[0, 2]]
    for page in (-1, len(case.arena), 2**31 - 1):
        case.page_table[1, 7] = page
        out, lse = sliced(case, 0 if small else 3)
        assert out[1].isnan().all(), page
        assert lse[1].isnan().all(), page
        torch.testing.assert_close(out[[0, 2]], wanted, atol=2e-5, rtol=2e-5)
    case.page_table[1] = 0
    for length in (161, 2**31 - 1):
        case.lengths[1] = length
        assert sliced(case, 0 if small else 3)[0][1].isnan().all(), length


def check_append(device: str, small: bool) -> None:
    pool, tokens = (3, 5) if small else (400, 4096)
    for dtype in DTYPES:
        for heads in ((3, 64), (2, 128)):
            layout = Shape([], kv_heads=heads[0], head_dim=heads[1], dtype=dtype).layout
            arenas = [empty_arena(layout, pool, NAN, device) for _ in range(2)]
            slots = torch.randperm(pool * 16)[:tokens].to(device)
            slots[::3] = -1
            k, v = torch.randn(2, tokens, *heads, device=device).to(dtype)
            for arena, impl in zip(arenas, BOTH, strict=True):
                append(k, v, arena[:, 1, 0], arena[:, 1, 1], slots, impl=impl)
            assert torch.equal(bits(arenas[0]), bits(arenas[1])), (dtype, heads)
            far = torch.tensor([pool * 16, -2, 2**62], device=device)
            triton_write.append(k[:3], v[:3], LayerPages(arenas[1][:, 1, 0], arenas[1][:, 1, 1]), far, None, None)
            assert torch.equal(bits(arenas[0]), bits(arenas[1])), "a slot out of the pool was written"


def check_quantized_append(device: str, small: bool) -> None:
    """To the byte, rounding and scales included; a NaN's bits may be any that are NaN."""
    pool, tokens = (1, 3) if small else (400, 4096)
    for dtype, heads in zip(QUANTIZED, ((3, 64), (8, 128), (2, 80)), strict=True):
        layout = Shape([], kv_heads=heads[0], head_dim=heads[1], quantized=dtype).layout
        arenas = [empty_arena(layout, pool, 0.0, device) for _ in range(2)]
        slots = torch.randperm(pool * 16)[:tokens].to(device)
        k, v = torch.randn(2, tokens, *heads, device=device).to(torch.float16) * 9
        for arena, impl in zip(arenas, BOTH, strict=True):
            keys, values = (heads_of(arena[:, 1, kind], layout) for kind in (0, 1))
            append(k, v, keys, values, slots, impl=impl)
        assert torch.equal(arenas[0], arenas[1]), dtype


def check_rotary(device: str, small: bool) -> None:
    tokens = 3 if small else 2000
    for dtype in DTYPES:
        for dim, reach, interleaved in (
            ((64, 32, False),) if small else ((64, 32, False), (128, 32, True), (80, 40, False))
        ):
            turn = torch.rand(50, reach, device=device) * 6
            positions = torch.randint(0, 50, (tokens,), device=device)
            rotary = Rotary(turn.cos(), turn.sin(), positions, interleaved)
            k, v = torch.randn(2, tokens, 2, dim, device=device).to(dtype)
            q = torch.randn(tokens, 8, dim, device=device).to(dtype)
            made = []
            for impl in BOTH:
                arena = empty_arena(Shape([], kv_heads=2, head_dim=dim, dtype=dtype).layout, 130, 0.0, device)
                layer = (arena[:, 1, 0], arena[:, 1, 1])
                made.append(
                    (append(k, v, *layer, torch.arange(tokens, device=device), rotary=rotary, q=q, impl=impl), arena)
                )
            bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2**-7}[dtype]
            for mine, wanted in zip(made[1], made[0], strict=True):
                torch.testing.assert_close(mine, wanted, atol=bound, rtol=bound)


def check_gather_and_scatter(device: str, small: bool) -> None:
    pool, some = (5, 3) if small else (200, 90)
    for dtype in DTYPES[1:2] if small else DTYPES:
        arena = empty_arena(Shape([], kv_heads=1 if small else 8, dtype=dtype).layout, pool, NAN, device)
        arena.copy_(torch.randn(arena.shape).to(device, dtype))
        ids = torch.randperm(pool)[:some].int().to(device)
        ids[0] = -1
        for part in PARTS:
            pages = part(arena)
            staged = [torch.zeros(some, *pages.shape[1:], dtype=dtype, device=device) for _ in BOTH]
            for staging, impl in zip(staged, BOTH, strict=True):
                gather_pages(pages, ids, staging, impl=impl)
            assert torch.equal(bits(staged[0]), bits(staged[1])), dtype
            arenas = [torch.empty_like(arena).copy_(arena) for _ in BOTH]
            for each, impl in zip(arenas, BOTH, strict=True):
                scatter_pages(-staged[0], part(each), ids, impl=impl)
            assert torch.equal(bits(arenas[0]), bits(arenas[1])), dtype


def check_copy_rows(device: str, small: bool) -> None:
    """Chains of copies too: entries act as if one after the other."""
    pool, entries = (4, 5) if small else (50, 300)
    for dtype in DTYPES[:1] if small else DTYPES:
        layout = Shape([], kv_heads=1 if small else 8, head_dim=64, dtype=dtype).layout
        first = empty_arena(layout, pool, NAN, device)
        first.copy_(torch.randn(first.shape).to(device, dtype))
        rows = torch.stack([torch.randint(0, high, (entries,)) for high in (pool, pool, 17)], 1).int().to(device)
        for part in PARTS:
            arenas = [first, empty_arena(layout, pool, NAN, device).copy_(first)]
            for arena, impl in zip(arenas, BOTH, strict=True):
                copy_rows(part(arena), rows, impl=impl)
            assert torch.equal(bits(arenas[0]), bits(arenas[1])), dtype


def check_offsets_are_64_bit(device: str, small: bool) -> None:
    arena = sparse_arena(torch.float16, device)
    last = len(arena) - 1
    pages = LayerPages(arena[:, 0, 0], arena[:, 0, 1])
    ids = torch.tensor([last, 0, 2**11 - 1], device=device)
    token = torch.arange(40, device=device)
    k, v = torch.randn(2, 40, 1, 64, device=device).half()
    append(k, v, *pages, ids[token // 16] * 16 + token % 16, impl="triton")
    assert torch.equal(arena[last, 0, 0], k[:16]), "append"
    q, lengths = torch.randn(1, 2, 64, device=device).half(), torch.tensor([40], dtype=torch.int32, device=device)
    arguments = (q, *pages, ids.int()[None], lengths)
    wanted = decode_attention(*arguments, return_lse=True, impl="torch")
    assert_near(decode_attention(*arguments, return_lse=True, impl="triton"), wanted, torch.float16)
    copy_rows(arena, torch.tensor([[last, 2**11, 16]], dtype=torch.int32, device=device), impl="triton")
    assert torch.equal(arena[2**11, 0, 0], k[:16]), "copy_rows"


def check_large_grids(device: str, small: bool) -> None:
    """70,000 rows of one token: each gives the token's value. One row of a million tokens."""
    many = random_case(Shape([1] * (20 if small else 70_000), 1, 1, 64, 16, torch.float16), device)
    got = decode_attention(*many.arguments, impl="triton")
    assert torch.equal(got[:, 0], many.rows[1][many.page_table[:, 0].long(), 0, 0])
    for length in (300,) if small else (70_000, 1_000_000):
        case = random_case(Shape([length], 2, 1, 64, 16, torch.float16), device)
        wanted = decode_attention(*case.arguments, return_lse=True, impl="torch")
        assert_near(decode_attention(*case.arguments, return_lse=True, impl="triton"), wanted, torch.float16)


def check_replay_of_a_graph(device: str, small: bool) -> None:
    """A captured launch follows lengths and page tables that change in place."""
    if small:
        return
    case = make_case(Shape([900, 20, 0], dtype=torch.float16), device=device)
    decode_attention(*case.arguments, impl="triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*case.arguments, impl="triton")
    for lengths in ([900, 20, 0], [16, 0, 700], [0, 0, 0]):
        case.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        case.page_table.copy_(case.page_table[0].expand_as(case.page_table).clone())
        graph.replay()
        torch.testing.assert_close(out, decode_attention(*case.arguments, impl="torch"), atol=3e-3, rtol=3e-3)


CHECKS: tuple[Check, ...] = (
    *(_decode_kinds(dtype) for dtype in DTYPES),
    check_other_head_dims_and_page_sizes,
    *(_random_problems(first) for first in range(0, 80, 10)),
    check_shared_prefixes,
    check_latent_attention,
    check_a_prefill_over_a_prefix,
    check_the_order_of_the_batch_changes_no_bit,
    check_any_number_of_splits,
    check_garbage_changes_no_bit,
    check_wrong_values_are_loud_and_harmless,
    check_append,
    check_quantized_append,
    check_rotary,
    check_copy_rows,
    check_gather_and_scatter,
    check_offsets_are_64_bit,
    check_large_grids,
    check_replay_of_a_graph,
)


def main(arguments: list[str]) -> int:
    name, device = [*arguments, "cuda"][:2]
    (check,) = (each for each in CHECKS if name_of(each) == name)
    torch.manual_seed(0)
    try:
        check(device, device == "cpu")
        if device != "cpu":
            torch.cuda.synchronize()
    except (AssertionError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
