"""Replay against a naive cache, a closed form and simple cases; and Belady's bound against trying everything."""

import random
from array import array
from functools import cache

import pytest

from fuzz.model.tree import TreeModel
from radixkv.config import PAGES_MAX, POLICIES
from radixkv.errors import ConfigError
from radixkv.simulate.bound import belady_hits
from radixkv.simulate.replay import Memory, replay
from radixkv.simulate.trace import Trace
from tests.unit.simulate.made_up import shared_prefixes


def trace_of(*prompts: list[int]) -> Trace:
    packed = [array("I", prompt).tobytes() for prompt in prompts]
    return Trace("made", packed, len({block for prompt in prompts for block in prompt}))


def random_prompts(rng: random.Random, requests: int, longest: int) -> list[list[int]]:
    """Prompts that begin like earlier ones; a block's number says all that is before it."""
    numbers: dict[tuple[int, ...], int] = {}
    seen: list[tuple[int, ...]] = [()]
    prompts = []
    for _ in range(requests):
        words = rng.choice(seen)[: rng.randint(0, longest)]
        words += tuple(rng.randrange(4) for _ in range(rng.randint(0, 4)))
        words = words[:longest]
        seen = [*seen[-12:], words]
        prompts.append([numbers.setdefault(words[: n + 1], len(numbers)) for n in range(len(words))])
    return prompts


def naive(policy: str, capacity: int, prompts: list[list[int]]) -> tuple[int, int, int]:
    """Hits, inserted and evicted pages of a cache without a tree."""
    model = TreeModel(1, policy, capacity)
    model.seed_of = lambda _root: 1 << 32
    hits = inserted = evicted = 0
    for prompt in prompts:
        path = (0, tuple(prompt))
        held = model.match(*path)
        model.held.append(held)
        there = len(held[1])
        evicted += len(model.evict(len(prompt) - there - (capacity - len(model.pages))))
        for number, page in enumerate(model.upward(path)[there:], there):
            model.pages[page] = number
        hits, inserted = hits + there, inserted + len(prompt) - there
        model.held = [path]
        model.let_go(path, None)
    return hits, inserted, evicted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_replay_finds_what_a_naive_cache_finds(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    prompts = random_prompts(rng, requests=300, longest=8)
    capacity = rng.randint(10, 60)
    report = replay(trace_of(*prompts), Memory(capacity, policy=policy))
    assert (report.device_hits, report.inserted, report.evicted) == naive(policy, capacity, prompts)
    assert report.evicted > 100
    assert report.requests == 300
    assert report.device_hits + report.inserted == report.blocks == sum(map(len, prompts))


@pytest.mark.parametrize("seed", range(3))
def test_two_tiers_find_what_one_of_both_sizes_finds(seed: int) -> None:
    """On the device exactly what is found without the other. In all nearly: which of two pages that are equally old
    leaves first may differ."""
    rng = random.Random(seed)
    trace = trace_of(*random_prompts(rng, requests=300, longest=8))
    device, host = rng.randint(10, 30), rng.randint(10, 30)
    both = replay(trace, Memory(device, host))
    one = replay(trace, Memory(device + host))
    assert both.device_hits + both.host_hits == pytest.approx(one.device_hits, rel=0.02)
    assert both.inserted == trace.blocks - both.device_hits - both.host_hits
    assert both.device_hits == replay(trace, Memory(device)).device_hits
    assert both.host_hits > 50


def test_the_closed_form_of_shared_prefixes() -> None:
    """32 groups of 32 prompts, 2,048 tokens shared and 256 own: 86.11 %, here with blocks of 256 tokens."""
    trace = shared_prefixes(groups=32, prompts=32, shared=8, own=1)
    for policy in POLICIES:
        report = replay(trace, Memory(trace.unique_blocks, policy=policy))
        assert report.hit_rate == 31 / 32 * 8 / 9
        assert round(100 * report.hit_rate, 2) == 86.11
        assert (report.inserted, report.evicted) == (trace.unique_blocks, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_for_more_than_there_is_costs_nothing(policy: str) -> None:
    """Ids at other places are other blocks: there can be more of them than different ids."""
    trace = trace_of([1, 2], [2, 1], [3, 1, 2], [1, 2], [2, 1], [3, 1, 2])
    vast = replay(trace, Memory(PAGES_MAX, policy=policy))
    assert (vast.device_hits, vast.inserted, vast.evicted) == (7, 7, 0)


def test_vast_host_memory_costs_nothing_either() -> None:
    report = replay(trace_of([1, 2], [3, 4], [1, 2], [3, 4]), Memory(2, PAGES_MAX - 2))
    assert (report.device_hits, report.host_hits, report.inserted) == (0, 4, 4)


def test_whoever_watches_hears_of_the_end() -> None:
    heard: list[int] = []
    replay(trace_of([1], [], [2]), Memory(2), heard.append)
    assert heard[-1] == 3
    assert heard == sorted(heard)


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (Memory(2), "device_blocks = 2 .* at least 3, the longest prompt of made"),
        (Memory(3, host_blocks=5, policy="lfu"), "policy = 'lfu' .* with host_blocks; allowed: lru"),
    ],
)
def test_what_cannot_be_replayed_is_refused(memory: Memory, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replay(trace_of([1, 2, 3]), memory)


# -- the bound -----------------------------------------------------------------------------------------------------


def best(blocks: tuple[int, ...], capacity: int) -> int:
    """The most hits there can be, by trying whatever can be kept after each request."""

    @cache
    def hits(at: int, kept: frozenset[int]) -> int:
        if at == len(blocks):
            return 0
        block = blocks[at]
        choices = {kept, *((kept | {block}) - {other} for other in kept)}
        if len(kept) < capacity:
            choices.add(kept | {block})
        return (block in kept) + max(hits(at + 1, choice) for choice in choices)

    return hits(0, frozenset())


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_is_the_best_that_can_be_done(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(6) for _ in range(rng.randint(0, 4))] for _ in range(6)]
    trace = Trace("made", [array("I", prompt).tobytes() for prompt in prompts], 6)
    capacity = rng.randint(1, 4)
    assert belady_hits(trace, capacity) == best(tuple(block for prompt in prompts for block in prompt), capacity)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_passes_the_bound(policy: str) -> None:
    trace = trace_of(*random_prompts(random.Random(9), requests=300, longest=8))
    for capacity in (8, 20, 50):
        assert replay(trace, Memory(capacity, policy=policy)).device_hits <= belady_hits(trace, capacity)
