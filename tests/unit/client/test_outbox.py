"""Fences: nothing goes out before its event, nor before what was asked for earlier; nothing is lost."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest

from radixkv.client import verbs
from radixkv.client.batch import TruncateItem
from radixkv.commands import Commit, Extend, Failure, Free, Handoff, Step, Stepped, Truncate, Truncated
from radixkv.errors import BadRequest, SessionLost, StaleHandle, Timeout, Unavailable


def test_a_commit_waits_for_its_event(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, event))
    desk.ship()
    assert desk.bodies == []
    assert seq.committed_tokens == 0
    event.done = True
    desk.ship()
    assert desk.bodies == [Step(commit=[Commit(seq.id, 4)])]
    assert (seq.committed_tokens, event.waited) == (4, 0)


def test_an_event_that_is_done_holds_nothing_up(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq = desk.sequence()
    desk.run(verbs.commit(desk.core, seq, 4, new_event(done=True)))
    assert seq.committed_tokens == 4


def test_order_within_a_sequence_whatever_the_order_of_events(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, first, second = desk.sequence(), new_event(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, first))
    desk.run(verbs.commit(desk.core, seq, 8, second))
    second.done = True
    desk.ship()
    assert desk.bodies == []
    first.done = True
    desk.ship()
    assert desk.bodies == [Step(commit=[Commit(seq.id, 4), Commit(seq.id, 8)])]


def test_nothing_follows_until_the_last_message_is_answered(desk: Any, new_event: Any) -> None:
    """Messages of different threads may overtake each other; those of one sequence must not."""
    seq, first, second = desk.sequence(), new_event(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, first))
    desk.run(verbs.commit(desk.core, seq, 8, second))
    first.done = True
    (flying,), _ = desk.core.outbox.take(desk.session, 0.0)
    second.done = True
    assert desk.core.outbox.take(desk.session, 0.0) == ([], [])
    desk.core.outbox.landed(flying, desk.session)
    (following,), _ = desk.core.outbox.take(desk.session, 0.0)
    assert [item.n for item in flying.items + following.items] == [4, 8]


def test_other_sequences_do_not_wait(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    slow, quick = desk.sequence(), desk.sequence()
    desk.run(verbs.commit(desk.core, slow, 4, new_event()))
    desk.run(verbs.commit(desk.core, quick, 4, None))
    assert desk.bodies == [Step(commit=[Commit(quick.id, 4)])]


def test_without_a_fence_behind_those_with_one(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, event))
    desk.run(verbs.commit(desk.core, seq, 8, None))
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 8), None))
    desk.run(verbs.free(desk.core, seq, None))
    assert desk.bodies == []
    assert seq.closed
    event.done = True
    desk.ship()
    assert desk.bodies == [Step(commit=[Commit(seq.id, 4), Commit(seq.id, 8)])]
    desk.ship()
    assert desk.bodies == [Step(truncate=[Truncate(seq.id, 8)]), Step(free=[Free(seq.id)])]
    assert len(desk.core.outbox) == 0


def test_completed_ones_ride_with_the_next_message(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, other, event = desk.sequence(), desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, event))
    event.done = True
    desk.run(verbs.extend(desk.core, other, b"", 4))
    assert desk.bodies == [Step(commit=[Commit(seq.id, 4)]), Step(extend=[Extend(other.id, b"", 4)])]


def test_extend_and_share_do_not_wait_for_a_commit(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, event))
    desk.run(verbs.extend(desk.core, seq, b"", 4))
    assert desk.bodies == [Step(extend=[Extend(seq.id, b"", 4)])]
    assert event.waited == 0


def test_extend_waits_for_a_truncate_and_sees_its_answer(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq = desk.sequence(8, (0, 1, 2))
    before, cut, after = new_event(), new_event(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, before))
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 4), cut))
    desk.run(verbs.commit(desk.core, seq, 4, after))
    desk.run(verbs.extend(desk.core, seq, b"", 4))
    assert (before.waited, cut.waited, after.waited) == (1, 1, 0)
    kinds = [[name for name in Step.__struct_fields__ if getattr(body, name)] for body in desk.bodies]
    assert kinds == [["commit"], ["truncate"], ["extend"]]
    assert seq.page_table.tolist() == [0, 9]


def test_a_truncate_that_failed_stops_the_extend(desk: Any, new_event: Any) -> None:
    desk.answer = lambda request: Stepped(truncate=[Failure("bad_request", "over length")])
    seq = desk.sequence()
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 4), new_event()))
    with pytest.raises(BadRequest, match="over length"):
        desk.run(verbs.extend(desk.core, seq, b"", 4))
    assert [type(body) for body in desk.bodies] == [Step]


def test_a_deferred_error_surfaces_once_at_the_next_call(desk: Any, new_event: Any, good: Any) -> None:
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 999, event))
    event.done = True
    desk.answer = lambda request: Stepped(commit=[Failure("bad_request", "over length")])
    desk.ship()
    desk.answer = good
    with pytest.raises(BadRequest, match="over length"):
        desk.run(verbs.commit(desk.core, seq, 4, None))
    desk.run(verbs.commit(desk.core, seq, 4, None))
    assert seq.committed_tokens == 4


def test_free_goes_out_although_an_earlier_error_surfaces(desk: Any, new_event: Any, good: Any) -> None:
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 999, event))
    event.done = True
    desk.answer = lambda request: Stepped(commit=[Failure("bad_request", "over length")])
    desk.ship()
    desk.answer = good
    desk.bodies.clear()
    with pytest.raises(BadRequest, match="over length"):
        desk.run(verbs.free(desk.core, seq, None))
    assert desk.bodies[-1] == Step(free=[Free(seq.id)])
    desk.run(verbs.free(desk.core, seq, None))


def test_flush_waits_for_all_and_raises_the_first_error(desk: Any, new_event: Any) -> None:
    good_seq, bad_seq = desk.sequence(), desk.sequence()

    def answer(request: Any) -> Any:
        refused = Failure("bad_request", "over length")
        return Stepped(commit=[refused if item.n > 8 else None for item in request.body.commit])

    desk.answer = answer
    events = [new_event(), new_event()]
    desk.run(verbs.commit(desk.core, good_seq, 4, events[0]))
    desk.run(verbs.commit(desk.core, bad_seq, 99, events[1]))
    with pytest.raises(BadRequest, match="over length"):
        desk.run(verbs.flush(desk.core, desk.pool, None))
    assert all(event.done for event in events)
    assert good_seq.committed_tokens == 4
    desk.run(verbs.flush(desk.core, desk.pool, None))


def test_flush_gives_up_after_its_timeout(desk: Any, new_event: Any) -> None:
    seq = desk.sequence()
    desk.run(verbs.commit(desk.core, seq, 4, new_event()))
    with pytest.raises(Timeout):
        desk.run(verbs.flush(desk.core, desk.pool, 3.0))
    assert len(desk.core.outbox) == 1


def test_flush_of_nothing_sends_nothing(desk: Any) -> None:
    desk.run(verbs.flush(desk.core, desk.pool, 0))
    assert desk.bodies == []


def test_after_a_failed_event_nothing_is_published_but_pages_go_back(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, broken = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, broken))
    desk.run(verbs.commit(desk.core, seq, 8, new_event(done=True)))
    desk.run(verbs.free(desk.core, seq, None))
    broken.broken = True
    desk.ship()
    assert desk.bodies == [Step(free=[Free(seq.id)])]
    with pytest.raises(Unavailable, match="device lost"):
        desk.run(verbs.flush(desk.core, desk.pool, 1))


def test_after_a_failed_event_a_free_commits_nothing(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    one, broken = desk.sequence(), new_event()
    desk.run(verbs.free(desk.core, one, broken, 8))
    broken.broken = True
    desk.ship()
    assert desk.bodies == [Step(free=[Free(one.id)])]


def test_handoff_behind_its_event(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, event = desk.sequence(), new_event()
    ticket = desk.run(verbs.handoff(desk.core, seq, 30.0, event))
    assert desk.bodies == []
    with pytest.raises(StaleHandle):
        desk.run(verbs.commit(desk.core, seq, 4, None))
    event.done = True
    desk.ship()
    assert desk.bodies == [Handoff(seq.id, ticket, 30.0)]


def test_handoff_without_event_waits_for_pending_commits(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, event))
    ticket = desk.run(verbs.handoff(desk.core, seq, 30.0, None))
    assert event.waited == 1
    assert desk.bodies == [Step(commit=[Commit(seq.id, 4)]), Handoff(seq.id, ticket, 30.0)]
    assert seq.closed


def test_fenced_operations_of_a_lost_session_are_reported(desk: Any, new_event: Any) -> None:
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, event))
    desk.core.ended(desk.session)
    desk.connect()
    event.done = True
    desk.ship()
    assert desk.bodies == []
    with pytest.raises(SessionLost):
        desk.run(verbs.flush(desk.core, desk.pool, 1))


def test_a_deferred_operation_without_reply_is_asked_about(desk: Any, new_event: Any, good: Any) -> None:
    """And is no error if it turns out to have been executed."""
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, event))
    event.done = True
    with pytest.raises(Timeout):
        desk.ship()
    (first,) = desk.seen
    desk.seen.clear()
    desk.answer = good
    desk.run(verbs.extend(desk.core, seq, b"", 4))
    assert desk.seen[0] == first
    assert desk.bodies[1:] == [Step(extend=[Extend(seq.id, b"", 4)])]
    assert seq.committed_tokens == 4


def test_forgotten_ids_ride_in_one_step(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, event))
    event.done = True
    for forgotten in (901, 902):
        desk.core.outbox.drop(desk.session, forgotten)
    desk.ship()
    assert desk.bodies == [Step(free=[Free(901), Free(902)], commit=[Commit(seq.id, 4)])]


def test_forgotten_ids_are_kept_until_a_reply_came(desk: Any, good: Any) -> None:
    desk.core.outbox.drop(desk.session, 901)
    with pytest.raises(Timeout):
        desk.ship()
    desk.answer = good
    desk.ship()
    desk.ship()
    assert desk.bodies == [Step(free=[Free(901)])] * 2


def test_forgotten_ids_of_a_session_that_is_over_mean_nothing_to_the_next(desk: Any, good: Any) -> None:
    desk.answer = good
    desk.core.outbox.drop(desk.session, 901)
    desk.core.outbox.drop(desk.session, 902, not_before=1e9)
    desk.core.ended(desk.session)
    desk.connect()
    desk.core.outbox.drop(desk.session, 903)
    desk.ship()
    assert desk.bodies == [Step(free=[Free(903)])]


def test_more_than_a_message_holds(desk: Any, good: Any) -> None:
    desk.answer = good
    for forgotten in range(2500):
        desk.core.outbox.drop(desk.session, forgotten)
    desk.ship()
    freed = [[item.seq for item in body.free] for body in desk.bodies]
    assert [len(ids) for ids in freed] == [1024, 1024, 452]
    assert sorted(chain.from_iterable(freed)) == list(range(2500))


# -- handing off what others have copied from --------------------------------------------------------------------------


def fork(desk: Any, good: Any, copies: bool = True) -> tuple[Any, Any]:
    """A sequence with six of ten tokens' rows in a page begun, and a fork whose rows come from that page."""
    desk.memory.copies = copies
    seq = desk.sequence(10, (0, 1, 2), committed_tokens=10, writable_from_tokens=8)
    other = desk.sequence(10, (0, 1, 5), committed_tokens=10, writable_from_tokens=8, copy_rows=[(2, 5, 2)])
    desk.answer = good
    return seq, other


@pytest.mark.parametrize("fenced", [False, True])
def test_a_handoff_tells_of_copies_of_one_whose_free_still_waits(
    desk: Any, new_event: Any, good: Any, fenced: bool
) -> None:
    seq, other = fork(desk, good)
    event, mine = new_event(), new_event(done=not fenced)
    desk.run(verbs.free(desk.core, other, event))
    ticket = desk.run(verbs.handoff(desk.core, seq, 30.0, mine))
    assert desk.bodies == [Step(copied=[other.id]), *([] if fenced else [Handoff(seq.id, ticket, 30.0)])]
    assert event.waited == mine.waited == 0
    mine.done = True
    desk.ship()
    assert desk.bodies == ([Handoff(seq.id, ticket, 30.0)] if fenced else [])
    event.done = True
    desk.ship()
    assert desk.bodies == [Step(free=[Free(other.id)])]


@pytest.mark.parametrize("verb", ["commit", "free", "handoff", "truncate"])
def test_what_is_told_of_copies_overtakes_what_waits_for_events(
    desk: Any, new_event: Any, good: Any, verb: str
) -> None:
    """And nothing of that sequence goes between: a truncate's rows are not copied yet."""
    seq, other = fork(desk, good)
    event = new_event()
    arguments = {"commit": (10,), "free": (), "handoff": (30.0,)}.get(verb)
    call = verbs.truncate(desk.core, TruncateItem(other, 9), event) if arguments is None else None
    desk.run(call or getattr(verbs, verb)(desk.core, other, *arguments, event))
    event.done = verb == "truncate"
    desk.run(verbs.handoff(desk.core, seq, 30.0, None))
    first, *_, last = desk.bodies
    assert (first.copied, type(last)) == ([other.id], Handoff)
    assert bool(first.truncate) == (verb == "truncate")


def test_copies_are_told_once_and_to_nobody_whom_they_do_not_concern(desk: Any, good: Any) -> None:
    seq, other = fork(desk, good)
    far = desk.sequence(10, (7, 8, 9), committed_tokens=10, writable_from_tokens=8)
    desk.run(verbs.handoff(desk.core, far, 30.0, None))
    assert [type(body) for body in desk.bodies] == [Handoff]
    desk.run(verbs.handoff(desk.core, seq, 30.0, None))
    assert desk.bodies[0] == Step(copied=[other.id])
    assert desk.pool.untold(seq) == []


@pytest.mark.parametrize("waits", [False, True])
def test_copies_that_came_too_late_to_be_told_are_told_again(desk: Any, new_event: Any, good: Any, waits: bool) -> None:
    seq, other = fork(desk, good)
    if waits:
        desk.run(verbs.free(desk.core, other, new_event()))
    late = Failure("timeout", "too late")
    refused = Failure("bad_request", "say copied first")
    desk.answer = lambda request: late if isinstance(request.body, Step) else refused
    with pytest.raises(BadRequest, match="copied"):
        desk.run(verbs.handoff(desk.core, seq, 30.0, None))
    desk.bodies.clear()
    desk.answer = good
    ticket = desk.run(verbs.handoff(desk.core, seq, 30.0, None))
    assert desk.bodies == [Step(copied=[other.id]), Handoff(seq.id, ticket, 30.0)]
    desk.run(verbs.flush(desk.core, desk.pool, 0)) if not waits else None


@pytest.mark.parametrize("verb", ["commit", "free", "copied"])
@pytest.mark.parametrize("fenced", [False, True])
def test_a_handoff_waits_for_rows_that_a_device_still_copies_from_it(
    desk: Any, new_event: Any, good: Any, verb: str, fenced: bool
) -> None:
    """Where the caller copies them, on a stream, and what says so is behind an event already."""
    seq, other = fork(desk, good, copies=False)
    event, mine = new_event(), new_event(done=not fenced)
    arguments = {"commit": (10,)}.get(verb, ())
    desk.run(getattr(verbs, verb)(desk.core, other, *arguments, event))
    desk.run(verbs.handoff(desk.core, seq, 30.0, mine))
    assert (event.waited, mine.waited) == (1, 0)
    mine.done = True
    desk.ship()
    first, last = desk.bodies
    assert (type(first), type(last)) == (Step, Handoff)
    assert other.copy_rows == [] or verb == "free"


def test_rows_that_the_caller_has_yet_to_copy_are_not_told_of(desk: Any, good: Any) -> None:
    """Although the library has copied others into the same sequence before."""
    seq, other = fork(desk, good)
    desk.memory.copies = False
    answer = Stepped(truncate=[Truncated(2, np.array([6], np.int32).tobytes(), [(1, 6, 2)])])
    desk.answer = lambda request: answer
    desk.run(verbs.truncate(desk.core, TruncateItem(other, 6), None))
    assert other.copy_rows == [(1, 6, 2)]
    desk.answer = good
    desk.bodies.clear()
    desk.run(verbs.handoff(desk.core, seq, 30.0, None))
    assert [type(body) for body in desk.bodies] == [Handoff]
