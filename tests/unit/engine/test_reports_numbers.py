"""Failures that comparable systems have had, as small scenarios: metrics, bounds on work and memory, great depth.

Every step is also compared with the naive model and recounted (``EnginePair``), so a scenario says only what is special
about it. Pages have 4 tokens unless a test says otherwise.
"""

import itertools
import random

import pytest

from fuzz.model.packing import pack_tokens
from fuzz.pairs.engine import EnginePair
from fuzz.pairs.worker import NAMESPACE, Worker, counts, small_config, small_pair, workers
from radixkv import commands, hashing
from radixkv.config import Limits
from radixkv.engine.engine import Engine


def test_in_use_and_kept_are_two_numbers():
    pair, one = workers(64, 1)
    for number in range(24):
        one.cache([number] * 8)
    pool = pair.real.snapshot()["pools"]["a"]
    assert counts(pair) == {"free": 16, "cached": 48} and pool["evictable_pages"] == 48 and pool["sequences"] == 0


def test_own_retries_are_not_counted_as_hits():
    pair, one = workers(4, 1)
    for number in range(50):
        one.free(one.reserve([number] * 12))
        one.free(one.reserve([number] * 12))
    counters = pair.real.snapshot()["counters"]
    assert counters["asked_tokens"] == 1200 and counters["hit_tokens"] == 0


@pytest.mark.parametrize(("length", "again"), [(63, 0), (64, 63), (65, 64), (128, 127)])
def test_hits_of_repeated_prompts_around_a_page_of_64(length, again):
    one = Worker(small_pair(16, page_size=64))
    cached = []
    for _ in range(3):
        held = one.reserve(range(length))
        cached.append(held.cached)
        one.commit(held, length)
        one.free(held)
    assert cached == [0, again, again]


def test_no_page_is_hashed(monkeypatch):
    """Only who is told of blocks needs names for them: not the engine."""
    hashed = []
    monkeypatch.setattr(hashing, "xxh3_128_digest", hashed.append)
    engine = Engine(small_config(4000, page_size=16), "boot", "cache")
    engine.step(commands.OpenSession(1, b"t" * 16, "w"), 0.0)
    tokens = pack_tokens(range(50_000))
    engine.step(commands.Request(1, 1, 1, 1e9, commands.Reserve("a", 1, NAMESPACE, tokens)), 0.0)
    for request in range(2, 102):
        engine.step(commands.Request(0, 0, request, 1e9, commands.Lookup("a", NAMESPACE, [tokens])), 0.0)
    commit = commands.Step(commit=[commands.Commit(1, 50_000)])
    engine.step(commands.Request(1, 1, 2, 1e9, commit), 0.0)
    assert not hashed


def test_what_is_remembered_is_bounded_by_the_pool_and_the_limits():
    limits = Limits(sessions=4)
    engine = Engine(small_config(100, limits=limits, namespaces=8), "boot", "cache")
    for session in range(1, 1001):
        engine.step(commands.OpenSession(session, b"t" * 16, "w"), 0.0)
        for request in range(1, 21, 2):
            namespace = (session * 7 + request).to_bytes(4, "little")
            body = commands.Reserve("a", request, namespace, pack_tokens([session, request, 1, 1]))
            engine.step(commands.Request(session, 1, request, 1e9, body), 0.0)
            step = commands.Step(commit=[commands.Commit(request, 4)])
            engine.step(commands.Request(session, 1, request + 1, 1e9, step), 0.0)
        engine.step(commands.EndSession(session, True, "killed"), 0.0)
        engine.step(commands.MappingGone(session), 0.0)
    pool = engine.pools["a"]
    assert len(engine.sessions) == len(engine.quarantine) == pool.sequences == 0
    assert len(pool.namespaces) <= 8 and pool.tree.nodes <= 100 and len(pool.order) <= 100


def test_a_path_of_20_000_nodes_needs_no_recursion():
    depth = 20_000
    engine = Engine(small_config(depth + 10, page_size=1, limits=Limits(tokens=depth + 10)), "boot", "cache")
    engine.step(commands.OpenSession(1, b"t" * 16, "w"), 0.0)
    ids = itertools.count(1)

    def ask(body):
        return engine.step(commands.Request(1, 1, next(ids), 1e9, body), 0.0).reply

    tokens = pack_tokens(range(depth))
    ask(commands.Reserve("a", 0, NAMESPACE, tokens))
    ask(commands.Step(commit=[commands.Commit(0, depth)]))
    ask(commands.Step(free=[commands.Free(0)]))
    for length in range(depth - 1, 0, -1):
        ask(commands.Reserve("a", length, NAMESPACE, tokens[: 4 * length], last_page="keep"))
        ask(commands.Step(free=[commands.Free(length)]))
    assert engine.pools["a"].tree.nodes == depth
    assert ask(commands.Lookup("a", NAMESPACE, [tokens])).device_tokens == [depth]
    held = ask(commands.Reserve("a", depth, NAMESPACE, tokens, last_page="keep"))
    assert held.cached_tokens == depth - 1
    shared = ask(commands.Step(share=[commands.Share(depth, depth // 2, 1, depth + 1)])).share[0]
    assert shared.shared_pages == depth // 2
    assert ask(commands.Stats()).snapshot["pools"]["a"]["nodes"] == depth
    ask(commands.Step(free=[commands.Free(depth), commands.Free(depth + 1)]))
    evicting = ask(commands.Reserve("a", depth + 2, NAMESPACE, b"", headroom=depth // 2))
    assert len(evicting.page_table) == 4 * (depth // 2)
    ask(commands.Invalidate("a", NAMESPACE))
    while engine.has_work():
        engine.step(commands.Tick(0.0), 0.0)
    assert engine.pools["a"].tree.cached_pages == 0


def test_gauges_are_never_negative_nor_over_their_capacity():
    pair, *crowd = workers(12, 3)
    rng = random.Random(11)
    before = dict.fromkeys(pair.real.snapshot()["counters"], 0)
    for _ in range(300):
        worker = rng.choice(crowd)
        worker.try_reserve([rng.randrange(2) for _ in range(rng.randrange(30))], wait_s=rng.choice([0.0, 1.0]))
        seq = rng.randrange(1, worker.next_seq)
        worker.step(
            commit=[commands.Commit(seq, rng.randrange(30))],
            free=[commands.Free(rng.randrange(1, worker.next_seq))],
            truncate=[commands.Truncate(seq, rng.randrange(8))],
        )
        snapshot = pair.real.snapshot()
        pool, counters = snapshot["pools"]["a"], snapshot["counters"]
        assert all(0 <= number <= 12 for number in pool["pages"].values())
        assert 0 <= pool["evictable_pages"] <= pool["pages"]["cached"] and snapshot["queued"] >= 0
        assert all(counters[name] >= before[name] for name in before)
        before = counters


def test_the_same_commands_at_the_same_times_give_the_same_state():
    def play():
        pair = EnginePair(small_config(16))
        one = Worker(pair)
        rng = random.Random(2)
        replies = []
        for _ in range(100):
            held = one.try_reserve([rng.randrange(2) for _ in range(rng.randrange(30))])
            replies += [held, one.step(free=[commands.Free(rng.randrange(1, one.next_seq))])]
            pair.tick(rng.random())
        return replies, pair.real.snapshot()

    assert play() == play()
