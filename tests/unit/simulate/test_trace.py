"""Reading request traces: order, numbering, gzip, and what is wrong with a line."""

import gzip
import json
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.simulate.trace import load
from tests.unit.simulate.made_up import shared_prefixes

LINES = [
    {"timestamp": 5, "input_length": 1000, "output_length": 3, "hash_ids": [900, 7]},
    {"timestamp": 1.5, "hash_ids": [7, 8, 9], "session": "more than is read"},
    {"timestamp": 5, "hash_ids": [900]},
    {"timestamp": 0, "hash_ids": []},
]


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def blocks(prompt: bytes) -> list[int]:
    return [int.from_bytes(prompt[at : at + 4], "little") for at in range(0, len(prompt), 4)]


def test_requests_come_by_timestamp_then_line_and_ids_are_dense(tmp_path: Path) -> None:
    trace = load(written(tmp_path / "some.jsonl", *map(json.dumps, LINES), "", " "))
    assert [blocks(prompt) for prompt in trace.prompts] == [[], [0, 1, 2], [3, 0], [3]]
    assert (trace.name, trace.blocks, trace.unique_blocks, trace.longest) == ("some", 6, 4, 3)


def test_gzip_is_seen_by_content_not_by_name(tmp_path: Path) -> None:
    plain = written(tmp_path / "a.jsonl", *map(json.dumps, LINES))
    for name in ("a.jsonl.gz", "b.jsonl"):
        (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
        assert load(tmp_path / name).prompts == load(plain).prompts
    assert load(tmp_path / "a.jsonl.gz").name == "a"


def test_an_empty_file_is_an_empty_trace(tmp_path: Path) -> None:
    trace = load(written(tmp_path / "none.jsonl"))
    assert (trace.prompts, trace.blocks, trace.unique_blocks, trace.longest) == ([], 0, 0, 0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "truncated"),
        ('{"hash_ids": [1]}', "timestamp"),
        ('{"timestamp": 1}', "hash_ids"),
        ('{"timestamp": 1, "hash_ids": [1.5]}', "hash_ids"),
        ('{"timestamp": "x", "hash_ids": []}', "timestamp"),
        ("[1]", "Expected `object`"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path / "bad.jsonl", json.dumps(LINES[0]), line)
    with pytest.raises(ConfigError, match="line 2") as caught:
        load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(json.dumps(LINES[0]).encode())[:-9])
    for path in (tmp_path / "nowhere", tmp_path, cut):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(path)


def test_made_up_prompts_share_what_they_should() -> None:
    trace = shared_prefixes(groups=2, prompts=3, shared=2, own=1)
    assert [blocks(prompt)[:2] for prompt in trace.prompts] == [[0, 1], [2, 3]] * 3
    assert sorted(blocks(prompt)[2] for prompt in trace.prompts) == [4, 5, 6, 7, 8, 9]
    assert (trace.blocks, trace.unique_blocks) == (18, 10)
