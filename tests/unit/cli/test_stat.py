"""What ``radixkv stat`` shows of a snapshot. Asking a real daemon is in tests/integration."""

import json
from typing import Any

import pytest

from radixkv.cli import stat

SNAPSHOT: dict[str, Any] = {
    "version": "0.1.0",
    "boot_id": "b00t",
    "cache_id": "cac4e",
    "uptime_s": 93784.4,
    "pools": {
        "default": {
            "total_pages": 728,
            "pages": {"free": 700, "private": 8, "cached": 20, "shadow": 0, "quarantined": 1},
            "host_pages": {"free": 0},
            "evictable_pages": 12,
            "sequences": 3,
            "nodes": 7,
            "page_bytes": 737280,
        }
    },
    "sessions": 2,
    "queued": 1,
    "counters": {"requests": 12345, "asked_tokens": 2000, "hit_tokens": 1500, "evicted_pages": 0},
}


def test_the_table() -> None:
    lines = stat.as_table(SNAPSHOT).splitlines()
    assert lines[0] == "radixkv 0.1.0, up 1 d 2:03:04, 2 sessions, 1 queued"
    assert lines[1] == "boot b00t, cache cac4e"
    assert lines[3] == "pool default: 728 pages, 511.88 MiB, 3 sequences, 7 tree nodes"
    assert lines[4:10] == [
        "  free                          700   96.2%",
        "  private                         8    1.1%",
        "  cached                         20    2.7%",
        "    of which evictable           12    1.6%",
        "  shadow                          0    0.0%",
        "  quarantined                     1    0.1%",
    ]
    rows = {line.split()[0]: line.split()[1:] for line in lines[10:] if line}
    assert rows["requests"] == ["12,345"]
    assert rows["hit"] == ["rate", "75.0%"]
    assert next(iter(rows)) == "hit"
    assert "evicted_pages" not in rows


def test_a_host_tier_is_shown_below_the_pool() -> None:
    host = {"free": 90, "cached": 8, "loading": 2, "saving": 0}
    pool = {**SNAPSHOT["pools"]["default"], "host_pages": host, "host_only_pages": 5}
    lines = stat.as_table({**SNAPSHOT, "pools": {"default": pool}}).splitlines()
    assert lines[10:15] == [
        " its host tier: 100 pages, 70.31 MiB",
        "  free                           90   90.0%",
        "  cached                          8    8.0%",
        "    of which only here            5    5.0%",
        "  loading                         2    2.0%",
    ]
    assert lines[15] == ""


def test_what_routers_are_told_is_shown_where_there_is_something() -> None:
    events = {"pool": "default", "boot": 17, "batches": 1234, "backlog_bytes": 0, "replays": 2}
    lines = stat.as_table({**SNAPSHOT, "events": events}).splitlines()
    at = lines.index("events of pool default, boot 17:")
    assert [line.split() for line in lines[at + 1 : at + 4]] == [["batches", "1,234"], ["replays", "2"], []]
    assert "backlog_bytes" in stat.as_table({**SNAPSHOT, "events": events}, every_counter=True)
    assert stat.as_table({**SNAPSHOT, "events": None}) == stat.as_table(SNAPSHOT)


def test_counters_that_are_0_are_shown_when_asked_for() -> None:
    last = stat.as_table(SNAPSHOT, every_counter=True).splitlines()[-1]
    assert last.split() == ["evicted_pages", "0"]


def test_one_of_a_thing_is_no_plural() -> None:
    pool = {**SNAPSHOT["pools"]["default"], "total_pages": 1, "sequences": 1, "nodes": 1, "page_bytes": 0}
    lines = stat.as_table({**SNAPSHOT, "sessions": 1, "pools": {"a": pool}}).splitlines()
    assert ", 1 session, 1 queued" in lines[0]
    assert lines[3] == "pool a: 1 page, 1 sequence, 1 tree node"


def test_without_requests_there_is_no_rate() -> None:
    assert stat.as_table({**SNAPSHOT, "counters": {}}).splitlines()[-1].split() == ["hit", "rate", "-"]


def test_a_draining_daemon_says_so() -> None:
    assert stat.as_table({**SNAPSHOT, "draining": True}).splitlines()[0].endswith("1 queued, draining")


def test_json_is_the_snapshot_itself(capsys: pytest.CaptureFixture[str]) -> None:
    stat.show(SNAPSHOT, as_json=True)
    out = capsys.readouterr().out
    assert json.loads(out) == SNAPSHOT
    assert out.count("\n") == 1


def test_a_later_look_is_set_apart(capsys: pytest.CaptureFixture[str]) -> None:
    stat.show(SNAPSHOT, as_json=False, again=True)
    assert capsys.readouterr().out.startswith("\nradixkv 0.1.0")
