"""Sessions of several processes, as the core sees them: who may join, and when rank 0 may speak for all."""

from __future__ import annotations

import pytest

from fuzz.model.packing import pack_tokens
from radixkv import commands
from radixkv.commands import Bye, Commit, Done, Failure, JoinSession, MappingGone, OpenSession, Request, Reserve, Step
from radixkv.config import Config, KVSpec, PoolConfig
from radixkv.engine.engine import Engine

SESSION, TOKEN = 7, b"t" * 16
SPEC = KVSpec(layers=1, kv_heads=1, head_dim=1, page_size=4)
PAGES = 4


class World:
    """Two pools, of three ranks and of one, and a session."""

    def __init__(self) -> None:
        pools = (PoolConfig("three", SPEC, PAGES, ranks=3), PoolConfig("one", SPEC, PAGES))
        self.engine = Engine(Config(pools=pools), "boot", "cache")
        self.requests = 0
        self.engine.step(OpenSession(SESSION, TOKEN, ""), 0.0)

    def ask(self, body: commands.Body) -> commands.Reply | None:
        self.requests += 1
        return self.engine.step(Request(SESSION, 1, self.requests, 1e9, body), 0.0).reply

    def join(self, rank: int, session: int = SESSION, token: bytes = TOKEN) -> str:
        reply = self.engine.step(JoinSession(session, token, rank), 0.0).reply
        return reply.code if isinstance(reply, Failure) else "done"

    def commit(self, pool: str, seq: int) -> str:
        """Of a new sequence of two pages in this pool."""
        self.ask(Reserve(pool, seq, b"n", pack_tokens(range(seq, seq + 8))))
        reply = self.ask(Step(commit=[Commit(seq, 8)]))
        assert isinstance(reply, commands.Stepped)
        (result,) = reply.commit
        return "done" if result is None else result.code

    def pages(self, pool: str) -> dict[str, int]:
        counts = self.engine.snapshot()["pools"][pool]["pages"]
        return {state: count for state, count in counts.items() if count}


def test_rank_0_speaks_for_all_when_all_are_there() -> None:
    world = World()
    assert world.commit("three", 1) == "bad_request"
    assert world.join(2) == "done"
    assert world.commit("three", 2) == "bad_request"
    assert world.pages("three") == {"private": 4}
    assert world.join(1) == "done"
    assert isinstance(world.ask(Step(commit=[Commit(1, 8)])), commands.Stepped)
    assert world.pages("three") == {"cached": 2, "private": 2}


def test_a_free_that_commits_needs_them_all_too_and_frees_in_any_case() -> None:
    world = World()
    world.ask(Reserve("three", 1, b"n", pack_tokens(range(8))))
    reply = world.ask(Step(free=[commands.Free(1, 8)]))
    assert isinstance(reply, commands.Stepped)
    assert [type(one) is Failure and one.code for one in reply.free] == ["bad_request"]
    assert world.pages("three") == {"free": PAGES}


def test_a_pool_of_one_rank_waits_for_nobody() -> None:
    assert World().commit("one", 1) == "done"


@pytest.mark.parametrize(
    ("rank", "session", "token", "said"),
    [
        (1, SESSION, b"x" * 16, "session_lost"),
        (1, SESSION + 1, TOKEN, "session_lost"),
        (0, SESSION, TOKEN, "bad_request"),
        (3, SESSION, TOKEN, "bad_request"),
    ],
)
def test_who_may_not_join(rank: int, session: int, token: bytes, said: str) -> None:
    world = World()
    assert world.join(rank, session, token) == said
    assert world.engine.sessions.find_quietly(SESSION).ranks == {0}


@pytest.mark.parametrize("joined", [0, 1])
def test_a_bye_is_the_word_of_one_process(joined: int) -> None:
    """Alone, it gives its pages back; with others, these could still write."""
    world = World()
    for rank in range(1, joined + 1):
        world.join(rank)
    world.ask(Reserve("three", 1, b"n", pack_tokens(range(8))))
    assert world.ask(Bye()) == Done()
    assert world.engine.awaits_mapping_gone(SESSION) is bool(joined)
    assert world.pages("three") == ({"free": 2, "quarantined": 2} if joined else {"free": 4})
    world.engine.step(MappingGone(SESSION), 0.0)
    assert world.pages("three") == {"free": 4}
