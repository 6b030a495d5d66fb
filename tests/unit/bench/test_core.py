"""What is timed is the real engine doing the work that the rows' names promise."""

from __future__ import annotations

import pytest

from bench import scale, workload
from bench.core import NAMESPACE, Core
from radixkv.engine import invariants
from radixkv.tree.node import Root


def test_an_admission_is_cached_afterwards_and_holds_nothing() -> None:
    core = Core(64)
    tokens = workload.fresh(workload.generator(1), 256).tobytes()
    assert core.admit(tokens) == 0
    assert core.admit(tokens) == 255, "last_page=keep leaves one token to compute"
    assert core.pool.tree.idle_pages == core.pool.tree.cached_pages == 16
    assert core.pool.sequences == 0


def test_commands_made_beforehand_do_the_same_as_those_made_on_the_way() -> None:
    made, in_three, asked = Core(64), Core(64), Core(64)
    sequences = [workload.fresh(workload.generator(seed), 256).tobytes() for seed in (1, 2, 1, 3, 4, 5)]
    admissions = [made.admission(tokens) for tokens in sequences]
    three = [in_three.admission_in_three(tokens) for tokens in sequences]
    for two_commands, three_commands, tokens in zip(admissions, three, sequences, strict=True):
        made.carry_out(two_commands)
        in_three.carry_out(three_commands)
        asked.admit(tokens)
    for core in (made, in_three):
        invariants.check(core.engine)
        assert shape(core) == shape(asked)
        assert core.pool.counters == asked.pool.counters
        core.check(0, 5 * 16)


def test_work_that_was_refused_or_not_done_is_no_figure() -> None:
    core = Core(8)
    core.carry_out(core.admission(bytes(4 * 16 * 9)))
    with pytest.raises(RuntimeError, match="0 pages committed, not 9; 1 requests refused, 0 sequences left"):
        core.check(0, 9)
    core = Core(8)
    core.ask(core.admission(bytes(64))[0].body)
    with pytest.raises(RuntimeError, match="0 requests refused, 1 sequences left"):
        core.check(0, 0)


def test_forks_cut_the_path_of_the_real_tree() -> None:
    core = Core(1_024)
    source = workload.generator(2)
    tokens = workload.fresh(source, 2_048)
    core.admit(tokens.tobytes())
    core.admit_all(workload.forks(tokens, 8, source))
    assert len(core.pool.tree.match(root_of(core), tokens.tobytes()).parts) == 8


def test_a_leafy_core_is_what_commands_would_have_made() -> None:
    made, asked = scale.leafy(48), Core(48)
    source = workload.generator(7)
    asked.admit(workload.fresh(source, 16).tobytes())
    for tokens in scale.pages_of_tokens(source, 47):
        asked.admit(tokens)
    invariants.check(made.engine)
    assert shape(made) == shape(asked)
    assert made.pool.pages.counts == asked.pool.pages.counts


def test_a_reserve_in_a_full_pool_evicts_one_page_and_leaves_it_full() -> None:
    core = scale.leafy(300)
    assert len(scale.reserve_chunk(core, workload.generator(8))) == scale.CHUNK
    assert core.pool.tree.cached_pages == core.pool.tree.nodes == 300
    invariants.check(core.engine)


def root_of(core: Core) -> Root:
    namespace = core.pool.namespaces.find(NAMESPACE)
    assert namespace is not None
    return namespace.root


def shape(core: Core) -> list[tuple[bytes, int, int]]:
    """Every leaf in the order of eviction: tokens, holders, place."""
    leaves = (root_of(core).children or {}).values()
    return [(bytes(leaf.tokens), leaf.holders, leaf.stamp) for leaf in leaves]
