"""Curves: which points are looked at, the same ones with any number of processes, and the picture."""

import json
from pathlib import Path

import pytest

from radixkv.config import POLICIES
from radixkv.errors import ConfigError
from radixkv.simulate.curve import BOUND, Point, Task, capacities, points
from radixkv.simulate.picture import STYLES, draw
from tests.unit.simulate.made_up import shared_prefixes

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Two traces: one file of 40 prompts of 3 blocks that begin alike, and its first half."""
    lines = [json.dumps({"timestamp": n, "hash_ids": [n % 4, 10 + n % 8, 100 + n]}) for n in range(40)]
    for name, count in (("whole", 40), ("half", 20)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines[:count]))
    return [tmp_path / "whole.jsonl", tmp_path / "half.jsonl"]


def test_capacities_are_shares_of_the_different_blocks_that_hold_the_longest_prompt() -> None:
    trace = shared_prefixes(groups=10, prompts=10, shared=5, own=1)
    assert trace.unique_blocks == 150
    assert capacities(trace) == [7, 15, 37, 75]
    assert capacities(trace, [100, 6, 100, 5]) == [6, 100]
    with pytest.raises(ConfigError, match="at least 6"):
        capacities(trace, [5, 1])
    with pytest.raises(ConfigError, match="half of its 4 different blocks do not hold its longest prompt, of 4"):
        capacities(shared_prefixes(groups=1, prompts=1, shared=3, own=1))


def test_points_are_the_same_in_one_process_and_in_two(paths: list[Path]) -> None:
    tasks = [Task(number, policy, 12) for number in (0, 1) for policy in ("lru", "lfu", BOUND)]
    alone = dict(points(paths, tasks, jobs=1))
    assert alone == dict(points(paths, tasks, jobs=2))
    assert list(alone) == tasks
    assert [point.trace for point in alone.values()] == ["whole"] * 3 + ["half"] * 3
    assert alone[tasks[0]].blocks == 120
    assert 0 < alone[tasks[0]].hits < alone[tasks[2]].hits


def test_an_error_in_a_process_is_the_callers(paths: list[Path]) -> None:
    with pytest.raises(ConfigError, match="at least 3"):
        list(points(paths, [Task(0, "lru", 2), Task(0, "lru", 20)], jobs=2))


def test_every_policy_has_a_line_of_its_own() -> None:
    """One without a style would not be drawn."""
    assert set(STYLES) == {*POLICIES, BOUND}


def test_the_picture_is_a_png_with_a_panel_a_trace(tmp_path: Path) -> None:
    made = [
        Point(trace, policy, blocks, blocks, 100) for trace in "ab" for policy in ("lru", BOUND) for blocks in (5, 9)
    ]
    widths = []
    for number, some in enumerate((made, made[:4])):
        path = tmp_path / f"{number}.png"
        draw(some, path)
        content = path.read_bytes()
        assert content.startswith(PNG)
        widths.append(int.from_bytes(content[16:20], "big"))
    assert widths[0] == 2 * widths[1]
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(made, tmp_path / "nowhere" / "x.png")
