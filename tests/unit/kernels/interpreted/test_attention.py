"""All that the attention kernels know beside plain decoding, interpreted, in small shapes."""

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from bench import kernel_problems
from bench.kernel_cases import (
    INF,
    NAN,
    Case,
    Shape,
    assert_near,
    bits,
    make_case,
    naive_attention,
    sliced,
    sparse_arena,
)
from bench.kernel_problems import Problem
from bench.traffic import counted
from fuzz import kernels
from radixkv.kernels import append, decode_attention, group_prefixes, prefill_attention

QUICK = settings(deadline=None, derandomize=True, max_examples=20, database=None)
HALF = torch.float16


@QUICK
@given(seed=st.integers(0, 2**32 - 1))
def test_random_problems_equal_the_definition(seed: int) -> None:
    problem = Problem.of(seed)
    note(str(problem))
    assert_near(problem.got("triton"), problem.wanted(), problem.shape.dtype)


@pytest.mark.parametrize("head_dim", [32, 80, 96, 112, 192, 256])
def test_head_dims(head_dim: int) -> None:
    for shape in (
        Shape([70, 0], 4, 2, head_dim, 16, torch.bfloat16),
        Shape([70, 40], 2, 1, head_dim, 256, HALF, new_tokens=[9, 2]),
    ):
        case = make_case(shape)
        wanted = naive_attention(case)
        if case.starts is None:
            assert_near(decode_attention(*case.arguments, return_lse=True, impl="triton"), wanted, shape.dtype)
        else:
            got = prefill_attention(*case.arguments, case.starts, return_lse=True, impl="triton")
            assert_near(got, wanted, shape.dtype)


@pytest.mark.parametrize("softcap", [0.01, 50.0, 1e6])
def test_a_soft_cap_of_any_size_keeps_the_digits(softcap: float) -> None:
    """A large one changes hardly anything: tanh of small numbers is those numbers, to the last digits."""
    case = make_case(Shape([70, 3], 4, 2))
    got = decode_attention(*case.arguments, return_lse=True, softcap=softcap, impl="triton")
    assert_near(got, naive_attention(case, softcap=softcap), torch.float32)


@pytest.mark.parametrize(("fill", "items"), [(NAN, 3), (INF, 0)])
def test_garbage_changes_no_bit_whatever_the_kind(fill: float, items: int) -> None:
    shapes = (
        Shape([0, 17, 70], 2, 1, queries=3),
        Shape([0, 17, 70], 2, 1, new_tokens=[0, 17, 6]),
        Shape([33, 17, 70], 2, 1, shared=True),
    )
    for shape in shapes:
        results = []
        for case in (make_case(shape, fill=0.0, padding=0), make_case(shape, fill=fill, padding=2**31 - 1)):
            prefixes = group_prefixes(case.page_table, case.lengths, 16) if shape.shared else None
            results.append(sliced(case, items, prefixes, softcap=20.0))
        assert torch.equal(bits(results[0][0]), bits(results[1][0])), shape
        assert torch.equal(results[0][1], results[1][1]), shape


def test_pages_before_the_window_are_not_read() -> None:
    case = make_case(Shape([100, 60], 2, 1, queries=2))
    wanted = decode_attention(*case.arguments, window=30)
    case.page_table[0, :4] = -1  # the first query's window begins at token 69
    case.page_table[1, 0] = 2**31 - 1
    got = decode_attention(*case.arguments, window=30, impl="triton")
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


def reordered(case: Case, order: list[int]) -> Case:
    return Case(case.arena, case.q[order], case.page_table[order], case.lengths[order], [], [])


def test_the_order_of_the_batch_changes_no_bit() -> None:
    case = make_case(Shape([200, 0, 65, 130, 7], 2, 1))
    order = [3, 0, 4, 2, 1]
    for items in (0, 4):
        out, lse = sliced(case, items)
        again = sliced(reordered(case, order), items)
        assert torch.equal(bits(again[0]), bits(out[order]))
        assert torch.equal(again[1], lse[order])


SLICING_BOUND = 2e-6
"""What slices may change, relative to the largest value of the row's values: some roundings of float32."""


def test_slices_and_groups_change_no_more_than_the_stated_bound() -> None:
    """docs/kernels.md states it; for the 16-bit types the last rounding comes on top."""
    case = make_case(Shape([500, 450], 4, 1, shared=True))
    whole = sliced(case, 0)
    prefixes = group_prefixes(case.page_table, case.lengths, 16)
    seen = 0.0
    for other in (sliced(case, 3), sliced(case, 50), sliced(case, 5, prefixes)):
        for mine, wanted in zip(other, whole, strict=True):
            seen = max(seen, float((mine - wanted).abs().max() / max(1.0, float(wanted.abs().max()))))
    assert 0.0 < seen <= SLICING_BOUND


def test_a_long_row_among_short_ones_is_cut_in_many_slices() -> None:
    """Work is split by load: 27 tiles of 64 tokens, for 12 items more than there are rows, make slices of 3 tiles."""
    from radixkv.kernels import attention_launch

    slots: list[Tensor] = []
    launch = attention_launch._Launch.attend

    def watching(self: attention_launch._Launch, spans: attention_launch._Spans) -> None:
        slots.append(self.slots.clone())
        launch(self, spans)

    attention_launch._Launch.attend = watching
    try:
        case = make_case(Shape([1500, 20, 20, 0, 64], 1, 1))
        wanted = decode_attention(*case.arguments, return_lse=True)
        assert_near(sliced(case, 12), wanted, torch.float32)
    finally:
        attention_launch._Launch.attend = launch
    slices = slots[0][1, :5].tolist()
    assert slices == [8, 1, 1, 1, 1]
    assert slots[0][0, 5] == sum(slices)


# -- shared prefixes ----------------------------------------------------------------------------------------------


def many_levels(rows: int, page_size: int, dtype: torch.dtype = torch.float32, heads: tuple[int, int] = (4, 2)) -> Case:
    """Rows under a common prompt, in two halves with more in common, in pairs with still more, each with a tail."""
    lengths = [12 * page_size + 3 + row % 5 for row in range(rows)]
    case = make_case(Shape(lengths, *heads, 64, page_size, dtype))
    table = case.page_table
    for row in range(rows):
        table[row, :6] = table[0, :6]
        table[row, 6:9] = table[row // (rows // 2) * (rows // 2), 6:9]
        table[row, 9:11] = table[row // 2 * 2, 9:11]
    for row, length in enumerate(lengths):
        token = torch.arange(length)
        for kind, dense in ((0, case.keys), (1, case.values)):
            dense[row] = case.arena[table[row, token // page_size].long(), 1, kind, token % page_size]
    return case


def token_bytes(case: Case) -> int:
    return case.token_bytes


def distinct_bytes(case: Case, page_size: int) -> int:
    """Keys and values of all tokens that somebody attends to, a token of a shared page once."""
    tokens = set()
    for row, length in zip(case.page_table.tolist(), case.lengths.tolist(), strict=True):
        tokens |= {(row[token // page_size], token % page_size) for token in range(length)}
    return len(tokens) * token_bytes(case)


@pytest.mark.parametrize(("rows", "dtype", "items"), [(8, torch.float32, 11), (32, HALF, 0)])
def test_a_shared_page_is_read_once_for_its_group(rows: int, dtype: torch.dtype, items: int) -> None:
    """The addresses read are counted: with groups each byte once, without them each row's."""
    case = many_levels(rows, 16, dtype, (4, 1))
    prefixes = group_prefixes(case.page_table, case.lengths, 16)
    assert prefixes.shared_spans == 1 + 2 + rows // 2
    with counted(case.arena) as grouped:
        got = sliced(case, items, prefixes)
    assert_near(got, naive_attention(case), dtype)
    assert grouped.pages_read == distinct_bytes(case, 16)
    if rows == 8:
        with counted(case.arena) as flat:
            sliced(case, 0)
        assert flat.pages_read == int(case.lengths.sum()) * token_bytes(case) > 3 * grouped.pages_read


def test_every_row_alike() -> None:
    """All pages common, the last one full: nothing is left for the rows themselves."""
    case = make_case(Shape([64] * 6, 4, 2, shared=True))
    prefixes = group_prefixes(case.page_table, case.lengths, 16)
    with counted(case.arena) as traffic:
        got = decode_attention(*case.arguments, prefixes=prefixes, return_lse=True, impl="triton")
    assert_near(got, naive_attention(case), torch.float32)
    assert traffic.pages_read == distinct_bytes(case, 16)


def test_groups_with_a_tree_a_window_and_sinks() -> None:
    case = make_case(Shape([90, 75, 110, 80], 4, 2, queries=4, shared=True))
    tree = (
        torch.eye(4, dtype=torch.bool) | torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    )
    terms = {"window": 50, "sinks": torch.randn(4), "tree_mask": tree, "alibi_slopes": torch.rand(4) * 0.1}
    prefixes = group_prefixes(case.page_table, case.lengths, 16, queries=4, window=50)
    assert prefixes.shared_spans == 1
    got = decode_attention(*case.arguments, prefixes=prefixes, return_lse=True, impl="triton", **terms)
    assert_near(got, naive_attention(case, **terms), torch.float32)


def test_groups_outlive_the_pages_that_no_row_sees_any_more() -> None:
    case = make_case(Shape([52, 60, 57], page_size=4, shared=True))
    prefixes = group_prefixes(case.page_table, torch.tensor([40, 44, 41], dtype=torch.int32), 4, window=16)
    assert prefixes.shared_spans == 1
    case.page_table[:, :9] = -1
    got = decode_attention(*case.arguments, window=16, prefixes=prefixes, return_lse=True, impl="triton")
    assert_near(got, naive_attention(case, window=16), torch.float32)


# -- what was not checked, and where things lie -------------------------------------------------------------------


@pytest.mark.parametrize("items", [0, 5])
def test_wrong_starts_and_page_ids_touch_nothing_outside(items: int) -> None:
    case = make_case(Shape([40, 150, 20], 2, 1, new_tokens=[4, 5, 6]))
    wanted, _ = sliced(case, items)
    for starts in ([0, 2**31 - 1, 9, 15], [-7, 4, 9, 15], [0, 4, 2, 15], [5, 5, 5, 5], [0, 4, 9, 2**31 - 1]):
        bad = Case(case.arena, case.q, case.page_table, case.lengths, [], [], torch.tensor(starts, dtype=torch.int32))
        out, _ = sliced(bad, items)
        assert out.shape == wanted.shape
    case.page_table[1, 7] = len(case.arena)
    out, _ = sliced(case, items)
    assert out[4:9].isnan().all()
    torch.testing.assert_close(out[[0, 3, 9, 14]], wanted[[0, 3, 9, 14]], atol=2e-5, rtol=2e-5)


def test_a_wrong_page_in_a_shared_span_is_loud_for_its_rows_alone() -> None:
    case = make_case(Shape([40, 50, 35], 2, 1, shared=True))
    prefixes = group_prefixes(case.page_table, case.lengths, 16)
    wanted, _ = sliced(case, 0, prefixes)
    case.page_table[1, 3] = -1
    out, _ = sliced(case, 0, prefixes)
    assert out[1].isnan().all()
    torch.testing.assert_close(out[[0, 2]], wanted[[0, 2]], atol=2e-5, rtol=2e-5)
    case.page_table[:, 0] = len(case.arena)
    assert sliced(case, 0, prefixes)[0].isnan().all()


def test_offsets_are_64_bit() -> None:
    arena = sparse_arena(HALF)
    last = len(arena) - 1
    pages = (arena[:, 0, 0], arena[:, 0, 1])
    ids = torch.tensor([last, 0, 2**11 - 1])
    token = torch.arange(40)
    k, v = torch.randn(2, 40, 1, 64).to(HALF)
    append(k, v, *pages, ids[token // 16] * 16 + token % 16, impl="triton")
    q = torch.randn(8, 2, 64).to(HALF)
    table, lengths = ids.int()[None], torch.tensor([40], dtype=torch.int32)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    wanted = prefill_attention(q, *pages, table, lengths, starts)
    got = prefill_attention(q, *pages, table, lengths, starts, impl="triton")
    torch.testing.assert_close(got, wanted, atol=3e-3, rtol=3e-3)
    two = (q[:2], *pages, table.expand(2, 3), lengths.expand(2))
    prefixes = group_prefixes(two[3], two[4], 16)
    assert prefixes.shared_spans == 1
    got = decode_attention(*two, prefixes=prefixes, impl="triton")
    torch.testing.assert_close(got, decode_attention(*two), atol=3e-3, rtol=3e-3)


# -- the fuzzer ---------------------------------------------------------------------------------------------------


def test_the_fuzzer_names_the_seed_of_what_it_finds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = next(seed for seed in range(0, 300, 3) if sum(Problem.of(seed).shape.new_tokens or ()))
    assert kernels.main(["--seed", str(seed), "--count", "1"]) == 0
    assert "prefill 1" in capsys.readouterr().out
    wrong = prefill_attention

    def spoilt(*arguments: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        out, lse = wrong(*arguments, **options)
        return out + 0.1, lse

    monkeypatch.setattr(kernel_problems, "prefill_attention", spoilt)
    assert kernels.main(["--seed", str(seed), "--count", "1"]) == 1
    assert f"again: python -m fuzz.kernels --seed {seed} --count 1" in capsys.readouterr().err
