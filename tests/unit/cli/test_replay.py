"""``radixkv replay`` and ``radixkv curve``: the JSON of the contract, tables, refusals."""

import json
from pathlib import Path

import pytest

from radixkv.cli.app import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six prompts: three twice. With four blocks LRU finds one of the second round, LFU none."""
    prompts = [[1, 2], [1, 3], [4, 5], [1, 2], [1, 3], [4, 5]]
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(json.dumps({"timestamp": n, "hash_ids": p}) for n, p in enumerate(prompts)))
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_json_is_the_contracts(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    report = json.loads(printed(capsys, "replay", trace, "--device-blocks", 5, "--json"))
    seconds = report.pop("seconds")
    assert report == {
        "requests": 6, "blocks": 12, "unique_blocks": 5, "device_hits": 7, "host_hits": 0, "inserted": 5, "evicted": 0,
    }  # fmt: skip
    assert seconds > 0


def test_blocks_of_host_memory_are_told_apart(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    """With two blocks on the device none is found there but the first block that the second prompt shares."""
    arguments = ("replay", trace, "--device-blocks", 2, "--host-blocks", 3)
    report = json.loads(printed(capsys, *arguments, "--json"))
    assert (report["device_hits"], report["host_hits"], report["inserted"], report["evicted"]) == (2, 5, 5, 0)
    assert [line.split() for line in printed(capsys, *arguments).splitlines() if "host memory" in line] == [
        ["found", "in", "host", "memory", "5", "2,560"]
    ]  # fmt: skip


def test_the_table_has_tokens_by_the_size_of_a_block(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    out = printed(capsys, "replay", trace, "--device-blocks", 3, "--policy", "lfu", "--block-size", 16)
    assert out.startswith("6 requests, 3 device blocks, lfu\nhit rate ")
    cells = {line.rsplit(None, 2)[0].strip(): line.split()[-2:] for line in out.splitlines() if line.startswith("  ")}
    assert cells["asked for"] == ["12", "192"]
    assert cells["different"] == ["5", "80"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--device-blocks", "1"],
            "device_blocks = 1 is not allowed; allowed: at least 2, the longest prompt of small",
        ),
        (["--device-blocks", "0"], "device_blocks = 0"),
        (
            ["--device-blocks", "5", "--host-blocks", "-1"],
            "host_blocks = -1 is not allowed; allowed: a whole number from",
        ),
        (
            ["--device-blocks", "5", "--host-blocks", "9", "--policy", "fifo"],
            "policy = 'fifo' is not allowed with host_blocks; allowed: lru",
        ),
        (
            ["--device-blocks", "5", "--policy", "clock"],
            "policy = 'clock' is not allowed; allowed: lru, lfu, fifo, s3fifo",
        ),
        (["--device-blocks", "5", "--block-size", "0"], "block_size = 0"),
        ([], "--device-blocks"),
    ],
)
def test_replay_refuses(capsys: pytest.CaptureFixture[str], trace: Path, arguments: list[str], said: str) -> None:
    assert main(["replay", str(trace), *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_a_curve_is_drawn_and_tabled(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    png = tmp_path / "some.png"
    wanted = ["--device-blocks", 3, "--device-blocks", 5, "--policy", "lru", "--policy", "lfu", "--jobs", 1]
    out = printed(capsys, "curve", trace, *wanted, "--png", png)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert f"drawn in {png}" in out
    header = next(line for line in out.splitlines() if "device blocks" in line)
    assert header.split() == ["device", "blocks", "lru", "lfu", "bound"]
    assert ["5", "58.33", "58.33", "58.33"] in [line.split() for line in out.splitlines()]
    found = json.loads(printed(capsys, "curve", trace, *wanted, "--png", png, "--json"))
    assert found["png"] == str(png)
    assert [(p["policy"], p["device_blocks"]) for p in found["points"]] == [
        (policy, blocks) for blocks in (3, 5) for policy in ("lru", "lfu", "bound")
    ]  # fmt: skip
    assert found["points"][5] == {
        "trace": "small", "policy": "bound", "device_blocks": 5, "hits": 7, "blocks": 12, "hit_rate": 0.583333,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "clock"], "policy = 'clock'"),
        (["--device-blocks", "1"], "at least 2"),
        (["--jobs", "-1"], "jobs = -1"),
        (["--jobs", "1", "--device-blocks", "5", "--png", "/no/where.png"], "png = '/no/where.png' is not allowed"),
    ],
)
def test_curve_refuses(capsys: pytest.CaptureFixture[str], trace: Path, arguments: list[str], said: str) -> None:
    assert main(["curve", str(trace), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_traces_of_one_name_are_told_apart_and_nothing_is_drawn_twice(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    """``show`` and the picture go by the name of a trace."""
    other = tmp_path / "other" / trace.name
    other.parent.mkdir()
    other.write_text(json.dumps({"timestamp": 0, "hash_ids": [1, 2]}))
    wanted = ["--device-blocks", 5, "--policy", "lru", "--policy", "lru", "--jobs", 1, "--png", tmp_path / "x.png"]
    found = json.loads(printed(capsys, "curve", trace, other, trace, *wanted, "--json"))["points"]
    assert [(point["trace"], point["policy"], point["hits"]) for point in found] == [
        (str(trace), "lru", 7), (str(trace), "bound", 7), (str(other), "lru", 0), (str(other), "bound", 0),
    ]  # fmt: skip


def test_curve_wants_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve"]) == 2
    assert "at least one trace" in capsys.readouterr().err
