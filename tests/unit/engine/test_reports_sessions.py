"""Failures that comparable systems have had, as small scenarios: abort, death, silence, late and repeated requests.

Every step is also compared with the naive model and recounted (``EnginePair``), so a scenario says only what is special
about it. Pages have 4 tokens unless a test says otherwise.
"""

import pytest

from fuzz.model.packing import pack_tokens
from fuzz.pairs.worker import NAMESPACE, code, counts, refused_for_pages, small_config, workers
from radixkv import commands
from radixkv.engine.engine import Engine

P = list(range(1, 13))
"""Three pages."""


# -- what was never finished -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["free", "killed", "lapsed"])
def test_what_was_not_committed_is_never_found(end):
    pair, one, two = workers(8, 2)
    held = one.reserve(P)
    one.commit(held, 4)
    if end == "free":
        one.free(held)
    elif end == "killed":
        pair.do(commands.EndSession(one.session, mapped=True, reason="killed"))
        assert counts(pair) == {"free": 5, "cached": 1, "quarantined": 2}
        pair.do(commands.MappingGone(one.session))
    else:
        pair.tick(21.0)
        two.free(two.reserve(range(100, 124)))
        assert code(one.ask(commands.Step(commit=[commands.Commit(held.seq, 12)]))) == "session_lost"
        pair.do(commands.MappingGone(one.session))
    assert two.lookup(P) in (0, 4)
    assert set(counts(pair)) == ({"free"} if end == "lapsed" else {"free", "cached"})


def test_only_the_one_that_wrote_is_found():
    for first_to_go in (0, 1):
        pair, one, two, three = workers(8, 3)
        sequences = [one.reserve(P[:8]), two.reserve(P[:8])]
        writer = 1 - first_to_go
        (one, two)[writer].commit(sequences[writer], 8)
        (one, two)[first_to_go].free(sequences[first_to_go])
        assert three.reserve([*P[:8], 3]).pages[:2] == sequences[writer].pages
        assert counts(pair)["cached"] == 2


def test_a_refused_reserve_leaves_no_trace():
    pair, one = workers(4, 1)
    one.cache([5] * 4)
    before = pair.real.snapshot()["pools"]
    refused_for_pages(one.try_reserve(range(20), seq=7), need=5, available=4)
    assert pair.real.snapshot()["pools"] == before
    assert one.lookup(range(20)) == 0
    assert len(one.reserve(range(16), seq=7).pages) == 4


def test_a_page_half_written_by_the_dead_can_be_computed_by_another():
    pair, one, two = workers(8, 2)
    one.reserve(P[:8])
    pair.do(commands.EndSession(one.session, mapped=True, reason="killed"))
    got = two.compute(P[:8])
    assert got.cached == 0 and two.lookup(P[:8]) == 8
    pair.do(commands.MappingGone(one.session))
    assert counts(pair) == {"free": 6, "cached": 2}


# -- the dead, the silent and the late -------------------------------------------------------------------------------


def test_who_is_silent_keeps_everything_until_somebody_is_short():
    pair, silent, two = workers(4, 2)
    held = silent.compute(P[:8])
    pair.tick(1000.0)
    two.reserve(range(50, 58))
    silent.commit(held, 8)
    assert silent.lookup(P[:8]) == 8
    assert pair.real.snapshot()["sessions"] == 2


def test_a_lapsed_session_gives_way_to_who_is_short_also_to_who_waits_already():
    pair, silent, two = workers(4, 2)
    held = silent.compute(P[:8])
    silent.reserve([9])
    pair.tick(15.0)
    assert two.try_reserve(range(50, 62), wait_s=60.0) is None
    outcome = pair.tick(10.0)
    assert outcome.ended == [silent.session]
    assert [late.session for late in outcome.granted] == [two.session]
    assert counts(pair) == {"private": 3, "quarantined": 1}
    late = silent.ask(commands.Step(commit=[commands.Commit(held.seq, 8)]))
    assert code(late) == "session_lost"


def test_each_verb_of_a_session_that_is_over_is_refused_and_changes_nothing():
    pair, gone, two = workers(8, 2)
    held = gone.compute(P[:8])
    two.compute(range(50, 58))
    pair.do(commands.EndSession(gone.session, mapped=True, reason="killed"))
    before = pair.real.snapshot()["pools"]
    seq = held.seq
    for body in (
        commands.Reserve("a", 9, NAMESPACE, b""),
        commands.Step(free=[commands.Free(seq)]),
        commands.Step(commit=[commands.Commit(seq, 8)]),
        commands.Step(extend=[commands.Extend(seq, b"", 4)]),
        commands.Step(truncate=[commands.Truncate(seq, 0)]),
        commands.Step(share=[commands.Share(seq, None, 1, 50)]),
        commands.Handoff(seq, b"t" * 16, 1.0),
        commands.Compact(seq),
        commands.Invalidate("a", NAMESPACE),
        commands.Heartbeat(),
        commands.Bye(),
    ):
        assert code(gone.ask(body)) == "session_lost"
    assert pair.real.snapshot()["pools"] == before


def test_one_stale_item_does_not_stop_the_others_of_its_step():
    _, one = workers(8, 1)
    held = one.reserve(P[:8])
    good, stale = one.step(commit=[commands.Commit(held.seq, 8), commands.Commit(99, 8)]).commit
    assert good is None and code(stale) == "stale_handle"
    assert one.lookup(P[:8]) == 8


def test_a_late_commit_for_a_first_try_does_not_touch_the_second():
    _, one = workers(8, 1)
    first = one.reserve(P[:8])
    one.free(first)
    second = one.reserve(P[:8])
    assert code(one.step(commit=[commands.Commit(first.seq, 8)]).commit[0]) == "stale_handle"
    assert code(one.step(free=[commands.Free(first.seq)]).free[0]) == "stale_handle"
    assert one.lookup(P[:8]) == 0
    one.commit(second, 8)
    assert one.lookup(P[:8]) == 8


def test_64_workers_end_at_once_in_slices():
    engine = Engine(small_config(100_000), "boot", "cache")
    for session in range(1, 66):
        engine.step(commands.OpenSession(session, b"t" * 16, "w"), 0.0)
    for session in range(1, 65):
        for seq in range(1, 301):
            tokens = pack_tokens([session, seq, 0, 0] * 5)
            engine.step(commands.Request(session, 1, seq, 1e9, commands.Reserve("a", seq, NAMESPACE, tokens)), 0.0)
    assert engine.pools["a"].pages.counts[1] == 64 * 300 * 5
    for session in range(1, 65):
        outcome = engine.step(commands.EndSession(session, True, "killed"), 0.0)
        retired = [len(write.pages) // 4 for write in outcome.writes if isinstance(write, commands.Retire)]
        assert sum(retired) == 256 * 5
        assert len(retired) <= 2  # of each session in the slice together, however many sequences it had
    ticks = 0
    while engine.has_work():
        engine.step(commands.Tick(1.0), 1.0)
        ticks += 1
    assert ticks >= 1
    for session in range(1, 65):
        engine.step(commands.MappingGone(session), 1.0)
    pages = engine.snapshot()["pools"]["a"]["pages"]
    assert pages["free"] == 100_000 and engine.quarantine == {}


# -- requests that come again ----------------------------------------------------------------------------------------


def test_a_repeated_request_acts_once():
    pair, one, two = workers(8, 2)
    request = pair.request(one.session, commands.Reserve("a", 1, NAMESPACE, pack_tokens(P[:8])))
    first, again = pair.do(request).reply, pair.do(request).reply
    assert isinstance(first, commands.Reserved) and first == again
    assert counts(pair) == {"free": 6, "private": 2}
    assert code(one.try_reserve(P[:8], seq=1)) == "bad_request"
    assert isinstance(two.try_reserve(P[:8], seq=1), commands.Reserved)
    late = commands.Request(one.session, 1, request.id, pair.now - 1.0, request.body)
    assert pair.do(late).reply == first
    pair.do(pair.request(one.session, commands.Step(free=[commands.Free(1)])))
    assert pair.do(request).reply == first
    assert counts(pair) == {"free": 6, "private": 2}


def test_a_repeat_of_a_waiting_request_gets_one_answer():
    pair, one, two = workers(2, 2)
    held = one.reserve(range(8))
    request = pair.request(two.session, commands.Reserve("a", 1, NAMESPACE, pack_tokens([1]), wait_s=9.0))
    assert pair.do(request).reply is None and pair.do(request).reply is None
    outcome = pair.do(pair.request(one.session, commands.Step(free=[commands.Free(held.seq)])))
    assert len(outcome.granted) == 1
    assert pair.do(request).reply == outcome.granted[0].reply


def test_eight_workers_compute_the_same_prompts_at_once():
    pair, *crowd = workers(64, 8)
    for turn in range(5):
        prompts = [[turn, number, 0, 0] * 2 for number in range(2)]
        held = [[worker.reserve(prompt, last_page="drop") for prompt in prompts] for worker in crowd]
        for worker, sequences in zip(crowd, held, strict=True):
            for sequence in sequences:
                worker.commit(sequence, 8)
        for worker, sequences in zip(crowd, held, strict=True):
            for sequence in sequences:
                worker.free(sequence)
        assert "shadow" not in counts(pair)
        assert counts(pair)["cached"] == 4 * (turn + 1)
