"""All that attention may mean, in plain torch, against the definition in float64."""

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from bench.kernel_cases import INF, NAN, Shape, assert_near, bits, make_case, naive_attention
from bench.kernel_problems import KINDS, Problem
from radixkv.config import QUANTIZED
from radixkv.errors import BadRequest
from radixkv.kernels import append, decode_attention, group_prefixes, prefill_attention

QUICK = settings(deadline=None, derandomize=True, max_examples=120, database=None)


@QUICK
@given(seed=st.integers(0, 2**32 - 1))
def test_random_problems_equal_the_definition(seed: int) -> None:
    problem = Problem.of(seed)
    note(str(problem))
    assert_near(problem.got("torch"), problem.wanted(), problem.shape.dtype)


def test_the_random_problems_are_of_every_kind() -> None:
    problems = [Problem.of(seed) for seed in range(150)]
    assert {problem.kind for problem in problems} == set(KINDS)
    assert {(problem.kind, problem.shape.quantized) for problem in problems} >= {
        (kind, dtype) for kind in KINDS for dtype in ("", *QUANTIZED)
    }  # fmt: skip
    assert {len(problem.terms) for problem in problems} >= {0, 1, 2, 3}
    assert sum(problem.kind == "grouped" and 0 not in problem.shape.lengths for problem in problems) > 5


@pytest.mark.parametrize("fill", [NAN, INF])
def test_garbage_changes_no_bit_whatever_the_kind(fill: float) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for length in (0, 3, 17, 40):
        for shape in (Shape([length, 40], queries=3), Shape([length, 40], new_tokens=[length // 2, 10])):
            clean, dirty = make_case(shape, fill=0.0, padding=0), make_case(shape, fill=fill, padding=2**31 - 1)
            for window in (None, 7):
                for case in (clean, dirty):
                    if window is not None:  # nor do pages before the window, which may be anybody's by now
                        case.page_table[1, 0] = 0 if case is clean else -1
                results = []
                for case in (clean, dirty):
                    if case.starts is None:
                        results.append(decode_attention(*case.arguments, window=window, sinks=sinks))
                    else:
                        results.append(prefill_attention(*case.arguments, case.starts, window=window, sinks=sinks))
                assert torch.equal(bits(results[0]), bits(results[1])), (length, shape)


def test_a_query_before_the_first_token_sees_nothing() -> None:
    case = make_case(Shape([2, 0, 9], queries=4))
    out, lse = decode_attention(*case.arguments, return_lse=True)
    assert not out[0, :2].any()
    assert not out[1].any()
    assert (lse[0, :2] == -INF).all()
    assert (lse[1] == -INF).all()
    assert lse[0, 2:].isfinite().all()


def test_a_sink_takes_weight_but_makes_no_row_of_nothing() -> None:
    case = make_case(Shape([0, 30]))
    plain, lse = decode_attention(*case.arguments, return_lse=True)
    sinks = torch.tensor([1.0, -INF, 60.0, 0.0])
    out, with_sink = decode_attention(*case.arguments, sinks=sinks, return_lse=True)
    assert not out[0].any()
    assert (with_sink[0] == -INF).all()
    assert torch.equal(out[1, 1], plain[1, 1])
    torch.testing.assert_close(with_sink[1], torch.logaddexp(lse[1], sinks))
    assert out[1, 2].abs().max() < 1e-6


def test_several_query_tokens_equal_decoding_one_after_the_other() -> None:
    case = make_case(Shape([37, 64], queries=5))
    together = decode_attention(*case.arguments)
    q, keys, values, table, lengths = case.arguments
    for query in range(5):
        alone = decode_attention(q[:, query], keys, values, table, lengths - 4 + query)
        torch.testing.assert_close(together[:, query], alone, atol=2e-5, rtol=2e-5)


def test_a_prefill_over_a_cached_prefix_equals_one_of_everything() -> None:
    """The same tokens in one go, and the second part over the first part's pages; and long ones, in chunks."""
    everything = make_case(Shape([300, 20], new_tokens=[300, 20]))
    out = prefill_attention(*everything.arguments, everything.starts)
    assert_near((out, out), (naive_attention(everything)[0],) * 2, torch.float32)
    q, keys, values, table, lengths = everything.arguments
    late = torch.cat([q[130:300], q[305:320]])
    starts = torch.tensor([0, 170, 185], dtype=torch.int32)
    part = prefill_attention(late, keys, values, table, lengths, starts)
    torch.testing.assert_close(part, torch.cat([out[130:300], out[305:320]]), atol=2e-5, rtol=2e-5)


def test_query_tokens_of_no_row_and_rows_without_any() -> None:
    case = make_case(Shape([10, 20, 0], new_tokens=[0, 3, 0]))
    q = torch.cat([case.q, torch.full((2, 4, 64), NAN)])
    out, lse = prefill_attention(q, *case.arguments[1:], case.starts, return_lse=True)
    assert torch.equal(out[:3], prefill_attention(*case.arguments, case.starts))
    assert not out[3:].any()
    assert (lse[3:] == -INF).all()


def test_grouped_rows_grow_without_a_new_plan() -> None:
    case = make_case(Shape([40, 48, 45], shared=True, spare_entries=2))
    prefixes = group_prefixes(case.page_table, case.lengths, 16)
    assert prefixes.shared_spans == 1
    q, keys, values, table, lengths = case.arguments
    spare = [page for page in range(len(case.arena)) if page not in table.flatten().tolist()]
    table[1, 3] = spare[0]
    new = torch.randn(2, 3, 2, 64)
    slots = table.long()[torch.arange(3), lengths.long() // 16] * 16 + lengths % 16
    append(new[0], new[1], keys, values, slots)
    grown = (q, keys, values, table, lengths + 1)
    torch.testing.assert_close(
        decode_attention(*grown, prefixes=prefixes), decode_attention(*grown), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("queries", [1, 3])
def test_groups_outlive_the_pages_that_no_row_sees_any_more(queries: int) -> None:
    """A window moves on, the pages before it are given back, and their entries in the page table are -1."""
    case = make_case(Shape([52, 60, 57], queries=queries, page_size=4, shared=True))
    table, lengths = case.page_table, case.lengths
    prefixes = group_prefixes(table, torch.tensor([40, 44, 41], dtype=torch.int32), 4, queries=queries, window=16)
    assert prefixes.shared_spans == 1
    wanted = decode_attention(*case.arguments, window=16)
    table[:, : (52 - queries + 1 - 16) // 4] = -1
    got = decode_attention(*case.arguments, window=16, prefixes=prefixes)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    table[int(prefixes.span_table[0, 0])] = -1
    lengths[int(prefixes.span_table[0, 0])] = 0
    with pytest.raises(BadRequest, match="shorter than a prefix that it shares"):
        decode_attention(*case.arguments, window=16, prefixes=prefixes)


def test_an_entry_that_only_another_row_of_the_group_sees_is_still_needed() -> None:
    case = make_case(Shape([24, 24], page_size=4, shared=True, spare_entries=9))
    prefixes = group_prefixes(case.page_table, case.lengths, 4, window=8)
    first = int(prefixes.span_table[0, 0])
    case.lengths[first] += 36
    case.page_table[first] = torch.where(torch.arange(15) < 13, -1, 0)  # all that this row does not see
    with pytest.raises(BadRequest, match=r"a page id of a shared prefix is not in the pool .*page=-1"):
        decode_attention(*case.arguments, window=8, prefixes=prefixes)


def test_a_tree_of_one_chain_is_causal_and_one_for_all_rows_is_enough() -> None:
    case = make_case(Shape([30, 18], queries=4))
    chain = torch.ones(4, 4, dtype=torch.bool).tril()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    for options in ({}, {"window": 3}, {"alibi_slopes": slopes}):
        wanted = decode_attention(*case.arguments, **options)
        assert torch.equal(decode_attention(*case.arguments, tree_mask=chain, **options), wanted)
        assert torch.equal(decode_attention(*case.arguments, tree_mask=chain.expand(2, 4, 4), **options), wanted)
