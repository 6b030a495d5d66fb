"""docs/eviction.md: every policy, its picture, and figures that are the real ones."""

import os
import re
from pathlib import Path

import pytest

from radixkv.config import POLICIES
from radixkv.simulate.bound import belady_hits
from radixkv.simulate.curve import BOUND, capacities
from radixkv.simulate.replay import Memory, replay
from radixkv.simulate.trace import load

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "eviction.md").read_text(encoding="utf-8")
FOLDER = Path(os.environ.get("RADIXKV_REFERENCE_DIR", "nowhere")) / "traces"
TABLE = re.compile(r"^(\w+): hit blocks, % of ([\d,]+)\n\n([^:]*?)\n\n", re.MULTILINE)


def tables() -> dict[str, dict[int, dict[str, str]]]:
    """By trace and capacity: what the page says of each policy."""
    found = {}
    for trace, _, body in TABLE.findall(PAGE + "\n\n"):
        header, _, *rows = [line.split() for line in body.replace("```", "").splitlines() if line.strip()]
        found[trace] = {int(row[0].replace(",", "")): dict(zip(header[2:], row[1:], strict=True)) for row in rows}
    return found


def two_tiers() -> list[tuple[str, list[int], str]]:
    """(trace, [device blocks, host blocks, device hits, host hits], hit rate), as the page says."""
    found = re.findall(
        r"^\| (\w+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) % \|$", PAGE, re.MULTILINE
    )
    return [(row[0], [int(cell.replace(",", "")) for cell in row[1:5]], row[5]) for row in found]


def test_every_policy_is_explained() -> None:
    for policy in POLICIES:
        assert re.search(rf"^\| `{policy}`", PAGE, re.MULTILINE)


def test_the_picture_is_there_and_small() -> None:
    (name,) = re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", PAGE)
    picture = (DOCS / name).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 150_000


def test_every_trace_has_a_table_with_every_policy() -> None:
    assert len(tables()) == 3
    assert all(list(row) == [*POLICIES, BOUND] for rows in tables().values() for row in rows.values())


@pytest.mark.long
@pytest.mark.skipif(not FOLDER.is_dir(), reason="no traces: $RADIXKV_REFERENCE_DIR is not set")
@pytest.mark.parametrize("name", tables())
def test_the_figures_are_the_real_ones(name: str) -> None:
    trace = load(FOLDER / f"{name}.jsonl.gz")
    rows = tables()[name]
    assert list(rows) == capacities(trace)
    for blocks, row in rows.items():
        hits = {policy: replay(trace, Memory(blocks, policy=policy)).device_hits for policy in POLICIES}
        hits[BOUND] = belady_hits(trace, blocks)
        assert row == {policy: f"{100 * found / trace.blocks:.2f}" for policy, found in hits.items()}


@pytest.mark.long
@pytest.mark.skipif(not FOLDER.is_dir(), reason="no traces: $RADIXKV_REFERENCE_DIR is not set")
def test_the_figures_of_two_tiers_are_the_real_ones() -> None:
    assert len(two_tiers()) == 3
    for name, (device, host, *hits), rate in two_tiers():
        report = replay(load(FOLDER / f"{name}.jsonl.gz"), Memory(device, host))
        assert [report.device_hits, report.host_hits] == hits
        assert f"{100 * report.hit_rate:.2f}" == rate
