"""Work that would take long is done in slices, and nobody can tell but by the clock."""

from __future__ import annotations

import random
from array import array

import pytest

from radixkv.commands import (
    Commit,
    Extend,
    Failure,
    Free,
    Invalidate,
    LookedUp,
    Lookup,
    OpenSession,
    Reply,
    Request,
    Reserve,
    Share,
    Step,
    Stepped,
    Tick,
    Truncate,
)
from radixkv.config import Config, KVSpec, PoolConfig
from radixkv.engine import life
from radixkv.engine.engine import Engine
from radixkv.engine.invariants import check

PAGE = 2
NAMESPACE = b"ns"


def packed(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


class Driven:
    """An engine with one session."""

    def __init__(self, pages: int) -> None:
        spec = KVSpec(layers=1, kv_heads=1, head_dim=8, page_size=PAGE)
        self.engine = Engine(Config(pools=(PoolConfig(spec=spec, pages=pages),)), "boot", "cache")
        self.engine.step(OpenSession(1, bytes(16), "worker"), 0.0)
        self.requests = 0

    def ask(self, body) -> Reply:
        self.requests += 1
        reply = self.engine.step(Request(1, 1, self.requests, 1e9, body), 1.0).reply
        check(self.engine)
        assert reply is not None
        return reply

    def tick(self) -> None:
        self.engine.step(Tick(0.0), 1.0)
        check(self.engine)

    def settle(self) -> None:
        while self.engine.has_work():
            self.tick()

    def cached(self, tokens: list[int]) -> int:
        reply = self.ask(Lookup("default", NAMESPACE, [packed(tokens)]))
        assert isinstance(reply, LookedUp)
        return reply.device_tokens[0]


def test_a_large_commit_appears_slice_by_slice(monkeypatch):
    monkeypatch.setattr(life, "SLICE_PAGES", 3)
    driven = Driven(16)
    prompt = list(range(20))
    driven.ask(Reserve("default", 1, NAMESPACE, packed(prompt)))
    driven.ask(Step(commit=[Commit(1, 20)]))
    seen = [driven.cached(prompt)]
    while driven.engine.has_work():
        driven.tick()
        seen.append(driven.cached(prompt))
    assert seen == [6, 12, 18, 20]


@pytest.mark.parametrize("verb", ["commit", "truncate", "share", "free", "extend"])
def test_what_comes_next_for_the_sequence_finds_it_complete(monkeypatch, verb):
    monkeypatch.setattr(life, "SLICE_PAGES", 1)
    driven = Driven(32)
    prompt = list(range(20))
    driven.ask(Reserve("default", 1, NAMESPACE, packed(prompt)))
    driven.ask(Step(commit=[Commit(1, 20)]))
    items = {
        "commit": Step(commit=[Commit(1, 20)]),
        "truncate": Step(truncate=[Truncate(1, 20)]),
        "share": Step(share=[Share(1, 20, 1, 2)]),
        "free": Step(free=[Free(1)]),
        "extend": Step(extend=[Extend(1, packed([7]))]),
    }
    reply = driven.ask(items[verb])
    assert isinstance(reply, Stepped)
    assert not isinstance(getattr(reply, verb)[0], Failure)
    driven.settle()
    assert driven.cached(prompt) == 20


def history(rnd: random.Random) -> list:
    """Bodies of a random history; the sequence ids in it may or may not exist."""
    bodies = []
    for fresh in range(1, 40):
        live = rnd.randint(1, fresh)
        tokens = packed([rnd.randint(0, 1) for _ in range(rnd.randint(0, 16))])
        n = rnd.randint(0, 16)
        bodies += rnd.sample(
            [
                Reserve("default", fresh * 10, NAMESPACE, tokens, rnd.randint(0, 3)),
                Step(commit=[Commit(live * 10, n)]),
                Step(commit=[Commit(fresh * 10, len(tokens) // 4)]),
                Step(extend=[Extend(live * 10, tokens[:12], 1)]),
                Step(truncate=[Truncate(live * 10, n)]),
                Step(share=[Share(live * 10, None, 2, fresh * 10 + 1)]),
                Step(free=[Free(live * 10), Free(fresh * 10 - 9)]),
                Invalidate("default", NAMESPACE),
            ],
            counts=[8, 8, 8, 3, 3, 3, 4, 1],
            k=5,
        )
    return bodies


@pytest.mark.parametrize("seed", range(25))
def test_with_and_without_slices_the_same_happens(monkeypatch, seed):
    rnd = random.Random(seed)
    bodies = history(rnd)
    whole, sliced = Driven(40), Driven(40)
    for body in bodies:
        monkeypatch.setattr(life, "SLICE_PAGES", 1_000_000)
        expected = whole.ask(body)
        monkeypatch.setattr(life, "SLICE_PAGES", 1)
        assert sliced.ask(body) == expected, f"seed {seed}"
        whole.settle()
        sliced.settle()
    before, after = whole.engine.snapshot(), sliced.engine.snapshot()
    assert before["pools"] == after["pools"], f"seed {seed}"


@pytest.mark.parametrize("seed", range(25))
def test_ticks_may_come_late(monkeypatch, seed):
    """Other sequences meet one that is published in part; in the end every page is accounted for."""
    monkeypatch.setattr(life, "SLICE_PAGES", 1)
    rnd = random.Random(1000 + seed)
    driven = Driven(24)
    for body in history(rnd):
        driven.ask(body)
        if rnd.random() < 0.2:
            driven.tick()
    driven.settle()
    for identity in list(driven.engine.sessions.all()[0].sequences):
        driven.ask(Step(free=[Free(identity)]))
    driven.settle()
    pages = driven.engine.snapshot()["pools"]["default"]["pages"]
    assert pages["private"] == pages["shadow"] == 0, f"seed {seed}"
    assert pages["free"] + pages["cached"] == 24, f"seed {seed}"
