"""``radixkv bench vllm``: its load and its table; ``tests/engines`` runs it."""

from __future__ import annotations

from radixkv.adapters.vllm.bench import report
from radixkv.adapters.vllm.bench.load import Shape, make
from radixkv.adapters.vllm.bench.run import Findings, Measured

SHAPE = Shape(document_tokens=50, question_tokens=3, documents=2, questions=3)


def test_the_questions_share_their_document_and_nothing_else() -> None:
    load = make(SHAPE)
    halves = (load.one_by_one, load.at_once)
    assert [len(half) for half in halves] == [6, 6]
    assert len({tuple(prompt[:50]) for half in halves for prompt in half}) == 4
    assert len({tuple(prompt) for half in halves for prompt in half}) == 12
    assert load.one_by_one[0][:50] != load.one_by_one[1][:50]
    assert load.one_by_one[0][:50] == load.one_by_one[2][:50] == load.one_by_one[4][:50]
    assert make(SHAPE) == load


def row(way: str, engine: str, speed: float, outputs: list[list[int]], cached: int = 250) -> Measured:
    return Measured(way, engine, 4.0 / speed, 2.0 / speed, 100.0 * speed, 1000, cached, outputs)


def test_the_table_compares_with_the_first_engine_without_a_cache() -> None:
    found = Findings(
        [row("radixkv", "fresh", 2.0, [[1]]), row("nothing", "first", 1.0, [[1]])], {"offloading": "no GPU"}
    )
    lines = report.table(SHAPE, found).splitlines()
    assert "| radixkv, vLLM's own prefix cache in front of it | fresh | 2.00 s (0.50) | 1.00 s (0.50) | " in lines[5]
    assert lines[5].endswith("| 200 tokens/s (2.00) | 25% |")
    assert "does not run: no GPU" in lines[7]
    assert lines[-1] == "All outputs are equal."
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_a_cache_that_changes_an_output_is_told() -> None:
    found = Findings([row("radixkv", "first", 1.0, [[1]]), row("radixkv", "fresh", 1.0, [[2]])])
    assert report.table(SHAPE, found).endswith("OUTPUTS DIFFER.")
    assert report.as_json(SHAPE, found)["same_outputs"] is False
    assert not found.ok(())


def test_figures_of_an_engine_that_radixkv_gave_nothing_are_told() -> None:
    found = Findings([row("radixkv", "first", 1.0, [[1]], 700), row("radixkv", "fresh", 1.0, [[1]], 700)])
    assert "RADIXKV GAVE THE FRESH ENGINE NOTHING: radixkv, vLLM" in report.table(SHAPE, found)
    assert report.as_json(SHAPE, found)["gave_nothing"] == ["radixkv"]
    assert not found.ok(("radixkv",))
    found.rows[1] = row("radixkv", "fresh", 1.0, [[1]], 960)
    assert found.gave_nothing == []
    assert found.ok(("radixkv",))


def test_a_way_that_does_not_run_is_no_success_unless_it_cannot_run_on_a_cpu() -> None:
    nothing_ran = Findings(not_run={"radixkv": "no daemon"})
    assert report.table(SHAPE, nothing_ran).endswith("NOTHING HAS RUN.")
    assert not nothing_ran.ok(("radixkv",))
    assert not nothing_ran.ok(())
    found = Findings([row("nothing", "first", 1.0, [[1]])], {"offloading": "no GPU"})
    assert found.ok(())
    assert not found.ok(("nothing", "offloading"))
