"""``python -m fuzz.mutants.pure``: the suite's pure part, under a minute of one core. Starts no process, opens no
socket, loads no torch. Stops at the first failure.

What is cheap and sharp comes first: unit tests, then short runs of the fuzzers, then what takes long.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import radixkv

ROOT = Path(__file__).parents[2]

SELECTION = (
    "tests/unit/allocator/test_page_pool.py",
    "tests/unit/sessions/test_registry.py",
    "tests/unit/sessions/test_running_time.py",
    "tests/unit/tree/test_prefix_tree.py",
    "tests/unit/tree/test_two_tiers.py",
    "tests/unit/test_hashing.py",
    "tests/unit/evictor/test_policies.py",
    "tests/unit/evictor/test_lru.py",
    "tests/unit/evictor/test_priorities.py",
    "tests/unit/device/test_descriptors.py",
    "tests/unit/device/test_manifest.py",
    "tests/unit/device/test_quiescence.py",
    "tests/unit/ipc/test_peek.py",
    "tests/unit/ipc/test_wire.py",
    "tests/golden/test_wire.py",
    "tests/unit/client/test_namespace.py",
    "tests/unit/client/test_tokens.py",
    "tests/unit/client/test_snapshot.py",
    "tests/unit/client/test_verbs.py",
    "tests/unit/client/test_outbox.py",
    "tests/unit/client/test_doubts.py",
    "tests/unit/client/test_step.py",
    "tests/unit/client/test_batch.py",
    "tests/unit/client/test_sequence.py",
    "tests/unit/client/test_resume.py",
    "tests/unit/engine/test_floors.py",
    "tests/unit/engine/test_ranks.py",
    "tests/unit/engine/test_step_order.py",
    "tests/unit/engine/test_requests.py",
    "tests/unit/engine/test_uses.py",
    "tests/unit/engine/test_retention.py",
    "tests/unit/engine/test_flights.py",
    "tests/unit/engine/test_shares.py",
    "tests/unit/engine/test_invariants.py",
    "tests/unit/engine/test_host.py",
    "tests/unit/engine/test_tiering.py",
    "tests/unit/engine/test_losing.py",
    "tests/unit/engine/test_early.py",
    "tests/unit/engine/test_recover.py",
    "tests/unit/engine/test_recover_tiers.py",
    "tests/unit/engine/test_reports_waiting.py",
    "tests/unit/engine/test_reports_sessions.py",
    "tests/unit/engine/test_reports_pages.py",
    "tests/unit/engine/test_reports_forks.py",
    "tests/unit/engine/test_reports_numbers.py",
    "tests/unit/daemon/test_order.py",
    "tests/unit/ipc/test_event_feed.py",
    "tests/unit/fuzz/test_short_runs.py",
    "tests/unit/sessions/test_sessions_machine.py",
    "tests/unit/allocator/test_allocator_machine.py",
    "tests/unit/client/test_resume_engine.py",
    "tests/unit/engine/test_slices.py",
)
"""In the order in which they run."""

LAST = (
    "tests/unit/client/test_batch.py::test_each_sequence_keeps_its_order",
    "tests/unit/engine/test_recover.py::test_every_store_of_a_short_life_is_cut",
    "tests/unit/engine/test_reports_forks.py::test_random_inserts_then_eviction_page_by_page_to_an_empty_tree",
    "tests/unit/engine/test_reports_forks.py::test_speculative_decode_gives_every_draft_page_back",
    "tests/unit/engine/test_reports_numbers.py::test_a_path_of_20_000_nodes_needs_no_recursion",
    "tests/unit/engine/test_reports_pages.py::test_page_counts_add_up_with_prefixes_of_odd_lengths",
    "tests/unit/engine/test_reports_sessions.py::test_64_workers_end_at_once_in_slices",
    "tests/unit/engine/test_reports_waiting.py::test_rk_050_cancel_death_and_expiry_of_waiting_requests_a_thousand_times",
    "tests/unit/evictor/test_policies.py::test_a_cache_with_losses_that_is_always_right",
    "tests/unit/ipc/test_wire.py::test_ten_thousand_announcements_of_gigabytes_take_neither_memory_nor_time",
)
"""Slow tests of these files: after all others."""

LEFT_OUT = (
    "tests/unit/client/test_resume_engine.py::test_a_seed_that_nobody_chose",
    "tests/unit/engine/test_recover.py::test_a_hundred_thousand_pages_cost_what_they_are",
    "tests/unit/engine/test_recover.py::test_random_histories_cut_at_every_store",
    "tests/unit/engine/test_recover_tiers.py::test_random_histories_cut_at_every_store",
    "tests/unit/evictor/test_policies.py::test_a_hook_costs_the_same_whatever_the_cache_holds",
)
"""Tests of these files that compare times, or do something else each time."""

HANGS_S = 60
"""A test that takes so long has met something that never ends."""

MEMORY_BYTES = 8 * 2**30
"""A mutant that grows without end must not take the machine along."""


class Conductor:
    """A pytest plugin: the order of the tests, and which one ran last (into ``report``, for whoever started us)."""

    def __init__(self, report: Path | None) -> None:
        self._report = report

    def _note(self, name: str) -> None:
        if self._report is not None:
            self._report.write_text(name, encoding="utf-8")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not item.nodeid.startswith(LEFT_OUT)]
        items.sort(key=lambda item: item.nodeid.startswith(LAST))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._note(report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(nodeid)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.mutants.pure", description=__doc__)
    parser.add_argument("tests", nargs="*", default=SELECTION, help="only these files (default: the whole pure part)")
    parser.add_argument("--report", type=Path, help="a file for the name of the test that ran last")
    options = parser.parse_args(arguments)
    if Path(radixkv.__file__).parents[1] != ROOT:
        print(f"radixkv would come from {radixkv.__file__}, not from {ROOT}", file=sys.stderr)
        return 2
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    flags = ["--exitfirst", "--quiet", "--no-header", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    flags += ["-o", f"faulthandler_timeout={HANGS_S}"]
    return int(
        pytest.main([*flags, *(str(ROOT / path) for path in options.tests)], plugins=[Conductor(options.report)])
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
