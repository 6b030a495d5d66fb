"""The end of a pool's cache: nothing of it is served any more, whoever used it is told, and nothing else changes."""

from __future__ import annotations

import random

import pytest

from fuzz.pairs.recovery import Odds
from fuzz.pairs.tiered import FAR, Tiered
from fuzz.pairs.tiered_recovery import TieredRecovery
from fuzz.pairs.worker import Worker, small_config
from fuzz.targets.tiers import TiersTarget
from radixkv import commands
from radixkv.config import Config, KVSpec, PoolConfig
from radixkv.engine.engine import Engine
from radixkv.engine.invariants import check

P, Q = [1, 2, 3, 4], [5, 6, 7, 8]


def lose(pair: Tiered) -> commands.Outcome:
    outcome = pair.do(commands.LosePool(pair.pool.name))
    while pair.real.has_work():
        pair.tick(0.1)
    return outcome


def test_what_was_cached_is_not_found_and_its_pages_are_free() -> None:
    pair = Tiered(small_config(8, 1))
    worker = Worker(pair)
    worker.cache(P)
    outcome = lose(pair)
    assert not outcome.ended, "nobody holds any of it"
    assert worker.look(P) == (0, 0)
    assert pair.real.snapshot()["pools"]["a"]["pages"]["free"] == 8
    assert pair.real.snapshot()["counters"]["lost_pools"] == 1
    worker.cache(P)
    assert worker.look(P) == (4, 0), "the pool is cold, and in use"


def test_who_holds_some_of_it_is_told_and_may_still_write_to_it() -> None:
    pair = Tiered(small_config(8, 1))
    holder, other = Worker(pair), Worker(pair)
    holder.compute(P)
    assert lose(pair).ended == [holder.session]
    reply = pair.ask(holder.session, commands.Heartbeat())
    assert isinstance(reply, commands.Failure) and reply.code == "session_lost"
    assert isinstance(pair.ask(other.session, commands.Heartbeat()), commands.Done)
    pair.do(commands.MappingGone(holder.session))
    assert pair.real.snapshot()["pools"]["a"]["pages"]["free"] == 8


def test_private_pages_wait_for_the_end_of_their_process() -> None:
    pair = Tiered(small_config(8, 1))
    holder = Worker(pair)
    holder.reserve(P)
    lose(pair)
    assert len(pair.quarantined()) == 4
    pair.do(commands.MappingGone(holder.session))
    assert pair.quarantined() == []


def test_who_waits_for_it_is_answered() -> None:
    pair = Tiered(small_config(4, 1))
    holder, waiting = Worker(pair), Worker(pair)
    holder.reserve(P)
    assert waiting.try_reserve(Q, wait_s=30.0) is None
    assert sorted(lose(pair).ended) == sorted([holder.session, waiting.session])
    late = pair.late(waiting.session)
    assert isinstance(late, commands.Failure) and late.code == "session_lost"


def test_what_is_in_transit_can_not_be_adopted() -> None:
    pair = Tiered(small_config(8, 1))
    giver, taker = Worker(pair), Worker(pair)
    held = giver.compute(P)
    pair.ask(giver.session, commands.Handoff(held.seq, b"t" * 16, 30.0))
    assert not lose(pair).ended
    reply = pair.ask(taker.session, commands.Adopt("a", b"t" * 16, 1))
    assert isinstance(reply, commands.Failure) and reply.code == "stale_handle"


def test_other_pools_keep_what_they_have_but_for_sessions_in_both() -> None:
    spec = KVSpec(1, 1, 8, "float32", 1)
    engine = Engine(Config(pools=(PoolConfig("a", spec, 8), PoolConfig("b", spec, 8))), "boot", "cache")
    space = b"space"

    def ask(session: int, request: int, body: commands.Body) -> commands.Reply | None:
        return engine.step(commands.Request(session, 1, request, FAR, body), 1.0).reply

    for session in (1, 2):
        engine.step(commands.OpenSession(session, bytes(16), "w"), 1.0)
    tokens = b"".join(token.to_bytes(4, "little") for token in P)
    for session, seq, pool in ((1, 1, "a"), (1, 2, "b"), (2, 3, "b")):
        ask(session, seq, commands.Reserve(pool, seq, space, tokens))
    ask(2, 9, commands.Step(commit=[commands.Commit(3, 4)]))
    assert engine.step(commands.LosePool("a"), 1.0).ended == [1]
    check(engine)
    found = ask(2, 10, commands.Lookup("b", space, [tokens]))
    assert isinstance(found, commands.LookedUp) and found.device_tokens == [4]
    assert [len(session.sequences) for session in engine.sessions.all()] == [1]


@pytest.mark.parametrize("seed", range(12))
def test_at_any_moment(seed: int) -> None:
    """In a random history of two tiers, with copies running whose ends come later."""
    rng = random.Random(seed)
    target = TiersTarget(rng)
    for _ in range(rng.randint(20, 150)):
        target.step()
    pair = target.pair
    target._forget(lose(pair))
    for node, path in pair.nodes():
        pytest.fail(f"{node} is found below {path[0]}")
    while pair.running:
        target._copy_done(next(iter(pair.running)), ok=rng.random() < 0.5)
    for session in [*target._sessions]:
        target._end_session(session, mapped=True)
    for session in target._ended:
        pair.do(commands.MappingGone(session))
    for _ in range(20):
        target._forget(pair.tick(6.0))
    states = pair.real.snapshot()["pools"]["a"]
    assert states["pages"]["free"] == states["total_pages"], states
    assert sum(states["host_pages"].values()) == states["host_pages"]["free"]
    for _ in range(30):
        target.step()


def test_the_next_daemon_finds_nothing_of_it() -> None:
    """Wherever in the loss the daemon dies: ``TieredRecovery`` cuts the table at every store."""
    pair = TieredRecovery(small_config(6, 1, host_pages=8), random.Random(5), Odds(command=1.0, tears=3))
    worker = Worker(pair)
    for prompt in (P, Q):
        reply = worker.try_reserve(prompt, last_page="keep")
        pair.finish_all()
        assert isinstance(reply or pair.late(worker.session), commands.Reserved)
        worker.step(free=[commands.Free(worker.next_seq - 1, 4)])
    assert sum(worker.look(P)) == 4 and sum(worker.look(Q)) == 4
    lose(pair)
    pair.restart()
    assert (worker.look(P), worker.look(Q)) == ((0, 0), (0, 0))


def test_in_the_time_in_which_sessions_are_waited_for() -> None:
    """After a restart: who has not come back yet is over as well, and all pages are free when their processes are."""
    pair = TieredRecovery(small_config(6, 1, host_pages=8), random.Random(5), Odds(command=0.0))
    holder, idle = Worker(pair), Worker(pair)
    holder.compute(P)
    engine, _ = pair._recovered(pair._raw())
    assert engine.window_open and {holder.session, idle.session} <= engine.resuming
    outcome = engine.step(commands.LosePool("a"), 200.0)
    assert sorted(outcome.ended) == sorted([holder.session, idle.session])
    check(engine)
    for session in outcome.ended:
        engine.step(commands.MappingGone(session), 200.0)
    for turn in range(10):
        engine.step(commands.Tick(10.0 * turn), 200.0 + turn)
        check(engine)
    assert engine.snapshot()["pools"]["a"]["pages"]["free"] == 6
