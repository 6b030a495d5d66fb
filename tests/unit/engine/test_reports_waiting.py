"""Failures that comparable systems have had, as small scenarios: eviction, waiting, floors, and pages in transit.

Every step is also compared with the naive model and recounted (``EnginePair``), so a scenario says only what is special
about it. Pages have 4 tokens unless a test says otherwise.
"""

import dataclasses
import random

import pytest

from fuzz.model.packing import pack_tokens, unpack_pages
from fuzz.pairs.engine import EnginePair
from fuzz.pairs.worker import NAMESPACE, Held, Worker, code, counts, refused_for_pages, small_config, workers
from radixkv import commands
from radixkv.config import Config, Limits, ServerConfig

P = list(range(1, 13))
"""Three pages."""


# -- who has to leave, and who has to wait ---------------------------------------------------------------------------


def test_rk_037_only_what_is_missing_is_evicted():
    pair, one, two = workers(8, 2)
    pages = [one.cache([token] * 4)[0] for token in range(5)]
    taken = two.reserve(range(100, 116)).pages
    assert counts(pair) == {"cached": 4, "private": 4}
    assert set(taken) & set(pages) == {pages[0]}
    assert pair.real.snapshot()["counters"]["evicted_pages"] == 1


def test_rk_041_empty_pages_are_used_before_cached_ones():
    pair, one = workers(16, 1)
    one.cache(range(16))
    for turn in range(4):
        one.free(one.reserve(range(100 * turn, 100 * turn + 12)))
        assert one.lookup(range(16)) == 16
    assert pair.real.snapshot()["counters"]["evicted_pages"] == 0


def test_rk_042_of_pages_let_go_together_the_deepest_leaves_first():
    _, one = workers(3, 1)
    for turn in range(100):
        prompt = [*range(1000 * turn, 1000 * turn + 12)]
        one.cache(prompt)
        one.free(one.reserve([5]))
        assert one.lookup(prompt) == 8


def test_rk_034_nobody_is_let_wait_longer_than_it_asked_for():
    pair, one, two = workers(4, 2)
    one.reserve(range(16))
    assert two.try_reserve([1], wait_s=0.5) is None
    assert pair.real.next_deadline() == pair.now + 0.5
    assert not pair.tick(0.4).granted
    (late,) = pair.tick(0.1).granted
    refused_for_pages(late.reply, need=1, available=0)
    assert late.reply.details["waited_s"] == pytest.approx(0.5)
    assert pair.real.next_deadline() is None


def test_a_wait_ends_with_the_requests_deadline():
    pair, one, two = workers(4, 2)
    held = one.reserve(range(16))
    body = commands.Reserve("a", 1, NAMESPACE, pack_tokens([1]), wait_s=100.0)
    two.ask(body, deadline=pair.now + 2.0)
    pair.now += 3.0
    assert one.step(free=[commands.Free(held.seq)]).free == [None]
    assert code(two.step(free=[commands.Free(1)]).free[0]) == "stale_handle"
    assert counts(pair) == {"free": 4}


def test_who_waits_for_what_somebody_else_holds_by_now_waits_no_longer():
    """Its one page is cached, but to wake it would leave no reserve. A commit of the same page pins it anyway."""
    pair, one, two = workers(3, 2, decode_reserve_pages=1)
    mine = one.reserve(P[:4])
    two.cache(P[:4])
    one.extend(mine, headroom=4)
    assert two.try_reserve(P[:4], wait_s=9.0, last_page="keep") is None
    one.commit(mine, 4)
    assert pair.real.snapshot()["queued"] == 0
    assert counts(pair) == {"shadow": 1, "private": 1, "cached": 1}


def test_rk_035_who_holds_pages_is_never_made_to_wait_for_more():
    pair, one, two, three = workers(4, 3)
    mine, other = one.reserve(range(8)), two.reserve(range(20, 28))
    for worker, held in ((one, mine), (two, other)):
        refused_for_pages(worker.try_extend(held, headroom=12), need=3, available=0)
    assert three.try_reserve([1], wait_s=5.0) is None
    one.free(mine)
    assert len(pair.model.state.sessions[three.session].sequences) == 1


def test_rk_035_fifty_who_wait_and_hold_come_to_an_end_each():
    """Nobody is left waiting when its time is over, whatever the others hold. All of it within a lease."""
    rng = random.Random(0)
    pair, *fifty = workers(40, 50)
    held = {worker.session: [] for worker in fifty}
    served = 0
    for _ in range(600):
        worker = rng.choice(fifty)
        own = held[worker.session]
        waits = pair.real.sessions.find_quietly(worker.session).waiting
        if own and rng.random() < 0.5:
            worker.free(own.pop(rng.randrange(len(own))))
        elif not waits:
            reply = worker.try_reserve(rng.choices(range(9), k=rng.randint(1, 40)), wait_s=rng.choice((0.0, 1.0, 3.0)))
            if isinstance(reply, commands.Reserved):
                own.append(Held(worker.next_seq - 1, reply))
        for late in pair.tick(rng.choice((0.0, 0.05))).granted:
            if isinstance(late.reply, commands.Reserved):
                served += 1
                held[late.session].append(Held(fifty[late.session - fifty[0].session].next_seq - 1, late.reply))
        assert all(waiting.until > pair.now for waiting in pair.real.pools["a"].waiting.all())
    assert served > 0
    pair.tick(3.0)
    assert pair.real.snapshot()["queued"] == 0


def test_a_small_reserve_does_not_overtake_a_large_one_that_waits():
    pair, one, two, three = workers(4, 3)
    held = one.reserve(range(12))
    assert two.try_reserve(range(50, 62), wait_s=9.0) is None
    assert three.try_reserve([1], wait_s=9.0) is None
    outcome = pair.do(pair.request(one.session, commands.Step(free=[commands.Free(held.seq)])))
    assert [(late.session, type(late.reply)) for late in outcome.granted] == [
        (two.session, commands.Reserved),
        (three.session, commands.Reserved),
    ]


def test_rk_050_cancel_death_and_expiry_of_waiting_requests_a_thousand_times():
    pair, one, two = workers(2, 2)
    one.reserve(range(8))
    for turn in range(334):
        assert two.try_reserve([turn], wait_s=50.0) is None
        request = pair._next_request[two.session]
        (late,) = pair.do(pair.request(two.session, commands.Cancel(request))).granted
        assert (late.request, late.reply.code) == (request, "timeout")
        three = Worker(pair)
        assert three.try_reserve([turn], wait_s=50.0) is None
        pair.do(commands.EndSession(three.session, mapped=True, reason="killed"))
        pair.do(commands.MappingGone(three.session))
        assert two.try_reserve([turn], wait_s=0.01) is None
        assert len(pair.tick(0.01).granted) == 1
        one.ask(commands.Heartbeat())
    assert pair.real.snapshot()["queued"] == 0
    assert pair.real.next_deadline() is None
    assert counts(pair) == {"private": 2}


def test_a_dead_worker_in_the_line_is_passed_over():
    pair, holder, one, two, three = workers(2, 4)
    held = holder.reserve(range(8))
    for worker in (one, two, three):
        assert worker.try_reserve(range(50, 58), wait_s=50.0) is None
    pair.do(commands.EndSession(one.session, mapped=True, reason="killed"))
    two.ask(commands.Bye())
    holder.free(held)
    assert len(pair.model.state.sessions[three.session].sequences) == 1


def test_who_waits_is_told_that_the_session_has_ended():
    """By its own bye (from another thread) or by the core: its process may live and be waiting for an answer."""
    pair, holder, one, two = workers(2, 3)
    holder.reserve(range(8))
    for worker in (one, two):
        assert worker.try_reserve(range(50, 58), wait_s=50.0) is None
    outcome = pair.do(pair.request(one.session, commands.Bye()))
    assert outcome.reply == commands.Done()
    assert [(late.session, late.request, code(late.reply)) for late in outcome.granted] == [(2, 1, "session_lost")]
    pair.tick(15.0)
    holder.ask(commands.Heartbeat())
    pair.tick(10.0)
    outcome = pair.do(pair.request(holder.session, commands.Reserve("a", 9, NAMESPACE, pack_tokens([1]))))
    assert outcome.ended == [two.session]
    assert [(late.session, late.request, code(late.reply)) for late in outcome.granted] == [(3, 1, "session_lost")]


def test_rk_039_everything_in_use_is_said_in_numbers():
    _pair, *holders = workers(8, 5)
    for worker in holders[:4]:
        worker.reserve(range(8))
    refused_for_pages(holders[4].try_reserve([1]), need=1, available=0)
    never = holders[4].try_reserve(range(36), wait_s=100.0)
    refused_for_pages(never, need=9, available=0)
    assert never.details["never_fits"] is True


def test_rk_039_who_waits_in_vain_is_told_who_holds_the_pages_and_for_how_long():
    pair, *holders = workers(8, 5)
    for worker in holders[:4]:
        worker.reserve(range(8))
    pair.tick(7.0)
    assert holders[4].try_reserve([1], wait_s=2.0) is None
    (late,) = pair.tick(2.0).granted
    refused_for_pages(late.reply, need=1, available=0)
    said = late.reply.details["holders"].split("; ")
    assert said == [f"session {n} (worker): 2 pages, the oldest sequence for 9 s" for n in (1, 2, 3, 4)]


def test_whoever_finds_no_page_is_told_of_those_that_the_dead_may_still_write_to():
    pair, dead, other, late = workers(8, 3)
    dead.reserve(range(20))
    assert other.try_reserve(range(16)).message == "not enough pages"
    pair.do(commands.EndSession(dead.session, mapped=True, reason="killed"))
    held = other.compute(range(8))
    words = "quarantined, as processes that had them may still write to them: 5"
    assert late.try_reserve(range(50, 58)).message == f"not enough pages; {words}"
    assert code(other.try_extend(held, headroom=8)) == "out_of_pages"
    assert late.try_reserve(range(50, 58), wait_s=2.0) is None
    (vain,) = pair.tick(2.0).granted
    mine = f"session {other.session} (worker): 2 pages, the oldest sequence for 2 s"
    assert vain.reply.details["holders"] == f"{mine}; {words}"
    pair.do(commands.MappingGone(dead.session))
    assert len(late.reserve(range(50, 58)).pages) == 2


def test_a_session_without_a_name_is_told_by_its_number_alone():
    pair, late = workers(2, 1)
    nameless = pair.open(name="")
    pair.ask(nameless, commands.Reserve("a", 1, NAMESPACE, pack_tokens(range(8))))
    assert late.try_reserve([1], wait_s=2.0) is None
    (vain,) = pair.tick(2.0).granted
    assert vain.reply.details["holders"] == f"session {nameless}: 2 pages, the oldest sequence for 2 s"


def test_rk_040_a_greedy_worker_leaves_the_others_their_floor_and_stays_under_its_cap():
    pair, greedy, modest = workers(8, 2, session_floor_pages=2, session_cap_pages=6)
    for turn in range(8):
        greedy.try_reserve([100 + turn] * 4)
    assert counts(pair) == {"free": 2, "private": 6}
    for turn in range(30):
        refused_for_pages(greedy.try_reserve([turn]), need=1, available=0)
        modest.free(modest.compute([1, 2, 3, 4, 5, 6, 7, 8], last_page="keep"))
        assert modest.lookup([1, 2, 3, 4, 5, 6, 7, 8]) == 8


def test_decode_may_use_what_is_kept_for_it():
    pair, one, two = workers(8, 2, decode_reserve_pages=2)
    held = one.reserve(range(24))
    refused_for_pages(two.try_reserve([1]), need=1, available=0)
    assert len(one.extend(held, headroom=8)) == 2
    assert counts(pair) == {"private": 8}


# -- handing over ----------------------------------------------------------------------------------------------------


def test_rk_048_pages_in_transit_are_nobodys_to_take_and_arrive_or_come_back():
    pair, one, two, three = workers(4, 3)
    held = one.compute(P[:8])
    one.ask(commands.Handoff(held.seq, b"a" * 16, 5.0))
    pair.do(commands.EndSession(one.session, mapped=True, reason="killed"))
    refused_for_pages(three.try_reserve(range(100, 112)), need=3, available=2)
    adopted = two.ask(commands.Adopt("a", b"a" * 16, 1))
    assert unpack_pages(adopted.page_table) == held.pages and adopted.committed_tokens == 8
    assert code(three.ask(commands.Adopt("a", b"a" * 16, 1))) == "stale_handle"
    two.ask(commands.Handoff(1, b"b" * 16, 5.0))
    pair.tick(5.0)
    assert code(two.ask(commands.Adopt("a", b"b" * 16, 2))) == "stale_handle"
    assert len(three.reserve(range(100, 116)).pages) == 4


def test_rows_still_to_be_copied_from_a_cached_page_travel_along():
    _, one, two = workers(8, 2)
    one.compute(P[:8])
    held = one.reserve(P[:8])
    ((source, own, rows),) = held.copy_rows
    one.ask(commands.Handoff(held.seq, b"a" * 16, 5.0))
    adopted = two.ask(commands.Adopt("a", b"a" * 16, 1))
    assert adopted.copy_rows == [(source, own, rows)] == [(source, held.pages[1], 3)]
    assert (adopted.cached_tokens, adopted.writable_from_tokens) == (7, 4)


def test_rows_of_a_private_page_do_not_travel():
    _, one = workers(8, 1)
    parent = one.compute([1, 2, 3, 4, 5, 6])
    child = one.fork(parent)[0]
    for held in (parent, child):
        assert code(one.ask(commands.Handoff(held.seq, b"a" * 16, 5.0))) == "bad_request"
    assert one.step(copied=[child.seq]).copied == [None]
    for held, ticket in ((parent, b"a" * 16), (child, b"b" * 16)):
        assert one.ask(commands.Handoff(held.seq, ticket, 5.0)) == commands.Done()


def test_what_is_in_transit_is_bounded_and_leaves_nothing_behind():
    pair = EnginePair(small_config(2, limits=Limits(sequences_per_session=3)))
    one, two = Worker(pair), Worker(pair)
    for number in range(4):
        reply = one.ask(commands.Handoff(one.reserve([]).seq, bytes([number] * 16), 86400.0))
        assert reply == commands.Done() if number < 3 else code(reply) == "limit_exceeded"
    for turn in range(300):
        ticket = bytes([turn % 3] * 16)
        two.ask(commands.Adopt("a", ticket, turn))
        assert two.ask(commands.Handoff(turn, ticket, 86400.0)) == commands.Done()
    assert len(pair.real.transit._ends) <= 100


def test_requests_that_are_cancelled_leave_nothing_behind():
    pair, one, two = workers(1, 2)
    one.reserve([1])
    for turn in range(300):
        two.try_reserve([turn], wait_s=86400.0)
        two.ask(commands.Cancel(pair._next_request[two.session]))
    assert len(pair.real.pools["a"].waiting._ends) <= 100


def test_a_floor_that_is_reached_by_adoption_lets_others_go_on():
    pair, one, two, three = workers(8, 3, session_floor_pages=2)
    held = one.reserve(range(16))
    one.ask(commands.Handoff(held.seq, b"a" * 16, 50.0))
    assert three.try_reserve([1], wait_s=60.0) is None
    outcome = pair.do(pair.request(two.session, commands.Adopt("a", b"a" * 16, 1)))
    assert [late.session for late in outcome.granted] == [three.session]


# -- the end --------------------------------------------------------------------------------------------------------


def test_a_draining_engine_takes_nothing_new_and_lets_the_rest_come_to_its_end():
    pair, one, two = workers(4, 2)
    held = one.reserve(range(12))
    assert two.try_reserve(range(50, 62), wait_s=60.0) is None
    (late,) = pair.do(commands.Drain()).granted
    assert (late.session, late.reply.code) == (two.session, "draining")
    assert code(two.try_reserve([1])) == "draining"
    refused = pair.do(commands.OpenSession(9, b"t" * 16, "late")).reply
    assert code(refused) == "draining"
    one.extend(held, [7])
    one.commit(held, 13)
    one.free(held)
    assert one.lookup(range(12)) == 12
    assert pair.real.snapshot()["draining"] is True


def test_who_waits_is_served_as_soon_as_others_have_computed_its_prefix():
    pair, one, two = workers(4, 2)
    held = one.reserve(P)
    assert two.try_reserve([*P, 1], wait_s=60.0) is None
    outcome = pair.do(pair.request(one.session, commands.Step(commit=[commands.Commit(held.seq, 12)])))
    assert [late.reply.cached_tokens for late in outcome.granted] == [12]


def test_what_takes_nothing_from_anybody_is_granted_however_short_the_pool_is():
    pair, one = workers(6, 1, session_floor_pages=2)
    busy = one.compute(P[:8])
    for _ in range(2):
        Worker(pair)  # the floors of these take up all that is free
    refused_for_pages(one.try_reserve([1]), need=1, available=0)
    assert one.reserve(P[:8], last_page="keep").pages == busy.pages
    assert one.reserve([]).pages == []


def test_a_session_revoked_for_one_pool_makes_room_in_the_other():
    small = small_config(2).pools[0]
    config = Config(server=ServerConfig(lease_s=20.0), pools=(small, dataclasses.replace(small, name="b")))
    pair = EnginePair(config)
    silent, one, two = Worker(pair), Worker(pair), Worker(pair)
    for pool in ("a", "b"):
        tokens = pack_tokens(range(8))
        silent.ask(commands.Reserve(pool, ord(pool), NAMESPACE, tokens))
        silent.step(commit=[commands.Commit(ord(pool), 8)])
    pair.tick(15.0)
    for worker, pool in ((one, "a"), (two, "b")):
        assert worker.ask(commands.Reserve(pool, 1, NAMESPACE, pack_tokens(range(50, 58)), wait_s=60.0)) is None
    outcome = pair.tick(10.0)
    assert outcome.ended == [silent.session]
    assert [late.session for late in outcome.granted] == [one.session, two.session]
