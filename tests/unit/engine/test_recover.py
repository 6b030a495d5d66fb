"""Recovery by scan: what a table says becomes an engine. The long random histories are the fuzzer's ("recovery")."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest

from fuzz.model.packing import pack_pages, pack_tokens
from fuzz.pairs.recovery import Odds, RecoveryPair, Tables
from fuzz.registry import run
from fuzz.targets.catalogue import FUZZERS
from radixkv import commands
from radixkv.commands import Claim, Commit, Failure, Free, Kept, Resume, Resumed, Share, Step
from radixkv.config import Config, KVSpec, Limits, PoolConfig, ServerConfig
from radixkv.engine.engine import Engine
from radixkv.engine.invariants import check
from radixkv.engine.recover import recover

FAR = 1e9
PAGES = 12


def config(**pool: int) -> Config:
    spec = KVSpec(layers=1, kv_heads=1, head_dim=1, page_size=4)
    return Config(
        server=ServerConfig(resume_timeout_s=5.0),
        limits=Limits(sessions=4),
        pools=(PoolConfig("p", spec, **{"pages": PAGES, **pool}),),
    )


class World:
    """An engine on real tables, with two sessions of numbers 1 and 2."""

    def __init__(self, **pool: int) -> None:
        self.config = config(**pool)
        self.tables = Tables(self.config)
        self.engine = Engine(self.config, "boot", "cache")
        self.ids = iter(range(1, 10_000))
        self.epochs = {1: 1, 2: 1}
        for session in self.epochs:
            self.do(commands.OpenSession(session, bytes([session]) * 16, ""))

    def do(self, command: commands.Command, now: float = 0.0) -> commands.Outcome:
        outcome = self.engine.step(command, now)
        for write in outcome.writes:
            self.tables.apply(write)
        check(self.engine)
        return outcome

    def ask(self, session: int, body: commands.Body) -> commands.Reply:
        request = commands.Request(session, self.epochs[session], next(self.ids), FAR, body)
        reply = self.do(request).reply
        assert reply is not None
        return reply

    def reserve(self, session: int, seq: int, tokens: Iterable[int], headroom: int = 0) -> commands.Reserved:
        reply = self.ask(session, commands.Reserve("p", seq, b"n", pack_tokens(list(tokens)), headroom))
        assert isinstance(reply, commands.Reserved), reply
        return reply

    def commit(self, session: int, seq: int, n: int) -> None:
        reply = self.ask(session, Step(commit=[Commit(seq, n)]))
        assert isinstance(reply, commands.Stepped) and reply.commit == [None]

    def free(self, session: int, seq: int) -> None:
        self.ask(session, Step(free=[Free(seq)]))

    def lookup(self, tokens: Iterable[int]) -> int:
        """Cached tokens."""
        body = commands.Lookup("p", b"n", [pack_tokens(list(tokens))])
        reply = self.do(commands.Request(0, 0, 1, FAR, body)).reply
        assert isinstance(reply, commands.LookedUp)
        return reply.device_tokens[0]

    def die(self, attached: tuple[int, ...] = (1, 2)) -> None:
        found = self.tables.found(self.tables.raw(), set(attached))
        self.engine, writes = recover(self.config, ("boot2", "cache"), found)
        for write in writes:
            self.tables.apply(write)
        check(self.engine)

    def rejoin(self, session: int) -> commands.Reply:
        reply = self.do(commands.RejoinSession(session, bytes([session]) * 16)).reply
        self.epochs[session] += 1
        assert reply is not None
        return reply

    def generations(self, table: bytes) -> bytes:
        reader = self.tables.found(self.tables.raw(), set()).images["p"]
        return reader.generations[np.frombuffer(table, "<i4")].tobytes()

    def claim(self, seq: int, tokens: range, table: bytes, committed: int, **more: object) -> Claim:
        return Claim("p", seq, b"n", pack_tokens(tokens), table, self.generations(table), committed, 0, **more)  # type: ignore[arg-type]

    def counts(self) -> dict[str, int]:
        pages = self.engine.snapshot()["pools"]["p"]["pages"]
        return {state: count for state, count in pages.items() if count}


def result(reply: commands.Reply) -> Kept | Failure:
    assert isinstance(reply, Resumed)
    return reply.results[0]


def test_random_histories_cut_at_every_store() -> None:
    report = run(FUZZERS["recovery"], seed=random.randrange(2**32), steps=1200)
    assert report.events["cut"] > 50 and report.events["restart"] > 3


def test_every_store_of_a_short_life_is_cut() -> None:
    """All commands, all writes, several tears of each."""
    pair = RecoveryPair(config(), random.Random(5), Odds(command=1.0, tears=6))
    session = pair.open()
    other = pair.open()
    pair.ask(session, commands.Reserve("p", 1, b"n", pack_tokens(range(10)), 8))
    pair.ask(session, Step(commit=[Commit(1, 9)]))
    pair.ask(session, Step(share=[Share(1, None, 2, 5)]))
    pair.ask(other, commands.Reserve("p", 1, b"n", pack_tokens(range(8))))
    pair.restart()
    pair.ask(other, Step(commit=[Commit(1, 8)]))
    pair.ask(session, commands.Handoff(6, b"t" * 16, 60.0))
    pair.ask(session, commands.Invalidate("p", b"n"))
    pair.ask(other, commands.Reserve("p", 2, b"m", pack_tokens(range(16))))
    pair.do(commands.EndSession(session, True, "gone"))
    pair.restart()
    pair.do(commands.MappingGone(session))
    pair.ask(other, Step(free=[Free(1), Free(2)]))
    pair.ask(other, commands.Reserve("p", 3, b"m", pack_tokens(range(40))))
    assert pair.events["cut"] > 15


def test_a_committed_prefix_is_found_and_nothing_else() -> None:
    world = World()
    world.reserve(1, 7, range(10))
    world.commit(1, 7, 9)
    world.die(attached=())
    assert world.engine.window_open
    world.do(commands.EndSession(1, False, "gone"))
    world.do(commands.EndSession(2, False, "gone"))
    assert not world.engine.window_open
    assert world.counts() == {"free": PAGES - 2, "cached": 2}
    found = world.engine.step(
        commands.Request(0, 0, 1, FAR, commands.Lookup("p", b"n", [pack_tokens(range(10))])), 0.0
    ).reply
    assert isinstance(found, commands.LookedUp) and found.device_tokens == [8]


def test_a_page_whose_parent_has_become_another_is_not_hung_below_it() -> None:
    """Same number, another generation: whatever it says now is not what its former child continued."""
    world = World()
    table = np.frombuffer(world.reserve(1, 7, range(8)).page_table, "<i4")
    world.commit(1, 7, 8)
    root = world.engine.pools["p"].namespaces.find(b"n").root  # type: ignore[union-attr]
    parent, other = table[:1].tobytes(), pack_tokens(range(50, 54))
    world.tables.apply(commands.Assign("p", parent, 1, root.namespace, root.epoch))
    world.tables.apply(commands.Publish("p", parent, False, other))
    world.die()
    assert world.counts() == {"cached": 1, "free": PAGES - 1}
    assert world.lookup([*range(50, 54), *range(4, 8)]) == 4


def test_a_page_whose_parent_is_gone_is_not_hung_below_what_was_published_next() -> None:
    world = World()
    world.reserve(1, 7, range(8))
    world.commit(1, 7, 4)
    world.reserve(1, 8, range(50, 54))
    world.commit(1, 8, 4)
    world.commit(1, 7, 8)
    writer = world.tables.writers["p"]
    assert [writer._serials[page] for page in (0, 2, 1)] == [1, 2, 3] and writer._parent_serials[1] == 1
    world.tables.apply(commands.Retire("p", pack_pages([0])))
    world.die()
    assert world.counts() == {"cached": 1, "free": PAGES - 1}
    assert world.lookup([*range(50, 54), *range(4, 8)]) == 4


def test_a_page_that_was_on_its_way_into_another_namespace_is_in_neither() -> None:
    """Evicted and half assigned: still cached by its state word, and its content whole, but its check is not."""
    world = World()
    world.reserve(1, 7, range(50, 54))
    other = world.engine.pools["p"].namespaces.find(b"n").root  # type: ignore[union-attr]
    world.ask(1, commands.Reserve("p", 8, b"m", pack_tokens(range(4))))
    world.commit(1, 8, 4)
    writer = world.tables.writers["p"]
    writer._generations[1] += np.uint64(1)
    writer._scopes[1] = other.epoch << 32 | other.namespace
    world.die()
    assert world.counts() == {"free": PAGES - 1, "quarantined": 1}
    assert world.lookup(range(4)) == 0


def test_what_was_held_is_newer_than_what_had_been_let_go() -> None:
    world = World(pages=3)
    world.reserve(1, 7, range(50, 54))
    world.commit(1, 7, 4)
    world.reserve(1, 8, range(4))
    world.commit(1, 8, 4)
    world.free(1, 8)
    world.die()
    world.rejoin(2)
    world.do(commands.EndSession(1, False, "gone"))
    world.ask(2, Resume([]))
    assert (world.lookup(range(4)), world.lookup(range(50, 54))) == (4, 4)
    world.reserve(2, 9, range(100, 108))
    assert (world.lookup(range(4)), world.lookup(range(50, 54))) == (0, 4)


def test_a_place_in_the_order_outlives_the_pages_that_told_of_it() -> None:
    world = World(pages=4)
    world.reserve(1, 7, range(8))
    world.commit(1, 7, 8)
    world.free(1, 7)
    world.reserve(1, 8, [*range(4), *range(50, 54)])  # branches: the first page's own record has never been stamped
    world.commit(1, 8, 8)
    world.die(attached=(2,))
    world.rejoin(2)
    world.ask(2, Resume([]))
    world.do(commands.EndSession(1, False, "gone"))
    world.reserve(2, 9, range(80, 84))
    world.commit(2, 9, 4)
    world.free(2, 9)
    world.reserve(2, 10, range(90, 98))  # both branches leave
    world.free(2, 10)
    assert (world.lookup(range(8)), world.lookup(range(80, 84))) == (4, 4)
    world.die()
    world.rejoin(2)
    world.ask(2, Resume([]))
    world.do(commands.EndSession(1, False, "gone"))
    world.reserve(2, 11, range(90, 102))
    assert (world.lookup(range(4)), world.lookup(range(80, 84))) == (0, 4)


def test_only_free_pages_are_handed_out_until_all_are_back() -> None:
    world = World()
    world.reserve(1, 7, range(32))
    world.commit(1, 7, 32)
    world.free(1, 7)
    world.die()
    world.rejoin(2)
    world.ask(2, Resume([]))
    refused = world.ask(2, commands.Reserve("p", 8, b"n", pack_tokens(range(100, 120))))
    assert isinstance(refused, Failure) and refused.details["available"] == 4 and not refused.details["never_fits"]
    world.reserve(2, 9, range(100, 116))
    waits = commands.Request(2, 2, 500, FAR, commands.Reserve("p", 10, b"n", pack_tokens(range(4)), 0, "keep", 50.0))
    assert isinstance(world.do(waits).reply, commands.Reserved), "what is cached may be shared at once"
    waits = commands.Request(2, 2, 501, FAR, commands.Reserve("p", 11, b"n", pack_tokens(range(200, 204)), wait_s=50.0))
    assert world.do(waits).reply is None
    assert not world.do(commands.Tick(4.9), 1.0).granted
    assert world.engine.window_open
    outcome = world.do(commands.Tick(5.0), 2.0)
    assert not world.engine.window_open
    assert [type(granted.reply) for granted in outcome.granted] == [commands.Reserved]


def test_a_session_that_is_late_goes_on_if_its_pages_are_still_there() -> None:
    world = World()
    table = world.reserve(1, 7, range(10), 4).page_table
    world.commit(1, 7, 9)
    world.die()
    world.do(commands.Tick(6.0))
    world.rejoin(1)
    claim = world.claim(7, range(10), table, 9)
    assert result(world.ask(1, Resume([claim]))) == Kept(9, 8)
    assert world.counts() == {"free": PAGES - 4, "cached": 2, "private": 2}
    world.commit(1, 7, 10)


def test_a_commit_whose_answer_was_lost_counts() -> None:
    world = World()
    table = world.reserve(1, 7, range(10)).page_table
    world.commit(1, 7, 8)
    world.die()
    world.rejoin(1)
    assert result(world.ask(1, Resume([world.claim(7, range(10), table, 3)]))) == Kept(8, 8)


def test_a_late_session_whose_path_was_evicted_has_lost_that_sequence_alone() -> None:
    world = World()
    first = world.reserve(1, 7, range(10)).page_table
    world.commit(1, 7, 10)
    other = world.reserve(1, 8, range(50, 53)).page_table
    world.die()
    claims = [world.claim(7, range(10), first, 10), world.claim(8, range(50, 53), other, 0)]
    world.rejoin(2)
    world.ask(2, Resume([]))
    world.do(commands.Tick(6.0))
    world.reserve(2, 9, range(100, 140))
    world.rejoin(1)
    reply = world.ask(1, Resume(claims))
    assert isinstance(reply, Resumed)
    assert isinstance(reply.results[0], Failure) and reply.results[0].code == "session_lost"
    assert reply.results[1] == Kept(0, 0)


def test_a_page_that_another_computed_anew_is_not_what_a_late_session_had() -> None:
    """Same page, tokens and place in the tree, but handed out again: what the late worker says proves nothing."""
    world = World(pages=1)
    table = world.reserve(1, 7, range(4)).page_table
    world.commit(1, 7, 4)
    world.die()
    claim = world.claim(7, range(4), table, 4)
    world.rejoin(2)
    world.ask(2, Resume([]))
    world.do(commands.Tick(6.0))
    world.reserve(2, 8, range(50, 54))
    world.free(2, 8)
    assert world.reserve(2, 9, range(4)).page_table == table
    world.commit(2, 9, 4)
    world.rejoin(1)
    late = result(world.ask(1, Resume([claim])))
    assert isinstance(late, Failure) and late.code == "session_lost"


def test_what_nobody_claims_comes_back() -> None:
    world = World()
    world.reserve(1, 7, range(10))
    world.reserve(2, 7, range(20, 30))
    world.die()
    assert world.counts() == {"free": PAGES - 6, "quarantined": 6}
    world.rejoin(1)
    world.ask(1, Resume([], last=False))
    assert world.counts() == {"free": PAGES - 6, "quarantined": 6}
    world.ask(1, Resume([]))
    assert world.counts() == {"free": PAGES - 3, "quarantined": 3}
    world.do(commands.EndSession(2, True, "process"))
    assert world.counts() == {"free": PAGES - 3, "quarantined": 3}
    world.die(attached=(2,))
    assert world.counts() == {"free": PAGES - 3, "quarantined": 3}, "its process could still write"
    world.do(commands.MappingGone(2))
    assert world.counts() == {"free": PAGES}


def test_private_pages_of_a_refused_claim_wait_for_the_end_of_the_process() -> None:
    """Its worker may be writing to them when it learns that the sequence is lost."""
    world = World()
    first = world.reserve(1, 7, range(4), 6).page_table
    world.die()
    world.rejoin(1)
    claim = world.claim(7, range(4), first, 0)
    refused = result(world.ask(1, Resume([claim, claim])))
    assert refused == Kept(0, 0)
    world.free(1, 7)
    assert world.counts() == {"free": PAGES}, "a second claim of the same pages waits for nothing"
    table = world.reserve(1, 8, range(4), 6).page_table
    world.die()
    world.rejoin(1)
    bad = world.claim(8, range(4), table, 5)
    assert isinstance(result(world.ask(1, Resume([bad], last=False))), Failure)
    world.ask(1, Resume([]))
    assert world.counts() == {"free": PAGES - 3, "quarantined": 3}
    world.reserve(1, 9, range(20))
    world.die()
    assert world.counts()["quarantined"] == 8
    world.rejoin(1)
    world.ask(1, Resume([]))
    assert world.counts() == {"free": PAGES - 3, "quarantined": 3}
    world.ask(1, commands.Bye())
    assert world.counts() == {"free": PAGES}


def test_rows_are_not_copied_from_a_page_that_has_become_anothers() -> None:
    """The session is away for two daemons; in the first one's time its source is evicted, and committed by another
    worker under the same path, with other tokens."""
    world = World(pages=4)
    world.reserve(2, 1, range(8))
    world.commit(2, 1, 8)
    mine = world.reserve(1, 2, range(8))
    assert mine.copy_rows == [(1, 2, 3)]
    claim = world.claim(2, range(8), mine.page_table, 7, copy_rows=mine.copy_rows)
    world.die()
    world.rejoin(2)
    world.ask(2, Resume([]))
    world.do(commands.Tick(6.0))
    world.reserve(2, 4, range(50, 54))
    theirs = world.ask(2, commands.Reserve("p", 6, b"n", pack_tokens([*range(4), 90, 91, 92, 93])))
    assert theirs == commands.Reserved(mine.page_table[:4] + b"\1\0\0\0", 4, 4)
    world.commit(2, 6, 8)
    world.die()
    world.rejoin(1)
    refused = result(world.ask(1, Resume([claim])))
    assert isinstance(refused, Failure) and refused.code == "session_lost"
    assert world.counts() == {"cached": 2, "quarantined": 2}, "its own page may still be written to"


def test_rows_are_copied_from_what_is_still_there() -> None:
    """Two daemons later and late, but nobody was short of pages."""
    world = World()
    world.reserve(2, 1, range(8))
    world.commit(2, 1, 8)
    mine = world.reserve(1, 2, range(8))
    claim = world.claim(2, range(8), mine.page_table, 7, copy_rows=mine.copy_rows)
    for _ in range(2):
        world.die()
        world.do(commands.Tick(6.0))
    world.rejoin(1)
    assert result(world.ask(1, Resume([claim]))) == Kept(7, 4)
    assert world.ask(1, Step(commit=[Commit(2, 8)])).commit == [None]  # type: ignore[union-attr]


def test_private_pages_of_a_claim_whose_source_is_gone_wait_too() -> None:
    """A fork whose worker has said that it made its copies, and was not answered; its parent is freed."""
    world = World()
    table = world.reserve(1, 1, range(6)).page_table
    world.commit(1, 1, 6)
    shared = world.ask(1, Step(share=[Share(1, None, 1, 5)])).share[0]  # type: ignore[union-attr]
    fork = table[:4] + shared.tails
    claim = world.claim(5, range(6), fork, 6, copy_rows=shared.copy_rows)
    world.free(1, 1)
    world.ask(1, Step(copied=[5]))
    world.die()
    world.rejoin(1)
    assert isinstance(result(world.ask(1, Resume([claim]))), Failure)
    assert world.counts() == {"free": PAGES - 2, "cached": 1, "quarantined": 1}


def test_a_claim_publishes_nothing_before_all_ranks_have_joined() -> None:
    """A commit would have been refused: the other rank has written nothing."""
    world = World(ranks=2)
    table = world.reserve(1, 7, range(8)).page_table
    world.die()
    world.rejoin(1)
    claims = [world.claim(7, range(8), table, 8), world.claim(7, range(8), table, 3)]
    reply = world.ask(1, Resume(claims))
    assert isinstance(reply, Resumed) and isinstance(refused := reply.results[0], Failure)
    assert (refused.code, reply.results[1]) == ("bad_request", Kept(3, 0))


def test_quarantine_ends_only_when_we_hear_that_nothing_maps_the_arena() -> None:
    world = World()
    world.reserve(2, 7, range(20, 30))
    world.do(commands.EndSession(2, True, "process"))
    for attached in ((1, 2), (1,), ()):
        world.die(attached)
        assert world.counts() == {"free": PAGES - 3, "quarantined": 3}
    world.do(commands.MappingGone(2))
    assert world.counts() == {"free": PAGES}


def test_the_end_of_a_session_that_was_cut_off_is_carried_out() -> None:
    """The session's record says that it is over, its pages have not been told."""
    for attached, left in (((2,), {"free": PAGES - 3, "quarantined": 3}), ((), {"free": PAGES})):
        world = World()
        world.reserve(2, 7, range(20, 30))
        world.tables.apply(commands.SessionRecord(1, 2, 0, b""))
        world.die(attached)
        assert world.counts() == left


@pytest.mark.parametrize(
    "spoil",
    [
        lambda claim: {"generations": bytes(len(claim.generations))},
        lambda claim: {"namespace": b"other"},
        lambda claim: {"tokens": pack_tokens(range(1, 11))},
        lambda claim: {"page_table": claim.page_table[4:8] + claim.page_table[:4] + claim.page_table[8:]},
        lambda claim: {"page_table": claim.page_table[:4] * 3},
        lambda claim: {"page_table": claim.page_table[:-4]},
        lambda claim: {"page_table": pack_pages([0, 1, PAGES])},
        lambda claim: {"page_table": pack_pages([0, 1, -1])},
        lambda claim: {"committed": 11},
        lambda claim: {"pool": "nowhere"},
        lambda claim: {"copy_rows": [(3, 5, 1)]},
        lambda claim: {"copy_rows": [(-1, 2, 1)]},
    ],
)
def test_a_claim_that_cannot_be_proven_is_refused_and_leaves_no_trace(spoil) -> None:
    world = World()
    table = world.reserve(1, 7, range(10)).page_table
    world.commit(1, 7, 9)
    world.die()
    world.rejoin(1)
    good = world.claim(7, range(10), table, 9)
    bad = msgspec.structs.replace(good, **spoil(good))
    refused = result(world.ask(1, Resume([bad], last=False)))
    assert isinstance(refused, Failure) and refused.code in ("session_lost", "bad_request")
    assert world.counts() == {"free": PAGES - 3, "cached": 2, "quarantined": 1}
    assert result(world.ask(1, Resume([good]))) == Kept(9, 8)


def test_nobody_claims_what_belongs_to_another_session() -> None:
    world = World()
    table = world.reserve(1, 7, range(10)).page_table
    world.die()
    claim = world.claim(7, range(10), table, 0)
    world.rejoin(2)
    refused = result(world.ask(2, Resume([claim])))
    assert isinstance(refused, Failure) and refused.code == "session_lost"
    world.rejoin(1)
    twice = Resume([claim, world.claim(8, range(10), table, 0)])
    reply = world.ask(1, twice)
    assert isinstance(reply, Resumed)
    assert reply.results[0] == Kept(0, 0) and isinstance(reply.results[1], Failure), "a private page has one writer"


def test_requests_of_the_last_daemons_time_are_not_executed() -> None:
    world = World()
    world.die()
    body = commands.Reserve("p", 7, b"n", pack_tokens(range(4)))
    outdated = commands.Request(1, 1, 1, FAR, body)
    for _ in range(2):
        refused = world.do(outdated).reply
        assert isinstance(refused, Failure) and refused.code == "session_lost"
        if world.epochs[1] == 1:
            world.rejoin(1)
    assert world.counts() == {"free": PAGES}


def test_rejoin_needs_the_token_and_an_earlier_daemon() -> None:
    world = World()
    lost = world.do(commands.RejoinSession(1, b"\1" * 16)).reply
    assert isinstance(lost, Failure) and lost.code == "session_lost", "its daemon lives"
    world.die()
    for session, token in ((1, b"\2" * 16), (77, b"\1" * 16)):
        lost = world.do(commands.RejoinSession(session, token)).reply
        assert isinstance(lost, Failure) and lost.code == "session_lost"
    assert world.rejoin(1) == commands.Done()
    lost = world.do(commands.RejoinSession(1, b"\1" * 16)).reply
    assert isinstance(lost, Failure) and lost.code == "session_lost", "it is back already"


def test_a_daemon_that_dies_while_sessions_come_back() -> None:
    world = World()
    table = world.reserve(1, 7, range(10)).page_table
    world.commit(1, 7, 9)
    claim = world.claim(7, range(10), table, 9)
    for last in (False, True, False, True):
        world.die()
        world.rejoin(1)
        assert result(world.ask(1, Resume([claim], last))) == Kept(9, 8)
    assert world.epochs[1] == 5


def test_pages_of_one_namespace_are_not_claimed_for_another() -> None:
    world = World()
    table = world.reserve(1, 7, range(8)).page_table
    world.commit(1, 7, 8)
    world.ask(1, commands.Reserve("p", 8, b"m", pack_tokens(range(4))))
    world.die()
    world.rejoin(1)
    claim = world.claim(7, range(8), table, 8)
    refused = result(world.ask(1, Resume([msgspec.structs.replace(claim, namespace=b"m")], last=False)))
    assert isinstance(refused, Failure) and refused.code == "session_lost"
    assert result(world.ask(1, Resume([claim]))) == Kept(8, 8)


def test_a_shadow_that_forks_share_is_claimed_by_each() -> None:
    world = World()
    world.reserve(1, 6, range(8))
    world.reserve(1, 7, range(8))
    world.commit(1, 6, 8)
    table = world.ask(1, Step(share=[])) and world.reserve(2, 9, range(30, 34)).page_table
    world.commit(1, 7, 8)
    world.ask(1, Step(share=[Share(7, 8, 1, 12)]))
    assert world.counts()["shadow"] == 2
    shadows = pack_pages([page for page in range(PAGES) if world.engine.pools["p"].pages.states[page] == 3])
    world.die()
    claims = [world.claim(seq, range(8), shadows, 8) for seq in (7, 12)]
    world.rejoin(1)
    reply = world.ask(1, Resume(claims))
    assert isinstance(reply, Resumed) and reply.results == [Kept(8, 8)] * 2
    assert world.counts()["shadow"] == 2 and table
    world.free(1, 7)
    assert world.counts()["shadow"] == 2
    world.free(1, 12)
    assert "shadow" not in world.counts()


def test_a_shadow_whose_parent_was_in_transit_is_claimed_by_the_fork() -> None:
    """In the table it is nobody's. Only when the window closes it is sure that nobody will claim it."""
    world = World()
    world.reserve(1, 6, range(4))
    shadow = world.reserve(1, 7, range(4)).page_table
    world.commit(1, 6, 4)
    world.commit(1, 7, 4)
    world.ask(1, Step(share=[Share(7, 4, 1, 12)]))
    world.ask(1, commands.Handoff(7, b"t" * 16, 60.0))
    world.die()
    world.rejoin(1)
    claim = world.claim(12, range(4), shadow, 4)
    assert result(world.ask(1, Resume([claim], last=False))) == Kept(4, 4)
    world.ask(1, Resume([]))
    world.ask(1, Step(free=[Free(12)]))
    assert world.counts() == {"cached": 1, "free": PAGES - 1}


def test_namespaces_are_compared_by_their_bytes_and_keep_their_invalidations() -> None:
    world = World(namespaces=2)
    world.reserve(1, 7, range(4))
    world.commit(1, 7, 4)
    world.ask(1, commands.Invalidate("p", b"n"))
    world.free(1, 7)
    world.reserve(1, 8, range(4))
    world.commit(1, 8, 4)
    before = world.engine.pools["p"].namespaces.find(b"n")
    world.die()
    after = world.engine.pools["p"].namespaces.find(b"n")
    assert before is not None and after is not None
    assert (after.root.epoch, after.invalidations) == (before.root.epoch, 1)
    found = world.engine.step(
        commands.Request(0, 0, 1, FAR, commands.Lookup("p", b"m", [pack_tokens(range(4))])), 0.0
    ).reply
    assert isinstance(found, commands.LookedUp) and found.device_tokens == [0]


def test_a_hundred_thousand_pages_cost_what_they_are() -> None:
    """Growth, not time: ten times the pages are at most about ten times the stores of one scan."""
    world = World(pages=2000)
    world.reserve(1, 1, range(4000))
    world.commit(1, 1, 4000)
    for seq in range(2, 200):
        world.reserve(1, seq, range(seq * 10_000, seq * 10_000 + 8))
        world.commit(1, seq, 8)
        world.free(1, seq)
    world.die()
    assert world.counts()["cached"] == 1000 + 198 * 2
    assert world.engine.snapshot()["pools"]["p"]["nodes"] == 199, "runs are nodes, not pages"


def test_the_last_token_of_a_prompt_found_whole_is_still_to_be_committed() -> None:
    world = World()
    world.reserve(1, 6, range(8))
    world.commit(1, 6, 8)
    reply = world.ask(2, commands.Reserve("p", 7, b"n", pack_tokens(range(8)), 0, "keep"))
    assert isinstance(reply, commands.Reserved) and reply.cached_tokens == 7
    claim = world.claim(7, range(8), reply.page_table, 7)
    world.die()
    world.rejoin(2)
    assert result(world.ask(2, Resume([claim]))) == Kept(7, 8)
    world.commit(2, 7, 7)
    world.commit(2, 7, 8)


def test_it_is_also_when_the_sequence_has_grown_meanwhile() -> None:
    world = World()
    world.reserve(1, 6, range(8))
    world.commit(1, 6, 8)
    reply = world.ask(2, commands.Reserve("p", 7, b"n", pack_tokens(range(8)), 2, "keep"))
    assert isinstance(reply, commands.Reserved) and reply.cached_tokens == 7
    claim = world.claim(7, range(10), reply.page_table, 7)
    world.die()
    world.rejoin(2)
    assert result(world.ask(2, Resume([claim]))) == Kept(7, 8)
    world.commit(2, 7, 7)
    world.commit(2, 7, 10)
