"""The sums behind the figures: percentiles, rows and their JSON, another process's CPU clock, the peers' table."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time

import pytest

from bench.rows import Row, as_text, print_table, row, single
from bench.stopwatch import on_cpu, percentile, process_cpu_s, quiet, summarize, time_each, two_cpus


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [([7], 0.5, 7), ([1, 2], 0.5, 1), ([1, 2, 3], 0.5, 2), (range(1, 101), 0.99, 99), (range(1, 1001), 0.99, 990)],
)
def test_a_percentile_is_the_smallest_that_enough_do_not_exceed(
    values: list[int], fraction: float, expected: int
) -> None:
    assert percentile(list(values), fraction) == expected


def test_nothing_measured_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no measurement"):
        percentile([], 0.5)


def test_a_summary_does_not_need_order() -> None:
    found = summarize([3, 1, 2]).scaled(10)
    assert (found.n, found.p50, found.p99) == (3, 20, 30)


@pytest.mark.parametrize(("value", "bar", "ok"), [(1.0, 1.0, True), (1.1, 1.0, False), (9.0, None, True)])
def test_a_row_is_ok_up_to_its_bar(value: float, bar: float | None, ok: bool) -> None:
    assert single("a.b", "us", value, bar).ok is ok


@pytest.mark.parametrize(("value", "ok"), [(0.9, True), (0.85, True), (0.84, False)])
def test_a_bar_may_be_the_least(value: float, ok: bool) -> None:
    made = Row("copy.d2h_ratio", value, "x", bar=0.85, at_least=True)
    assert made.ok is ok
    assert ("MISSED" in as_text(made)) is not ok


@pytest.mark.parametrize("value", [0.9, 0.84])
@pytest.mark.parametrize("at_least", [True, False])
def test_json_keeps_what_kind_of_bar_it_is(value: float, at_least: bool) -> None:
    made = Row("copy.d2h_ratio", value, "x", bar=0.85, at_least=at_least)
    assert Row.from_json(made.as_json()) == made


def test_json_has_the_fields_of_the_contract_and_comes_back() -> None:
    made = row("index.churn_us", "us", summarize([1.0, 2.0, 4.0]), bar=3.0, reference=8.0)
    fields = json.loads(made.as_json())
    assert list(fields) == ["name", "value", "unit", "reference", "bar", "ok", "n", "p50", "p99"]
    assert fields == {
        "name": "index.churn_us", "value": 2.0, "unit": "us", "reference": 8.0, "bar": 3.0, "ok": True, "n": 3,
        "p50": 2.0, "p99": 4.0,
    }  # fmt: skip
    assert Row.from_json(made.as_json()) == made


def test_the_process_clock_counts_this_process() -> None:
    before, own = process_cpu_s(os.getpid()), time.process_time()
    sum(range(300_000))
    used, own = process_cpu_s(os.getpid()) - before, time.process_time() - own
    assert used == pytest.approx(own, rel=0.5)
    assert used > 0


def test_what_begins_inside_stays_on_its_cpu() -> None:
    before = os.sched_getaffinity(0)
    server, client = two_cpus()
    assert {server, client} <= before
    assert server != client or len(before) == 1
    show = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    with on_cpu(client):
        assert subprocess.run(show, capture_output=True, text=True, check=True).stdout == f"{{{client}}}\n"
    assert os.sched_getaffinity(0) == before


def test_garbage_collection_rests_while_the_clock_runs() -> None:
    with quiet():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_each_item_is_timed_and_what_makes_it_is_not() -> None:
    seen: list[int] = []
    assert len(time_each(seen.append, iter(range(5)))) == 5
    assert seen == list(range(5))


def test_the_table_cuts_no_name_and_counts_the_bars(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        single("index.reserve_full_1m_over_1k", "x", 1.6, 1.5, 23.5),
        single("daemon.idle_cpu_percent", "%", 0.1, 1.0),
        row("index.memcmp_us", "us", summarize([5.0, 6.0, 7.0])),
    ]
    print_table(rows, "figures")
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if "." in line}
    assert lines["index.reserve_full_1m_over_1k"] == ["1.6", "x", "1.5", "over", "23.5"]
    assert lines["daemon.idle_cpu_percent"] == ["0.1", "%", "1", "ok"]
    assert lines["index.memcmp_us"] == ["6", "us", "7", "3"]
    assert "1 of 2 bars are kept" in printed
