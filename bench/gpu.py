"""``python -m bench.gpu``: every kernel checked against the reference on a CUDA device, then decode attention timed.

Needs torch and Triton alone. Without a CUDA device it says so and ends well. Exit 1 if a check fails. Rows
(docs/kernels.md): ``gpu.decode_*_us`` is one call for one layer, beside torch's own attention over dense keys and
values of the same size; ``..._gbps`` is the bytes of keys and values read for it.

A check takes the device and whether to keep it small; small ones also run in Triton's interpreter, in the unit tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.kernel_cases import (
    INF,
    NAN,
    Case,
    Shape,
    assert_near,
    bits,
    empty_arena,
    make_case,
    naive_attention,
    sliced,
    sparse_arena,
)
from bench.rows import Row, report, row, single
from bench.stopwatch import Summary, summarize
from radixkv.kernels import LayerPages, append, copy_rows, decode_attention, triton_write
from radixkv.kernels.dispatch import Impl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOTH: tuple[Impl, Impl] = ("torch", "triton")
PARTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda arena: arena,
    lambda arena: arena[:, 1],
    lambda arena: arena[:, 1, 0],
)
"""What copy_rows takes of an arena: all of it, one layer, one layer's keys."""


def check_decode_kinds(device: str, small: bool) -> None:
    """Each dtype, head dim and page size, for MHA, GQA and MQA, against the reference and (once a dtype) float64."""
    lengths = [0, 1, 70] if small else [0, 1, 16, 1000, 4097]
    for dtype in DTYPES[:1] if small else DTYPES:
        for head_dim, page_size in ((64, 16), (128, 32)) if small else ((64, 16), (64, 32), (128, 16), (128, 32)):
            for heads in ((4, 2),) if small else ((8, 8), (32, 8), (9, 3), (32, 1), (71, 1)):
                case = make_case(Shape(lengths, *heads, head_dim, page_size, dtype, shared=True), device=device)
                got = decode_attention(*case.arguments, return_lse=True, impl="triton")
                assert_near(got, decode_attention(*case.arguments, return_lse=True, impl="torch"), dtype)
                if heads in {(9, 3), (4, 2)}:
                    assert_near(got, naive_attention(case), dtype)
                assert not got[0][0].any(), "an empty row is not zero"
                assert (got[1][0] == -INF).all(), "an empty row has weight"


def check_other_head_dims_and_page_sizes(device: str, small: bool) -> None:
    for head_dim, page_size in ((80, 16), (64, 5)) if small else ((8, 4), (80, 16), (96, 16), (256, 16), (64, 5)):
        for dtype in DTYPES[1:]:
            case = make_case(Shape([0, 100], 4, 2, head_dim, page_size, dtype), device=device)
            got = decode_attention(*case.arguments, return_lse=True, impl="triton")
            assert_near(got, naive_attention(case), dtype)


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
    many = _random_case(Shape([1] * (20 if small else 70_000), 1, 1, 64, 16, torch.float16), device)
    got = decode_attention(*many.arguments, impl="triton")
    assert torch.equal(got[:, 0], many.pages.values[many.page_table[:, 0].long(), 0, 0])
    for length in (300,) if small else (70_000, 1_000_000):
        case = _random_case(Shape([length], 2, 1, 64, 16, torch.float16), device)
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


Check = Callable[[str, bool], None]
CHECKS: tuple[Check, ...] = (
    check_decode_kinds,
    check_other_head_dims_and_page_sizes,
    check_any_number_of_splits,
    check_garbage_changes_no_bit,
    check_wrong_values_are_loud_and_harmless,
    check_append,
    check_copy_rows,
    check_offsets_are_64_bit,
    check_large_grids,
    check_replay_of_a_graph,
)


# -- time ---------------------------------------------------------------------------------------------------------

LAUNCHES = 50
TIMED = {
    "smollm2_b1_2k": Shape([2048], 9, 3, 64, 16, torch.float32),
    "mha_b16_4k": Shape([4096] * 16, 32, 32, 128, 16, torch.float16),
    "gqa_b1_32k": Shape([32_768], 32, 8, 128, 16, torch.bfloat16),
    "gqa_b32_4k": Shape([4096] * 32, 32, 8, 128, 16, torch.bfloat16),
    "gqa_b32_4k_s32": Shape([4096] * 32, 32, 8, 128, 32, torch.bfloat16),
    "mqa_b64_2k": Shape([2048] * 64, 32, 1, 128, 16, torch.bfloat16),
}


def timings(device: str) -> Iterator[Row]:
    for name, shape in TIMED.items():
        case = _random_case(shape, device)
        dense = [pages.index_select(0, case.page_table.flatten()) for pages in case.pages]
        batch, length = len(shape.lengths), shape.lengths[0]
        keys, values = (
            each.view(batch, length, shape.kv_heads, shape.head_dim).transpose(1, 2).contiguous() for each in dense
        )
        dense_attention = torch.nn.functional.scaled_dot_product_attention
        beside = _time(partial(dense_attention, case.q[:, :, None], keys, values, enable_gqa=True))
        mine = _time(partial(decode_attention, *case.arguments, impl="triton"))
        yield row(f"gpu.decode_{name}_us", "us", mine, reference=beside.p50)
        moved = 2 * keys.numel() * keys.element_size()
        yield single(f"gpu.decode_{name}_gbps", "GB/s", moved / mine.p50 / 1e3, reference=moved / beside.p50 / 1e3)


def _random_case(shape: Shape, device: str) -> Case:
    """Rows of one length whose pages lie in random order, made on the device: drawing on the host takes minutes."""
    batch, used = len(shape.lengths), -(-shape.lengths[0] // shape.page_size)
    arena = empty_arena(shape.layout, batch * used, 0.0, device)
    arena.normal_()
    table = torch.randperm(batch * used, device=device).int().view(batch, used)
    q = torch.randn(batch, shape.query_heads, shape.head_dim, device=device).to(shape.dtype)
    lengths = torch.tensor(list(shape.lengths), dtype=torch.int32, device=device)
    return Case(arena, q, table, lengths, [], [])


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


def failures(device: str) -> list[str]:
    """Names of the checks that fail; each is run, so that one visit to a GPU tells everything."""
    failed = []
    for check in CHECKS:
        name = check.__name__.removeprefix("check_")
        try:
            check(device, False)
            torch.cuda.synchronize()
        except (AssertionError, RuntimeError) as error:
            failed.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            print(f"ok {name}", file=sys.stderr, flush=True)
    return failed


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: no CUDA device", file=sys.stderr)
        return
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", file=sys.stderr)
    failed = failures("cuda")
    report(timings("cuda"), sys.argv[1:])
    if failed:
        sys.exit(f"{len(failed)} of {len(CHECKS)} checks failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
