"""The work is what its description says: sizes, shared parts, seeds."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from bench import workload


@pytest.fixture(scope="module")
def tree() -> workload.Tree:
    return workload.tree()


def test_the_tree_has_a_thousand_sequences_on_twenty_prompts(tree: workload.Tree) -> None:
    sequences = tree.conversations + tree.long
    assert len(sequences) == 1_000
    assert len({tokens[:1024].tobytes() for tokens in sequences}) == 20
    assert len({tokens[:1040].tobytes() for tokens in sequences}) == 1_000
    pages = 20 * 64 + 992 * 192 + 8 * (2_048 - 64)
    assert pages == 207_616, "about 206,000 pages"
    assert {len(tokens) for tokens in tree.long} == {32_768}


def test_long_sequences_grow_in_sixteen_turns(tree: workload.Tree) -> None:
    admitted = list(islice(tree.admissions(), 992, 992 + 16))
    assert [len(tokens) for tokens in admitted] == list(range(2_048, 32_769, 2_048))
    assert admitted[-1].tobytes() == tree.long[0].tobytes()


def test_half_of_each_w3_request_is_cached(tree: workload.Tree) -> None:
    for number, tokens in enumerate(islice(tree.half_cached(), 3)):
        cached = tree.conversations[number]
        assert len(tokens) == 4_096
        assert (tokens[:2_048] == cached[:2_048]).all()
        assert tokens[2_048:2_064].tobytes() != cached[2_048:2_064].tobytes()


@pytest.mark.parametrize("work", [workload.W4, workload.W4B])
def test_a_churn_fills_its_pool_before_the_clock_starts(work: workload.Churn) -> None:
    assert work.fill * work.new_pages > work.pool_pages
    sequences = list(islice(workload.stream(work), 200))
    assert {len(tokens) for tokens in sequences} == {work.tokens}
    assert len({tokens[: work.shared_tokens].tobytes() for tokens in sequences}) == work.prompts
    assert len({tokens[: work.shared_tokens + 16].tobytes() for tokens in sequences}) == len(sequences)


def test_the_same_seed_gives_the_same_work(tree: workload.Tree) -> None:
    again = workload.tree()
    assert all((a == b).all() for a, b in zip(tree.long, again.long, strict=True))
    first, second = (next(workload.stream(workload.W4)) for _ in range(2))
    assert (first == second).all()
    assert first.dtype == np.uint32 and int(first.max()) < workload.VOCABULARY


@pytest.mark.parametrize(("edges", "lengths"), [(1, []), (4, [48, 80, 112]), (8, [32, 48, 64, 80, 96, 112, 128])])
def test_forks_leave_a_path_at_its_inner_boundaries(edges: int, lengths: list[int]) -> None:
    source = workload.generator(1)
    path = workload.fresh(source, 128)
    forks = workload.forks(path, edges, source)
    assert [len(fork) for fork in forks] == lengths
    assert all((fork[:-16] == path[: len(fork) - 16]).all() for fork in forks)
