"""The demo's verdict: a good run has no faults, and each kind of fault is found."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.demo import report, verdict
from radixkv.demo.report import Kill, Result
from radixkv.demo.verdict import Answer, PageCount

DOCUMENT = list(range(100, 140))
FIRST, SECOND, THIRD = ([*DOCUMENT, *end] for end in ([1, 2], [3, 4, 5], [6]))


def answer(prompt: list[int] = SECOND, before: list[list[int]] | None = None, **done: Any) -> Answer:
    good = {
        "tokens": [7, 8],
        "output": "seven eight",
        "cached_tokens": 32,
        "computed_tokens": len(prompt) - 32,
        "page_table_head": [0, 1, 2],
        "ttft_s": 0.25,
        "shared": True,
        "recoveries": 0,
    }
    return Answer(
        id="2",
        worker=1,
        pid=4711,
        prompt=prompt,
        done={**good, **done},
        before=[FIRST] if before is None else before,
        beside=[],
        reference={"tokens": [7, 8], "output": "seven eight", "ttft_s": 5.0},
    )


def count(**states: int) -> PageCount:
    pages = {"free": 60, "private": 0, "cached": 40, "shadow": 0, "loading": 0, "saving": 0, "quarantined": 0}
    return PageCount("then", 100, {**pages, **states}, 0)


def test_a_good_answer_has_no_fault() -> None:
    assert verdict.faults_of(answer(), 16) == []
    assert verdict.faults_of(answer(before=[], cached_tokens=0, computed_tokens=43), 16) == []


@pytest.mark.parametrize(
    ("done", "fault"),
    [
        ({"tokens": [7, 9], "output": "seven nine"}, "'seven nine' differs from 'seven eight'"),
        ({"tokens": [7]}, "differs"),
        ({"shared": False}, "local pages"),
        ({"recoveries": 1}, "lost and computed again, 1 times"),
        ({"computed_tokens": 43}, "do not add up to 43"),
        ({"cached_tokens": 0, "computed_tokens": 43}, "0 tokens were cached, expected 32 to 32"),
        ({"cached_tokens": 42, "computed_tokens": 1}, "42 tokens were cached, expected 32 to 32"),
    ],
)
def test_each_fault_of_an_answer_is_found(done: dict[str, Any], fault: str) -> None:
    (found,) = verdict.faults_of(answer(**done), 16)
    assert fault in found


def test_an_answer_without_a_reference_is_not_equal() -> None:
    one = answer()
    one.reference = {}
    assert not one.equal


@pytest.mark.parametrize(
    ("prompt", "others", "hit"),
    [
        (SECOND, [], 0),
        (SECOND, [FIRST, [1, 2, 3]], 32),
        (DOCUMENT[:32], [FIRST], 31),
        (DOCUMENT[:33], [FIRST], 32),
        (DOCUMENT[:15], [FIRST], 0),
        ([9, *DOCUMENT], [FIRST], 0),
    ],
)
def test_expected_hits_are_full_pages_and_never_the_last_token(
    prompt: list[int], others: list[list[int]], hit: int
) -> None:
    assert verdict.expected_hit(prompt, others, 16) == hit


def test_who_ran_at_the_same_time_may_or_may_not_have_been_hit() -> None:
    for cached in (0, 32):
        one = answer(before=[], cached_tokens=cached, computed_tokens=43 - cached)
        one.beside = [THIRD]
        assert verdict.faults_of(one, 16) == []


def test_pages_must_be_conserved() -> None:
    assert verdict.page_faults([count(), count(free=59, private=1)]) == []
    (found,) = verdict.page_faults([count(), count(free=59)])
    assert found == "then: 99 pages are counted, the pool has 100"


def test_a_kill_must_hit_a_holder_and_give_everything_back() -> None:
    holding = PageCount("before", 100, count(free=57, private=3).states, 1)
    assert verdict.kill_faults(holding, count()) == []
    assert verdict.kill_faults(count(), count()) == ["the worker held no pages when it was killed"]
    (found,) = verdict.kill_faults(holding, count(free=59, quarantined=1))
    assert "1 pages and 0 sequences were still held" in found
    (found,) = verdict.kill_faults(holding, count(free=61, cached=39))
    assert "cached pages were lost" in found


def test_the_next_daemon_must_have_the_whole_answer_and_hold_nothing() -> None:
    holding = PageCount("before", 100, count(free=57, private=3).states, 1)
    one = answer(DOCUMENT, tokens=list(range(8)))  # 47 tokens are computed: 2 full pages of 16, 5 of 8
    assert verdict.restart_faults(holding, count(), one, 32, 16) == []
    assert verdict.restart_faults(holding, count(), one, 40, 8) == []
    (found,) = verdict.restart_faults(holding, count(), one, 32, 8)
    assert found == "request 2: of 47 computed tokens the next daemon has 32"
    (found,) = verdict.restart_faults(count(), count(), one, 32, 16)
    assert "held no pages when the daemon was killed" in found
    (found,) = verdict.restart_faults(holding, holding, one, 32, 16)
    assert "3 pages and 1 sequences were still held" in found
    (found,) = verdict.restart_faults(holding, count(free=61, cached=39), one, 32, 16)
    assert "cached pages were lost with the daemon" in found


def test_the_next_question_is_answered_within_a_second() -> None:
    one = answer(ttft_s=0.999)
    assert verdict.wait_faults(one) == []
    one.done["ttft_s"] = 1.0
    assert verdict.wait_faults(one) == ["request 2: its first token took 1.00 s, must be under 1.00 s"]
    one.reference["ttft_s"] = 12.0  # everything is slow
    assert verdict.wait_faults(one) == []
    one.done["ttft_s"] = 1.25
    assert verdict.wait_faults(one) == ["request 2: its first token took 1.25 s, must be under 1.20 s"]


def test_there_were_two_daemons() -> None:
    assert verdict.boot_faults(["a", "b"]) == []
    for ids in (["a"], ["a", "a"], ["a", "b", "a"], ["a", "b", "c"]):
        assert len(verdict.boot_faults(ids)) == 1, ids


def test_the_end_must_be_clean() -> None:
    assert verdict.end_faults(count(), 0) == []
    assert verdict.end_faults(count(free=59, shadow=1), 0) == ["1 pages leaked, 0 sequences are left"]
    assert verdict.end_faults(PageCount("end", 100, count().states, 2), 0) == ["0 pages leaked, 2 sequences are left"]
    assert verdict.end_faults(count(), 70) == ["the daemon ended with 70"]


def test_the_json_object_has_exactly_its_keys() -> None:
    result = Result(
        [answer()], [Kill("worker 2", 3.25, ", and how")], [count(), count(free=59, private=1)], ["b00t"], [], 60.0
    )
    assert report.as_json(result) == {
        "requests": [
            {
                "id": "2",
                "worker_pid": 4711,
                "prompt_tokens": 43,
                "cached_tokens": 32,
                "computed_tokens": 11,
                "page_table_head": [0, 1, 2],
                "ttft_s": 0.25,
                "ttft_uncached_s": 5.0,
                "output": "seven eight",
                "equal": True,
            }
        ],
        "kills": [{"what": "worker 2", "at_s": 3.25}],
        "pages": {"free": 59, "private": 1, "cached": 40, "shadow": 0, "loading": 0, "saving": 0, "quarantined": 0},
        "saved": {"tokens": 32, "seconds": 4.75},
        "boot_ids": ["b00t"],
        "ok": True,
    }
    result.faults.append("something")
    assert report.as_json(result)["ok"] is False


def test_a_document_that_came_back_from_the_host_tier() -> None:
    away = PageCount("away", 100, {"free": 0, "cached": 0, "private": 100}, 1, host_only=3, loaded=5)
    back = PageCount("back", 100, count().states, 0, host_only=1, loaded=8)
    good = answer()
    assert verdict.host_faults(away, back, good) == []
    stayed = PageCount("away", 100, {"cached": 2}, 1, host_only=3, loaded=5)
    assert verdict.host_faults(stayed, back, good) == ["2 cached pages were still on the device, 3 had left"]
    lost = PageCount("away", 100, {"cached": 0}, 1, host_only=0, loaded=5)
    assert verdict.host_faults(lost, back, good) == ["0 cached pages were still on the device, 0 had left"]
    assert verdict.host_faults(away, away, good) == ["request 2: 0 pages were loaded for 32 cached tokens"]
    slow = answer(ttft_s=6.0)
    assert verdict.host_faults(away, back, slow) == ["request 2: 6.00 s to load the document, 5.00 s to compute it"]
