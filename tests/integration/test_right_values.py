"""Public request traces: hit blocks equal an independent simulator's, to the block.

The traces are looked for in $RADIXKV_REFERENCE_DIR/traces. What is fast runs always, all of it with ``-m long``
(``make fuzz``).
"""

import os
import time
from functools import cache
from pathlib import Path

import pytest

from radixkv.simulate.bound import Uses, belady_hits, next_uses
from radixkv.simulate.replay import Memory, replay
from radixkv.simulate.trace import Trace, load

FOLDER = Path(os.environ.get("RADIXKV_REFERENCE_DIR", "nowhere")) / "traces"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no traces: $RADIXKV_REFERENCE_DIR is not set")

CONVERSATION, SYNTHETIC, CODING = "mooncake_conversation_trace", "mooncake_synthetic_trace", "weka_cc_s8_b512"
SHAPES = {
    CONVERSATION: (12_031, 288_500, 182_790, 247),
    SYNTHETIC: (3_993, 121_877, 43_924, 374),
    CODING: (6_110, 1_551_152, 65_436, 1_717),
}
HITS = {
    (CONVERSATION, 1_827): {"lru": 15_136, "lfu": 16_789, "bound": 71_078},
    (CONVERSATION, 9_139): {"lru": 56_479, "lfu": 36_564, "bound": 105_710},
    (CONVERSATION, 18_279): {"lru": 80_466, "lfu": 56_238, "bound": 105_710},
    (CONVERSATION, 45_697): {"lru": 101_978, "lfu": 97_053, "bound": 105_710},
    (SYNTHETIC, 439): {"lru": 4_644, "lfu": 4_138, "bound": 22_600},
    (SYNTHETIC, 2_196): {"lru": 19_087, "lfu": 14_458, "bound": 48_215},
    (SYNTHETIC, 4_392): {"lru": 31_973, "lfu": 22_779, "bound": 61_707},
    (SYNTHETIC, 10_981): {"lru": 54_123, "lfu": 47_548, "bound": 76_297},
    (CODING, 3_271): {"lru": 1_119_005, "lfu": 500_523},
    (CODING, 6_543): {"lru": 1_345_265, "lfu": 639_674},
    (CODING, 16_359): {"lru": 1_461_945, "lfu": 960_057},
}
UNBOUNDED = {CONVERSATION: 105_710, SYNTHETIC: 77_953, CODING: 1_485_716}
BOUND_PERCENT = {3_271: 84.39, 6_543: 92.20, 16_359: 95.65}
"""Of the coding trace, for which the reference has no blocks."""
TWO_TIERS = {
    (SYNTHETIC, 4_392, 10_981): 31_939,
    (CONVERSATION, 18_279, 45_697): 23_182,
    (CODING, 6_543, 16_359): 133_467,
}
"""By blocks on the device and in the host tier: hits in the latter. On the device they are those of LRU alone."""
REQUESTS_PER_CPU_S = 2_000


@cache
def trace(name: str) -> Trace:
    return load(FOLDER / f"{name}.jsonl.gz")


@cache
def uses(name: str) -> Uses:
    return next_uses(trace(name))


def is_fast(name: str, blocks: int) -> bool:
    return name == SYNTHETIC or (name, blocks) == (CONVERSATION, 9_139)


def rows(policies: tuple[str, ...]) -> list[object]:
    """All (trace, blocks, policy, hits) there are; those that take long are marked."""
    return [
        pytest.param(name, blocks, policy, hits[policy], marks=[] if is_fast(name, blocks) else [pytest.mark.long])
        for (name, blocks), hits in HITS.items()
        for policy in policies
        if policy in hits
    ]


@pytest.mark.parametrize(("name", "blocks", "policy", "hits"), rows(("lru", "lfu")))
def test_hits_are_right_to_the_block(name: str, blocks: int, policy: str, hits: int) -> None:
    report = replay(trace(name), Memory(blocks, policy=policy))
    assert (report.device_hits, report.host_hits) == (hits, 0)
    assert report.inserted == report.blocks - hits
    assert report.evicted == report.inserted - blocks


@pytest.mark.parametrize(
    ("name", "device", "host"),
    [pytest.param(*row, marks=[] if row[0] == SYNTHETIC else [pytest.mark.long]) for row in TWO_TIERS],
)
def test_hits_of_two_tiers_are_right_to_the_block(name: str, device: int, host: int) -> None:
    report = replay(trace(name), Memory(device, host))
    found = HITS[name, device]["lru"], TWO_TIERS[name, device, host]
    assert (report.device_hits, report.host_hits) == found
    assert report.inserted == report.blocks - sum(found)
    assert report.evicted == report.inserted - device - host


def test_the_conversation_trace_inserts_and_evicts_what_it_should_and_is_fast() -> None:
    """Speed by CPU time: what else the machine does is not the engine's doing."""
    loaded = trace(CONVERSATION)
    started = time.process_time()
    report = replay(loaded, Memory(9_139))
    seconds = time.process_time() - started
    assert (report.inserted, report.evicted) == (232_021, 222_882)
    assert report.requests / seconds >= REQUESTS_PER_CPU_S


@pytest.mark.parametrize("name", [CONVERSATION, SYNTHETIC, pytest.param(CODING, marks=pytest.mark.long)])
def test_the_trace_is_the_one_and_without_bounds_all_that_comes_again_is_found(name: str) -> None:
    loaded = trace(name)
    assert (len(loaded.prompts), loaded.blocks, loaded.unique_blocks, loaded.longest) == SHAPES[name]
    report = replay(loaded, Memory(loaded.unique_blocks))
    assert (report.device_hits, report.evicted) == (UNBOUNDED[name], 0)


@pytest.mark.parametrize(("name", "blocks", "policy", "hits"), rows(("bound",)))
def test_the_bound_is_right_to_the_block(name: str, blocks: int, policy: str, hits: int) -> None:
    assert belady_hits(trace(name), blocks, uses(name)) == hits


@pytest.mark.long
@pytest.mark.parametrize(("blocks", "percent"), BOUND_PERCENT.items())
def test_the_bound_of_the_coding_trace(blocks: int, percent: float) -> None:
    loaded = trace(CODING)
    assert round(100 * belady_hits(loaded, blocks, uses(CODING)) / loaded.blocks, 2) == percent
