"""Requests that were sent and not answered: whether they were executed is asked before the sequence goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixkv.client import verbs
from radixkv.client.batch import TruncateItem
from radixkv.client.effects import Ask
from radixkv.client.step import Plan, step
from radixkv.commands import (
    Commit,
    Extend,
    Failure,
    Free,
    Handoff,
    Heartbeat,
    Request,
    Resume,
    Step,
    Stepped,
    Truncate,
    Truncated,
)
from radixkv.errors import SessionLost, StaleHandle, Timeout, Unavailable

LATE = Failure("timeout", "the request came after its deadline: not executed")
OLD = Failure("bad_request", "this request id is too old: its reply is no longer kept")


def page(number: int) -> bytes:
    return np.int32(number).tobytes()


class Deaf:
    """A daemon whose first answer to each of so many requests is lost; asked again, it says what it said."""

    def __init__(self, answer: Callable[[Request], Any], lost: int = 1) -> None:
        self._answer = answer
        self._lost = lost
        self._said: dict[int, Any] = {}

    def __call__(self, request: Request) -> Any:
        if request.id in self._said:
            return self._said[request.id]
        self._said[request.id] = self._answer(request)
        self._lost -= 1
        return None if self._lost >= 0 else self._said[request.id]


def in_doubt(desk: Any) -> list[Request]:
    """Ship what is ready; no answer comes. What was sent."""
    answer, desk.answer = desk.answer, lambda request: None
    with pytest.raises(Timeout):
        desk.ship()
    desk.answer = answer
    sent, desk.seen = desk.seen, []
    return sent


def under_way(desk: Any) -> list[Any]:
    """Another thread's message, which has no answer yet."""
    return desk.core.envelop(Ask(desk.session), desk.now + 5.0, desk.epoch)


# -- nothing overtakes a doubt ------------------------------------------------------------------------------------


def test_a_truncate_does_not_leave_while_an_earlier_one_is_in_doubt(desk: Any, new_event: Any, good: Any) -> None:
    """Answered the other way round, the first would bring back what the second has cut off."""
    seq, first, second = desk.sequence(12, (0, 1, 2)), new_event(), new_event()
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 8), first))
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 4), second))
    first.done = True
    (sent,) = in_doubt(desk)
    second.done = True
    desk.answer = good
    desk.ship()
    assert desk.seen == [sent], "the same request once more, and nothing behind it"
    assert (seq.length, seq.page_table.tolist()) == (8, [0, 1])
    desk.seen.clear()
    desk.ship()
    assert desk.bodies == [Step(truncate=[Truncate(seq.id, 4)])]
    assert (seq.length, seq.page_table.tolist()) == (4, [0])


def test_a_truncate_does_not_leave_while_a_commit_is_in_doubt(desk: Any, new_event: Any, good: Any) -> None:
    """Heard of after the truncate, the commit would count a token that is gone."""
    seq, written, decided = desk.sequence(), new_event(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, written))
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 4), decided))
    written.done = True
    (sent,) = in_doubt(desk)
    decided.done = True
    desk.answer = good
    desk.ship()
    assert (desk.seen, seq.length, seq.committed_tokens) == ([sent], 8, 5)
    desk.ship()
    assert (seq.length, seq.committed_tokens) == (4, 4)
    desk.run(verbs.copied(desk.core, seq, None))


def test_what_has_to_be_a_message_of_its_own_waits_for_the_first_ones_answer(
    desk: Any, new_event: Any, good: Any
) -> None:
    """Sent together, the answer to the first of them could be lost and that to the second arrive."""
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, event))
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 4), event))
    event.done = True
    desk.answer = Deaf(good)
    with pytest.raises(Timeout):
        desk.ship()
    assert desk.bodies == [Step(commit=[Commit(seq.id, 5)])]
    desk.run(verbs.flush(desk.core, desk.pool, None))
    assert (seq.length, seq.committed_tokens) == (4, 4)


def test_a_free_goes_along_with_what_comes_before_it(desk: Any, new_event: Any, good: Any) -> None:
    """Whatever is heard after a free is nothing to anybody."""
    desk.answer = good
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, event))
    desk.run(verbs.free(desk.core, seq, event))
    event.done = True
    desk.ship()
    assert desk.bodies == [Step(commit=[Commit(seq.id, 5)]), Step(free=[Free(seq.id)])]


def test_a_free_behind_a_doubt(desk: Any, new_event: Any, good: Any) -> None:
    """No further verb of the caller comes: whatever goes out next asks again, and then frees."""
    seq, first, second = desk.sequence(), new_event(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, first))
    desk.run(verbs.free(desk.core, seq, second))
    first.done = True
    (sent,) = in_doubt(desk)
    second.done = True
    assert desk.core.ready(desk.session)
    desk.answer = good
    desk.ship()
    assert desk.seen == [sent]
    desk.seen.clear()
    assert desk.core.ready(desk.session)
    desk.ship()
    assert desk.bodies == [Step(free=[Free(seq.id)])]
    assert (seq in desk.session.sequences, desk.core.ready(desk.session), len(desk.core.outbox)) == (False, False, 0)


def test_a_free_without_a_fence_waits_behind_a_doubt_of_a_fenced_one(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq = desk.sequence()
    desk.run(verbs.commit(desk.core, seq, 5, event := new_event()))
    event.done = True
    (sent,) = in_doubt(desk)
    desk.run(verbs.free(desk.core, seq, None))
    assert (seq.closed, desk.seen) == (True, [])
    desk.run(verbs.flush(desk.core, desk.pool, 1.0))
    assert [request.body for request in desk.seen] == [sent.body, Step(free=[Free(seq.id)])]


def test_a_callers_own_doubt_holds_up_what_is_fenced(desk: Any, new_event: Any, good: Any) -> None:
    """An extend overtakes a fenced commit. Without an answer it is asked about before the commit goes out."""
    seq, event = desk.sequence(4, (0,)), new_event()
    desk.run(verbs.commit(desk.core, seq, 4, event))
    with pytest.raises(Timeout):
        desk.run(verbs.extend(desk.core, seq, b"\0\0\0\0", 0))
    (sent,), desk.seen = desk.seen, []
    event.done = True
    desk.answer = good
    desk.ship()
    assert (desk.seen, seq.length) == ([sent], 5)
    desk.ship()
    assert desk.bodies == [Step(extend=[Extend(seq.id, b"\0\0\0\0")]), Step(commit=[Commit(seq.id, 4)])]


def test_other_sequences_do_not_wait_for_a_doubt(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, other, event = desk.sequence(), desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, event))
    event.done = True
    (sent,) = in_doubt(desk)
    desk.run(verbs.commit(desk.core, other, 4, event))
    assert desk.bodies == [sent.body, Step(commit=[Commit(other.id, 4)])]


# -- who settles it -----------------------------------------------------------------------------------------------


def test_any_message_asks_again_once(desk: Any, good: Any) -> None:
    seq = desk.sequence(4, (0,))
    with pytest.raises(Timeout):
        desk.run(verbs.extend(desk.core, seq, b"", 4))
    (sent,), desk.seen = desk.seen, []
    desk.answer = good
    desk.run(verbs.heartbeat())
    assert [(request.id == sent.id, request.body) for request in desk.seen] == [(True, sent.body), (False, Heartbeat())]
    assert (seq.unsettled, desk.session.doubts, seq.page_table.tolist()) == ([], {}, [0, 9])
    desk.seen.clear()
    desk.run(verbs.heartbeat())
    assert desk.bodies == [Heartbeat()]


def test_the_keeper_is_told(desk: Any, good: Any) -> None:
    """It asks although nobody calls, as it looks after fences."""
    stirred = []
    desk.core.outbox.stirred = lambda: stirred.append(1)
    seq = desk.sequence(4, (0,))
    assert not desk.core.unfinished(desk.session)
    with pytest.raises(Timeout):
        desk.run(verbs.extend(desk.core, seq, b"", 4))
    assert (stirred, desk.core.unfinished(desk.session)) == ([1], True)
    desk.answer = good
    desk.ship()
    assert (stirred, desk.core.unfinished(desk.session)) == ([1], False)


def test_claims_take_no_repeats_along(desk: Any) -> None:
    seq = desk.sequence(4, (0,))
    with pytest.raises(Timeout):
        desk.run(verbs.extend(desk.core, seq, b"", 4))
    (out,) = desk.core.envelop(Ask(desk.session, [Resume([], True)], alone=True), desk.now + 5.0, desk.epoch)
    assert out.request.body == Resume([], True)


def test_what_is_being_asked_again_is_not_asked_by_others_too(desk: Any, new_event: Any, good: Any) -> None:
    """Two messages with the same request: their threads would wait for each other's answers, or spin."""
    seq, first, second = desk.sequence(), new_event(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, first))
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 4), second))
    first.done = second.done = True
    (sent,) = in_doubt(desk)
    (repeat,) = under_way(desk)
    assert (repeat.request, desk.core.on_its_way(seq)) == (sent, True)
    assert (under_way(desk), desk.core.ready(desk.session)) == ([], False), "else whoever waits for it spins"
    woken = []
    desk.core.outbox.changed = lambda: woken.append(desk.core.on_its_way(seq))
    desk.core.abandon([repeat], desk.session, Timeout("no reply"))
    assert woken == [False], "whoever waits asks himself"
    (repeat,) = under_way(desk)
    desk.core.receive(repeat.request.id, good(repeat.request), desk.session)
    assert (woken, seq.committed_tokens) == ([False, False], 5)
    assert desk.core.ready(desk.session)


def test_a_repeat_of_a_callers_own_request_wakes_who_waits_for_it(desk: Any, good: Any) -> None:
    seq = desk.sequence(4, (0,))
    with pytest.raises(Timeout):
        desk.run(verbs.extend(desk.core, seq, b"", 4))
    (repeat,) = under_way(desk)
    woken = []
    desk.core.outbox.changed = lambda: woken.append(desk.core.on_its_way(seq))
    desk.core.receive(repeat.request.id, good(repeat.request), desk.session)
    assert woken == [False]


def test_flush_settles_a_doubt(desk: Any, new_event: Any, good: Any) -> None:
    """What was executed is no error; and it ends, although no other verb comes."""
    seq, first, second = desk.sequence(), new_event(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, first))
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 4), second))
    first.done = True
    (sent,) = in_doubt(desk)
    desk.answer = good
    desk.run(verbs.flush(desk.core, desk.pool, None))
    assert desk.bodies == [sent.body, Step(truncate=[Truncate(seq.id, 4)])]
    assert (seq.length, seq.committed_tokens) == (4, 4)


def test_flush_raises_what_was_not_executed(desk: Any, new_event: Any) -> None:
    seq, event = desk.sequence(), new_event(done=False)
    desk.run(verbs.commit(desk.core, seq, 5, event))
    event.done = True
    in_doubt(desk)
    desk.answer = lambda request: LATE
    with pytest.raises(Timeout, match="not executed"):
        desk.run(verbs.flush(desk.core, desk.pool, None))
    assert seq.committed_tokens == 0


def test_flush_of_a_daemon_that_says_nothing_ends(desk: Any, new_event: Any) -> None:
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, event))
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 4), event))
    event.done = True
    in_doubt(desk)
    began = desk.now
    with pytest.raises(Timeout):
        desk.run(verbs.flush(desk.core, desk.pool, None))
    assert desk.now - began <= desk.core.timeout
    assert len(desk.bodies) == 1


@pytest.mark.parametrize("verb", ["handoff", "compact", "extend"])
def test_verbs_that_wait_for_what_is_fenced_settle_doubts_on_their_way(
    desk: Any, new_event: Any, good: Any, verb: str
) -> None:
    made: dict[str, Any] = {
        "handoff": lambda: verbs.handoff(desk.core, seq, 30.0, None),
        "compact": lambda: verbs.compact(desk.core, seq),
        "extend": lambda: verbs.extend(desk.core, seq, b"", 4),
    }
    seq, first, second = desk.sequence(), new_event(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, first))
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 4), second))
    first.done = True
    (sent,) = in_doubt(desk)
    desk.answer = good
    desk.run(made[verb]())
    assert second.waited == 1
    assert desk.bodies[:2] == [sent.body, Step(truncate=[Truncate(seq.id, 4)])]
    assert (seq.length, seq.committed_tokens) == (4, 4)


def test_a_call_that_is_interrupted_leaves_a_doubt_that_is_settled(desk: Any, new_event: Any, good: Any) -> None:
    """Somebody else's call takes along what is ready, and is cancelled."""
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, event))
    event.done = True
    desk.core.abandon(under_way(desk), desk.session, Timeout("the call was interrupted"))
    desk.answer = good
    desk.run(verbs.flush(desk.core, desk.pool, None))
    assert seq.committed_tokens == 5


# -- what is found out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_of_two_truncates_in_a_message_in_doubt_the_last_one_copies(desk: Any, new_event: Any, late: bool) -> None:
    """The daemon has carried out both: what the second gave up may be another's by now."""
    seq, event = desk.sequence(12, (0, 1, 2)), new_event()
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 7), event))
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 3), event))
    event.done = True
    (sent,) = in_doubt(desk)
    reply = Stepped(
        truncate=[Truncated(2, page(20), [(1, 20, 3)]), Truncated(1, page(21), [(0, 21, 3)])],
    )
    if late:
        desk.core.receive(sent.id, reply, desk.session)
    else:
        desk.answer = lambda request: reply
        desk.ship()
    assert desk.memory.copied == [(0, 21, 3)]
    assert seq.page_table.tolist() == [21]


def test_of_one_that_nobody_remembers_nothing_more_is_published(desk: Any, new_event: Any) -> None:
    seq, first, second = desk.sequence(), new_event(), new_event()
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 6), first))
    desk.run(verbs.commit(desk.core, seq, 6, second))
    desk.run(verbs.free(desk.core, seq, None, 6))
    first.done = True
    (sent,) = in_doubt(desk)
    second.done = True
    desk.answer = lambda request: OLD if request.id == sent.id else Stepped(free=[None])
    with pytest.raises(StaleHandle):
        desk.run(verbs.flush(desk.core, desk.pool, None))
    assert desk.bodies[1:] == [Step(free=[Free(seq.id)])]


def test_frees_of_one_that_nobody_remembers(desk: Any, new_event: Any, good: Any) -> None:
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.free(desk.core, seq, event))
    event.done = True
    (sent,) = in_doubt(desk)
    desk.answer = lambda request: OLD if request.id == sent.id else good(request)
    desk.ship()
    desk.ship()
    assert desk.bodies == [Step(free=[Free(seq.id)])] * 2


@pytest.mark.parametrize("refusal", [LATE, OLD, Failure("bad_request", "rows are still to be copied")])
def test_a_fenced_handoff_that_was_not_executed_frees(desk: Any, new_event: Any, good: Any, refusal: Failure) -> None:
    """Nobody can use it any more, and its ticket is good for nothing: the pages go back."""
    seq, event = desk.sequence(), new_event()
    ticket = desk.run(verbs.handoff(desk.core, seq, 30.0, event))
    event.done = True
    (sent,) = in_doubt(desk)
    assert sent.body == Handoff(seq.id, ticket, 30.0)
    desk.answer = lambda request: refusal if request.id == sent.id else good(request)
    desk.ship()
    desk.ship()
    assert desk.bodies[1:] == [Step(free=[Free(seq.id)])]


def test_a_fenced_handoff_that_was_executed(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.handoff(desk.core, seq, 30.0, event))
    event.done = True
    (sent,) = in_doubt(desk)
    desk.run(verbs.flush(desk.core, desk.pool, None))
    desk.ship()
    assert (desk.seen, seq in desk.session.sequences) == ([sent], False)


def test_a_handoff_whose_event_failed_frees(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, broken = desk.sequence(), new_event()
    desk.run(verbs.handoff(desk.core, seq, 30.0, broken))
    broken.broken = True
    desk.ship()
    assert desk.bodies == [Step(free=[Free(seq.id)])]
    with pytest.raises(Unavailable, match="device lost"):
        desk.run(verbs.flush(desk.core, desk.pool, 1))


def test_forgotten_ids_of_a_message_in_doubt_are_freed_anew(desk: Any, new_event: Any, good: Any) -> None:
    """The repeat may be refused as too late."""
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, event))
    event.done = True
    desk.core.outbox.drop(desk.session, 901)
    (sent,) = in_doubt(desk)
    assert sent.body.free == [Free(901)]
    desk.answer = lambda request: LATE if request.id == sent.id else good(request)
    desk.ship()
    desk.ship()
    assert desk.bodies == [sent.body, Step(free=[Free(901)])]


# -- the end of the session, and of the daemon --------------------------------------------------------------------


def test_doubts_end_with_the_session(desk: Any, new_event: Any, good: Any) -> None:
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, event))
    event.done = True
    in_doubt(desk)
    session = desk.session
    desk.core.ended(session)
    desk.connect()
    desk.answer = good
    with pytest.raises(Timeout):
        desk.run(verbs.flush(desk.core, desk.pool, None))
    desk.run(verbs.flush(desk.core, desk.pool, None))
    assert (desk.bodies, session.doubts) == ([], {})
    with pytest.raises(SessionLost):
        desk.run(verbs.commit(desk.core, seq, 5, None))


def test_what_is_on_its_way_when_the_session_ends_is_not_waited_for(desk: Any, new_event: Any) -> None:
    seq, event = desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 5, event))
    event.done = True
    session, outgoing = desk.session, under_way(desk)
    desk.core.ended(session)
    desk.core.abandon(outgoing, session, Unavailable("ended"))
    desk.connect()
    with pytest.raises(Unavailable, match="ended"):
        desk.run(verbs.flush(desk.core, desk.pool, None))
    assert not session.doubts


@pytest.mark.parametrize("asked_again", [False, True])
def test_fenced_operations_in_doubt_go_to_the_next_daemon_first(kept: Any, new_event: Any, asked_again: bool) -> None:
    seq, handed, first, second = kept.sequence(), kept.sequence(8, (3, 4)), new_event(), new_event()
    kept.run(verbs.commit(kept.core, seq, 5, first))
    kept.run(verbs.truncate(kept.core, TruncateItem(seq, 4), second))
    ticket = kept.run(verbs.handoff(kept.core, handed, 30.0, first))
    first.done = True
    in_doubt(kept)
    outgoing = under_way(kept) if asked_again else []
    kept.die()
    kept.core.abandon(outgoing, kept.session, Unavailable("ended"))
    kept.come_back()
    kept.seen.clear()
    second.done = True
    kept.run(verbs.flush(kept.core, kept.pool, None))
    assert kept.bodies == [
        Step(commit=[Commit(seq.id, 5)]),
        Handoff(handed.id, ticket, 30.0),
        Step(truncate=[Truncate(seq.id, 4)]),
    ]
    assert (seq.length, seq.committed_tokens, kept.session.doubts) == (4, 4, {})


def test_the_former_daemons_answer_to_what_goes_to_the_next_is_nothing(kept: Any, good: Any, new_event: Any) -> None:
    """Once it has been taken back, also before the next one is there: it would be carried out twice."""
    seq, event = kept.sequence(), new_event()
    kept.run(verbs.truncate(kept.core, TruncateItem(seq, 4), event))
    event.done = True
    (sent,) = in_doubt(kept)
    outgoing = under_way(kept)
    kept.die()
    kept.core.abandon(outgoing, kept.session, Unavailable("ended"))
    kept.core.receive(sent.id, good(sent), kept.session)
    assert seq.length == 8
    kept.come_back()
    kept.run(verbs.flush(kept.core, kept.pool, None))
    assert seq.length == 4


def test_a_callers_own_doubt_ends_with_the_daemon(kept: Any) -> None:
    """The caller was told; what the next daemon knows is what was claimed."""
    seq = kept.sequence(4, (0,))
    kept.answer = lambda request: None
    with pytest.raises(Timeout):
        kept.run(verbs.extend(kept.core, seq, b"", 4))
    kept.die()
    kept.answer = lambda request: None
    session = kept.session
    kept.core.rejoined(session, session.welcome)
    assert (seq.unsettled, session.doubts) == ([], {})


# -- steps --------------------------------------------------------------------------------------------------------


def test_a_steps_items_of_one_sequence_share_a_message_however_long_it_is(desk: Any, good: Any) -> None:
    """Answered in one, they cannot be heard of in another order."""
    desk.answer = good
    seqs = [desk.sequence(8, (0, 1)) for _ in range(3000)]
    free = [desk.sequence(8, (0, 1)) for _ in range(11)]
    desk.run(step(desk.core, Plan(free=free, truncate=dict.fromkeys(seqs, 6), commit=dict.fromkeys(seqs, 5))))
    first, second = desk.bodies
    assert {item.seq for item in first.truncate} == {item.seq for item in first.commit}
    assert {item.seq for item in second.truncate} == {item.seq for item in second.commit}
    assert (len(first.free), len(second.free)) == (11, 0)
    assert len(first.commit) + len(second.commit) == 3000
