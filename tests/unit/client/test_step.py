"""pool.step: what goes into which message, and what comes back for each item."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv.client import verbs
from radixkv.client.batch import TruncateItem
from radixkv.client.step import Plan, step
from radixkv.client.tokens import pack
from radixkv.commands import Commit, Extend, Failure, Free, Share, Step, Stepped, Truncate, Truncated
from radixkv.errors import BadRequest, SessionLost, StaleHandle, Timeout


def test_one_message_for_all_and_a_result_like_the_arguments(desk: Any, good: Any) -> None:
    desk.answer = good
    a, b, c, d, e = (desk.sequence(8, (0, 1), committed_tokens=4) for _ in range(5))
    plan = Plan(free=[a], truncate={b: 4}, commit={c: 8}, extend={d: [7], e: ([], 4)}, share={c: (None, 2)})
    result = desk.run(step(desk.core, plan))
    (body,) = desk.bodies
    assert body == Step(
        free=[Free(a.id)],
        truncate=[Truncate(b.id, 4)],
        commit=[Commit(c.id, 8)],
        extend=[Extend(d.id, np.array([7], np.uint32).tobytes(), 0), Extend(e.id, b"", 4)],
        share=[Share(c.id, None, 2, body.share[0].first_child)],
    )
    assert (result.free, result.truncate, result.commit) == ([None], {b: None}, {c: None})
    assert result.extend == {d: None, e: None}
    assert [child.length for child in result.share[c]] == [4, 4]
    assert result["share"] is result.share
    assert result.errors == []
    assert (c.committed_tokens, d.length, b.length) == (8, 9, 4)


def test_a_failed_item_stops_nobody(desk: Any) -> None:
    desk.answer = lambda request: Stepped(
        commit=[Failure("bad_request", "over length"), None], extend=[Failure("out_of_pages", "full")]
    )
    a, b, c = (desk.sequence() for _ in range(3))
    result = desk.run(step(desk.core, Plan(commit={a: 99, b: 4}, extend={c: [1]})))
    assert isinstance(result.commit[a], BadRequest)
    assert result.commit[b] is None
    assert result.extend[c].code == "out_of_pages"
    assert result.errors == [result.commit[a], result.extend[c]]
    assert (a.committed_tokens, b.committed_tokens, c.length) == (0, 4, 8)


def test_what_can_never_be_right_fails_alone(desk: Any, good: Any) -> None:
    desk.answer = good
    a, b, c, d, ok = (desk.sequence() for _ in range(5))
    plan = Plan(commit={a: -1, ok: 4}, extend={b: [-1], c: ([1], -1)}, share={d: 3})
    result = desk.run(step(desk.core, plan))
    assert desk.bodies == [Step(commit=[Commit(ok.id, 4)])]
    failed = [result.commit[a], result.extend[b], result.extend[c], result.share[d]]
    assert all(isinstance(value, BadRequest) for value in failed)


def test_tuples_of_ints_are_tokens_and_pairs_are_tokens_with_headroom(desk: Any, good: Any) -> None:
    desk.answer = good
    a, b, c = (desk.sequence() for _ in range(3))
    pair = (np.array([5, 7], np.uint32), 3)
    desk.run(step(desk.core, Plan(extend={a: (5, 7), b: (np.uint32(5), np.uint32(7)), c: pair})))
    (body,) = desk.bodies
    packed = np.array([5, 7], np.uint32).tobytes()
    assert body.extend == [Extend(a.id, packed, 0), Extend(b.id, packed, 0), Extend(c.id, packed, 3)]


def test_the_free_of_a_sequence_with_other_items_comes_last(desk: Any, good: Any) -> None:
    desk.answer = good
    a, b = desk.sequence(), desk.sequence()
    result = desk.run(step(desk.core, Plan(free=[a, b], commit={a: 8})))
    assert desk.bodies == [Step(free=[Free(b.id)], commit=[Commit(a.id, 8)]), Step(free=[Free(a.id)])]
    assert result.free == [None, None]


def test_closed_sequences(desk: Any, good: Any) -> None:
    desk.answer = good
    seq = desk.sequence()
    desk.run(verbs.free(desk.core, seq, None))
    desk.bodies.clear()
    result = desk.run(step(desk.core, Plan(free=[seq], commit={seq: 1}, extend={seq: [1]})))
    assert result.free == [None]
    assert isinstance(result.commit[seq], StaleHandle)
    assert isinstance(result.extend[seq], StaleHandle)
    assert desk.bodies == []


def test_fenced_items_go_out_later(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    a, b, c, event = desk.sequence(), desk.sequence(), desk.sequence(), new_event()
    result = desk.run(
        step(desk.core, Plan(free=[(c, event)], commit={a: (4, event), b: (4, new_event(done=True))}, extend={a: [1]}))
    )
    assert desk.bodies == [Step(commit=[Commit(b.id, 4)], extend=[Extend(a.id, np.array([1], np.uint32).tobytes(), 0)])]
    assert (result.commit, result.free, c.closed) == ({a: None, b: None}, [None], True)
    event.done = True
    desk.ship()
    assert desk.bodies == [Step(free=[Free(c.id)], commit=[Commit(a.id, 4)])]


def test_items_queue_behind_what_their_sequence_has_pending(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, event = desk.sequence(), new_event()
    result = desk.run(step(desk.core, Plan(free=[seq], truncate={seq: (8, event)}, commit={seq: 4})))
    assert (desk.bodies, result.errors) == ([], [])
    event.done = True
    desk.ship()
    assert desk.bodies == [Step(truncate=[Truncate(seq.id, 8)], commit=[Commit(seq.id, 4)]), Step(free=[Free(seq.id)])]


@pytest.mark.parametrize("others", [False, True])
def test_an_extend_waits_for_the_same_steps_truncate(desk: Any, new_event: Any, good: Any, others: bool) -> None:
    """Else what it brings would be cut off again by what was asked for before it."""
    desk.answer = good
    seq, written, cut, after = desk.sequence(), new_event(), new_event(), new_event()
    if others:
        desk.run(verbs.commit(desk.core, seq, 4, written))
    plan = Plan(truncate={seq: (4, cut)}, commit={seq: (4, after)}, extend={seq: [7]})
    result = desk.run(step(desk.core, plan))
    assert (result.errors, seq.length, seq.page_table.tolist()) == ([], 5, [0, 9])
    assert (written.waited, cut.waited, after.waited) == (int(others), 1, 0)
    assert desk.bodies[int(others) :] == [Step(truncate=[Truncate(seq.id, 4)], extend=[Extend(seq.id, pack([7]))])]


def test_a_share_waits_for_the_same_steps_truncate(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, cut = desk.sequence(8, (0, 1, 2), committed_tokens=8), new_event()
    desk.run(step(desk.core, Plan(truncate={seq: (4, cut)}, share={seq: (None, 1)})))
    (body,) = desk.bodies
    assert (len(body.truncate), len(body.share), cut.waited) == (1, 1, 1)


def test_an_extend_whose_truncate_waits_hears_of_what_failed_before(desk: Any, new_event: Any) -> None:
    """It is not carried out then; the truncate is, when its event is done."""
    seq, written, cut = desk.sequence(), new_event(), new_event()
    desk.run(verbs.commit(desk.core, seq, 99, written))
    desk.answer = lambda request: Stepped(
        commit=[Failure("bad_request", "over length")] * len(request.body.commit),
        truncate=[Truncated(1)] * len(request.body.truncate),
    )
    result = desk.run(step(desk.core, Plan(truncate={seq: (4, cut)}, extend={seq: [7]})))
    assert isinstance(result.extend[seq], BadRequest)
    assert (result.truncate[seq], seq.length) == (None, 8)
    cut.done = True
    desk.ship()
    assert [len(body.extend) for body in desk.bodies] == [0, 0]
    assert seq.length == 4


def test_an_extend_waits_for_a_pending_truncate(desk: Any, new_event: Any, good: Any) -> None:
    desk.answer = good
    seq, other, cut = desk.sequence(8, (0, 1)), desk.sequence(), new_event()
    desk.run(verbs.truncate(desk.core, TruncateItem(seq, 4), cut))
    result = desk.run(step(desk.core, Plan(commit={other: 4}, extend={seq: [7]})))
    assert (result.errors, cut.waited) == ([], 1)
    first, second = desk.bodies
    assert first == Step(truncate=[Truncate(seq.id, 4)])
    assert ([item.seq for item in second.commit], [item.seq for item in second.extend]) == ([other.id], [seq.id])
    assert seq.tokens.tolist() == [0, 1, 2, 3, 7]


def test_a_deferred_error_is_the_result_of_the_sequences_next_item(desk: Any, new_event: Any, good: Any) -> None:
    seq, other, event = desk.sequence(), desk.sequence(), new_event()
    desk.run(verbs.commit(desk.core, seq, 99, event))
    event.done = True
    desk.answer = lambda request: Stepped(commit=[Failure("bad_request", "over length")])
    desk.ship()
    desk.answer = good
    desk.bodies.clear()
    result = desk.run(step(desk.core, Plan(free=[seq], commit={seq: 4, other: 4})))
    assert isinstance(result.commit[seq], BadRequest)
    assert isinstance(result.free[0], BadRequest)
    assert desk.bodies[-1] == Step(free=[Free(seq.id)], commit=[Commit(other.id, 4)])


def test_sequences_of_another_client_or_session(desk: Any, good: Any) -> None:
    other_desk = type(desk)()
    foreign, old = other_desk.sequence(), desk.sequence()
    desk.core.ended(desk.session)
    desk.connect()
    desk.answer = good
    result = desk.run(step(desk.core, Plan(free=[foreign], commit={foreign: 1, old: 1})))
    assert isinstance(result.commit[foreign], BadRequest)
    assert isinstance(result.free[0], BadRequest)
    assert isinstance(result.commit[old], SessionLost)
    assert desk.bodies == []
    foreign.closed = True


def test_it_raises_when_the_whole_message_failed(desk: Any) -> None:
    seq = desk.sequence()
    desk.answer = lambda request: Failure("limit_exceeded", "too many items")
    with pytest.raises(Exception, match="too many items"):
        desk.run(step(desk.core, Plan(commit={seq: 4})))
    desk.answer = lambda request: None
    with pytest.raises(Timeout):
        desk.run(step(desk.core, Plan(commit={seq: 4})))


def test_only_sequences_can_be_named(desk: Any) -> None:
    with pytest.raises(BadRequest):
        desk.run(step(desk.core, Plan(free=[17])))


def test_nothing_to_do_sends_nothing(desk: Any) -> None:
    result = desk.run(step(desk.core, Plan()))
    assert (result.free, result.extend, desk.bodies) == ([], {}, [])


def test_each_sequence_is_locked_once(desk: Any) -> None:
    a, b = desk.sequence(), desk.sequence()
    plan = Plan(free=[b, (a, None)], commit={b: 1}, extend={a: [1]})
    assert plan.sequences() == [a, b]
