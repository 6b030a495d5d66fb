"""Verbs against silence, late replies, repeats and lost sessions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv.client import asking, verbs
from radixkv.client.batch import ShareItem, TruncateItem
from radixkv.client.namespace import Namespace
from radixkv.client.step import Plan, step
from radixkv.client.verbs import Want
from radixkv.commands import (
    COPY_WAIT_S,
    Cancel,
    Commit,
    Done,
    Failure,
    Free,
    Loaded,
    LookedUp,
    Prefetch,
    Reserve,
    Reserved,
    Shared,
    Step,
    Stepped,
    Truncated,
)
from radixkv.errors import BadRequest, OutOfPages, SessionLost, StaleHandle, Timeout, Unavailable, VersionMismatch

TOKENS = np.arange(6, dtype=np.uint32).tobytes()
LOST = Failure("session_lost", "unknown session")


def want(wait_s: float = 0.0) -> Want:
    return Want(Namespace("m"), TOKENS, 2, "copy", wait_s, True)


def test_reserve(desk: Any, good: Any) -> None:
    desk.answer = good
    seq = desk.run(verbs.reserve(desk.core, desk.pool, want()))
    assert desk.bodies == [Reserve("p", seq.id, Namespace("m").canonical, TOKENS, 2, "copy", 0.0)]
    assert (seq.length, seq.capacity_tokens, seq.closed) == (6, 8, False)


def test_requests_carry_session_increasing_ids_and_a_deadline(desk: Any, good: Any) -> None:
    desk.answer = good
    desk.run(verbs.reserve(desk.core, desk.pool, want()))
    desk.run(verbs.reserve(desk.core, desk.pool, want(wait_s=10.0)))
    first, second = desk.seen
    assert (first.session, first.epoch) == (desk.session.id, 1)
    assert second.id > first.id
    assert (first.deadline, second.deadline) == (desk.now + 5.0, desk.now + 15.0)


def test_a_refused_reserve_leaves_nothing_behind(desk: Any) -> None:
    desk.answer = lambda request: Failure("out_of_pages", "full", {"need": 2, "available": 1})
    with pytest.raises(OutOfPages) as caught:
        desk.run(verbs.reserve(desk.core, desk.pool, want()))
    assert (caught.value.need, caught.value.available) == (2, 1)
    desk.bodies.clear()
    desk.ship()
    assert desk.bodies == []


def test_a_reserve_without_reply_is_freed_with_the_next_message(desk: Any, good: Any) -> None:
    with pytest.raises(Timeout):
        desk.run(verbs.reserve(desk.core, desk.pool, want()))
    (body,) = desk.bodies
    desk.answer = good
    desk.ship()
    assert desk.bodies == [Step(free=[Free(body.seq)])]


def test_a_waiting_reserve_is_cancelled_too(desk: Any, good: Any) -> None:
    with pytest.raises(Timeout):
        desk.run(verbs.reserve(desk.core, desk.pool, want(wait_s=60.0)))
    (request,) = desk.seen
    desk.seen.clear()
    desk.answer = good
    desk.ship()
    assert desk.bodies == [Cancel(request.id), Step(free=[Free(request.body.seq)])]


def test_copies_have_their_time_besides(desk: Any, good: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reserve in a pool with a host tier is not given up while the daemon still copies for it."""
    monkeypatch.setattr(desk.pool.current, "host_pages", 8, raising=False)
    desk.answer = good
    desk.run(verbs.reserve(desk.core, desk.pool, want()))
    desk.run(verbs.reserve(desk.core, desk.pool, want(wait_s=10.0)))
    assert [request.deadline - desk.now for request in desk.seen] == [5.0 + COPY_WAIT_S, 15.0 + COPY_WAIT_S]
    assert [request.body.wait_s for request in desk.seen] == [0.0, 10.0]


@pytest.mark.parametrize(
    ("host_pages", "timeout", "limit"), [(0, None, 5.0), (8, None, 5.0 + COPY_WAIT_S), (8, 2.0, 2.0)]
)
def test_prefetch(
    desk: Any, monkeypatch: pytest.MonkeyPatch, host_pages: int, timeout: float | None, limit: float
) -> None:
    monkeypatch.setattr(desk.pool.current, "host_pages", host_pages, raising=False)
    desk.answer = lambda request: LookedUp([4], [8])
    found = desk.run(verbs.prefetch(desk.core, desk.pool, Namespace("m"), TOKENS, timeout))
    assert (found.device_tokens, found.host_tokens) == (4, 8)
    assert desk.seen[0].deadline == desk.now + limit
    assert desk.bodies == [Prefetch("p", Namespace("m").canonical, TOKENS)]


def test_an_interrupted_reserve_is_freed_only_when_it_cannot_be_executed_any_more(desk: Any, good: Any) -> None:
    verb = verbs.reserve(desk.core, desk.pool, want(wait_s=60.0))
    next(verb)
    ask = verb.send(desk.session)
    (out,) = desk.core.envelop(ask, desk.now + 65.0, desk.epoch)
    with pytest.raises(KeyboardInterrupt):
        verb.throw(KeyboardInterrupt())
    desk.answer = good
    desk.ship()
    assert desk.bodies == [Cancel(out.request.id)]
    desk.now = out.request.deadline
    desk.ship()
    assert desk.bodies == [Step(free=[Free(out.request.body.seq)])]


def test_a_late_grant_to_an_interrupted_reserve_is_freed_at_once(desk: Any, good: Any) -> None:
    verb = verbs.reserve(desk.core, desk.pool, want())
    next(verb)
    (out,) = desk.core.envelop(verb.send(desk.session), desk.now + 5.0, desk.epoch)
    with pytest.raises(KeyboardInterrupt):
        verb.throw(KeyboardInterrupt())
    desk.answer = good
    desk.ship()
    assert desk.bodies == []
    desk.core.receive(out.request.id, good(out.request), desk.session)
    assert desk.core.outbox.pressing
    desk.ship()
    assert desk.bodies == [Step(free=[Free(out.request.body.seq)])]
    assert not desk.core.outbox.pressing
    desk.now = out.request.deadline
    desk.ship()
    assert desk.bodies == []


def test_late_children_of_an_interrupted_share_are_freed_at_once(desk: Any, good: Any) -> None:
    seq = desk.sequence(4, (0,), committed_tokens=4)
    verb = verbs.share(desk.core, ShareItem(seq, 4, 2))
    next(verb)
    outgoing = desk.core.envelop(verb.send(desk.session), desk.now + 5.0, desk.epoch)
    desk.core.abandon(outgoing, desk.session, Timeout("interrupted"))
    with pytest.raises(KeyboardInterrupt):
        verb.throw(KeyboardInterrupt())
    desk.core.receive(outgoing[0].request.id, good(outgoing[0].request), desk.session)
    desk.answer = good
    desk.ship()
    first = outgoing[0].request.body.share[0].first_child
    assert desk.bodies == [Step(free=[Free(first), Free(first + 1)])]
    assert desk.pool.held == [seq]


def test_children_of_a_share_that_is_interrupted_after_its_answer_are_freed(desk: Any, good: Any) -> None:
    seq = desk.sequence(4, (0,), committed_tokens=4)
    verb = verbs.share(desk.core, ShareItem(seq, 4, 2))
    next(verb)
    (out,) = desk.core.envelop(verb.send(desk.session), desk.now + 5.0, desk.epoch)
    desk.core.receive(out.request.id, good(out.request), desk.session)
    with pytest.raises(KeyboardInterrupt):
        verb.throw(KeyboardInterrupt())
    children = desk.pool.held[1:]
    assert [(child.closed, child in desk.session.sequences) for child in children] == [(True, False)] * 2
    desk.answer = good
    desk.ship()
    assert desk.bodies == [Step(free=[Free(child.id) for child in children])]


def test_a_late_reply_is_dropped(desk: Any, good: Any) -> None:
    with pytest.raises(Timeout):
        desk.run(verbs.reserve(desk.core, desk.pool, want()))
    (request,) = desk.seen
    desk.core.receive(request.id, Reserved(np.arange(2, dtype=np.int32).tobytes(), 0, 0), desk.session)
    desk.core.receive(12345, Done(), desk.session)
    desk.answer = good
    desk.seen.clear()
    desk.ship()
    assert [len(body.free) for body in desk.bodies] == [1]


def test_an_extend_without_reply_is_asked_about_before_the_next_verb(desk: Any, good: Any) -> None:
    """It may have been executed: then the pages it brought are ours, and the next ones come behind them."""
    seq = desk.sequence(4, (0,))
    with pytest.raises(Timeout):
        desk.run(verbs.extend(desk.core, seq, TOKENS, 0))
    assert (seq.length, seq.page_table.tolist()) == (4, [0])
    (first,) = desk.seen
    desk.seen.clear()
    desk.answer = good
    desk.run(verbs.commit(desk.core, seq, 4, None))
    assert desk.seen[0] == first
    assert (seq.length, seq.page_table.tolist()) == (10, [0, 9])


def test_one_that_was_not_executed_changes_nothing(desk: Any, good: Any) -> None:
    seq = desk.sequence(4, (0,))
    with pytest.raises(Timeout):
        desk.run(verbs.extend(desk.core, seq, TOKENS, 0))
    (first,) = desk.seen

    def answer(request: Any) -> Any:
        return Failure("timeout", "not executed") if request.id == first.id else good(request)

    desk.answer = answer
    desk.run(verbs.commit(desk.core, seq, 4, None))
    assert (seq.length, seq.page_table.tolist(), seq.committed_tokens) == (4, [0], 4)


def test_one_that_nobody_remembers_ends_the_sequence(desk: Any, good: Any) -> None:
    seq = desk.sequence(4, (0,))
    with pytest.raises(Timeout):
        desk.run(verbs.extend(desk.core, seq, TOKENS, 0))
    (first,) = desk.seen

    def answer(request: Any) -> Any:
        return Failure("bad_request", "too old") if request.id == first.id else good(request)

    desk.answer = answer
    with pytest.raises(StaleHandle):
        desk.run(verbs.commit(desk.core, seq, 4, None))
    desk.run(verbs.free(desk.core, seq, None))
    assert desk.bodies[-1] == Step(free=[Free(seq.id)])


def test_a_late_reply_settles_the_doubt(desk: Any, good: Any) -> None:
    seq = desk.sequence(4, (0,))
    with pytest.raises(Timeout):
        desk.run(verbs.extend(desk.core, seq, TOKENS, 0))
    (first,) = desk.seen
    desk.seen.clear()
    desk.core.receive(first.id, good(first), desk.session)
    assert (seq.length, seq.page_table.tolist()) == (10, [0, 9])
    desk.answer = good
    desk.run(verbs.commit(desk.core, seq, 4, None))
    assert desk.bodies == [Step(commit=[Commit(seq.id, 4)])]


def test_a_free_without_reply_is_sent_again(desk: Any, good: Any) -> None:
    seq = desk.sequence()
    with pytest.raises(Timeout):
        desk.run(verbs.free(desk.core, seq, None))
    desk.answer = good
    desk.ship()
    assert desk.bodies == [Step(free=[Free(seq.id)])] * 2


def test_a_free_can_commit(desk: Any, good: Any) -> None:
    desk.answer = good
    seq = desk.sequence(4, (0,))
    desk.run(verbs.free(desk.core, seq, None, 4))
    assert desk.bodies == [Step(free=[Free(seq.id, 4)])]
    other = desk.sequence(4, (1,))
    with pytest.raises(BadRequest):
        desk.run(verbs.free(desk.core, other, None, -1))
    assert not other.closed, "nothing was sent"
    desk.answer = lambda request: Stepped(free=[Failure("bad_request", "more than there are")])
    with pytest.raises(BadRequest):
        desk.run(verbs.free(desk.core, other, None, 9))
    assert other.closed


def test_children_of_a_share_without_reply_are_freed(desk: Any, good: Any) -> None:
    seq = desk.sequence(8, (0, 1, 2), committed_tokens=4)
    with pytest.raises(Timeout):
        desk.run(verbs.share(desk.core, ShareItem(seq, None, 3)))
    (request,) = desk.seen
    first = request.body.share[0].first_child
    desk.seen.clear()
    desk.core.receive(request.id, Stepped(share=[Shared(4, 1)]), desk.session)
    desk.answer = good
    desk.ship()
    assert desk.bodies == [Step(free=[Free(first), Free(first + 1), Free(first + 2)])]


def test_ids_of_children_are_nobody_elses(desk: Any, good: Any) -> None:
    desk.answer = good
    seq = desk.sequence(8, (0, 1, 2), committed_tokens=4)
    children = desk.run(verbs.share(desk.core, ShareItem(seq, None, 3)))
    later = desk.run(verbs.reserve(desk.core, desk.pool, want()))
    ids = [seq.id, *(child.id for child in children), later.id]
    assert len(set(ids)) == 5


def test_use_after_free(desk: Any, good: Any) -> None:
    desk.answer = good
    seq = desk.sequence()
    desk.run(verbs.free(desk.core, seq, None))
    desk.bodies.clear()
    desk.run(verbs.free(desk.core, seq, None))
    for verb in (
        verbs.commit(desk.core, seq, 4, None),
        verbs.extend(desk.core, seq, b"", 1),
        verbs.share(desk.core, ShareItem(seq, None, 1)),
        verbs.compact(desk.core, seq),
        verbs.handoff(desk.core, seq, 1.0, None),
        verbs.copied(desk.core, seq, None),
    ):
        with pytest.raises(StaleHandle):
            desk.run(verb)
    assert desk.bodies == []
    assert not seq.intact()


def test_a_lost_session_is_noticed_at_the_next_call(desk: Any) -> None:
    seq = desk.sequence()
    desk.answer = lambda request: LOST
    with pytest.raises(SessionLost):
        desk.run(verbs.commit(desk.core, seq, 4, None))
    assert desk.core.session is None
    with pytest.raises(SessionLost):
        desk.run(verbs.commit(desk.core, seq, 4, None)) if desk.connect() else None


AFTER_WHICH_A_FREE_DOES_NOTHING = {
    "commit": lambda desk, seq: verbs.commit(desk.core, seq, 4, None),
    "truncate": lambda desk, seq: verbs.truncate(desk.core, TruncateItem(seq, 4), None),
    "extend": lambda desk, seq: verbs.extend(desk.core, seq, b"", 4),
    "share": lambda desk, seq: verbs.share(desk.core, ShareItem(seq, 0, 1)),
    "compact": lambda desk, seq: verbs.compact(desk.core, seq),
    "copied": lambda desk, seq: verbs.copied(desk.core, seq, None),
    "handoff": lambda desk, seq: verbs.handoff(desk.core, seq, 1.0, None),
    "free": lambda desk, seq: verbs.free(desk.core, seq, None),
    "wait_loaded": lambda desk, seq: asking.wait_loaded(desk.core, seq, None, None),
    "step": lambda desk, seq: step(desk.core, Plan(commit={seq: 4})),
}


@pytest.mark.parametrize("again", [False, True], ids=["no daemon", "another session"])
@pytest.mark.parametrize("noticed", [False, True], ids=["by the answer", "before"])
@pytest.mark.parametrize("first", AFTER_WHICH_A_FREE_DOES_NOTHING)
def test_after_session_lost_a_free_does_nothing(desk: Any, first: str, noticed: bool, again: bool) -> None:
    """Whichever call was told."""
    seq = desk.sequence()
    if first == "wait_loaded":
        seq.arriving = Loaded(0, (0, 1))
    desk.answer = lambda request: LOST
    if noticed:
        desk.core.ended(desk.session)
        desk.connect()
    call = AFTER_WHICH_A_FREE_DOES_NOTHING[first](desk, seq)
    if noticed and first == "step":
        assert isinstance(desk.run(call).commit[seq], SessionLost)
    else:
        with pytest.raises(SessionLost):
            desk.run(call)
    if again and desk.core.session is None:
        desk.connect()
    desk.bodies.clear()
    desk.run(verbs.free(desk.core, seq, None))
    assert (seq.closed, desk.bodies) == (True, [])


def test_after_session_lost_from_one_of_several_in_a_step_a_free_does_nothing(desk: Any, good: Any) -> None:
    old = desk.sequence()
    desk.core.ended(desk.session)
    desk.connect()
    new = desk.sequence()
    desk.answer = good
    result = desk.run(step(desk.core, Plan(commit={old: 4, new: 4})))
    assert (type(result.commit[old]), result.commit[new]) == (SessionLost, None)
    desk.run(verbs.free(desk.core, old, None))


@pytest.mark.parametrize("number", [-1, -(2**63), 2**63])
def test_a_number_that_is_refused_is_said_as_it_was_given(desk: Any, number: int) -> None:
    with pytest.raises(BadRequest, match=f"value={number}\\)") as caught:
        desk.run(verbs.extend(desk.core, desk.sequence(), b"", number))
    assert type(caught.value.value) is int


def test_of_a_huge_number_only_its_size_is_said(desk: Any) -> None:
    with pytest.raises(BadRequest, match="bits=20001"):
        desk.run(verbs.extend(desk.core, desk.sequence(), b"", -(2**20000)))


def test_old_sequences_are_lost_with_their_session(desk: Any, good: Any) -> None:
    old = desk.sequence()
    desk.core.ended(desk.session)
    desk.connect()
    desk.answer = good
    with pytest.raises(SessionLost):
        desk.run(verbs.extend(desk.core, old, b"", 1))
    with pytest.raises(SessionLost):
        desk.run(verbs.commit(desk.core, old, 1, None))
    assert desk.bodies == []
    assert desk.run(verbs.reserve(desk.core, desk.pool, want())).length == 6


def test_reserve_and_lookup_go_on_in_the_next_session(desk: Any, good: Any) -> None:
    """Nothing was executed, and they depend on no session."""
    old = desk.session

    def answer(request: Any) -> Any:
        if request.session == old.id:
            desk.core.ended(old)
            desk.connect()
            return LOST
        return good(request) if isinstance(request.body, Reserve) else LookedUp([4], [0])

    desk.answer = answer
    assert desk.run(verbs.reserve(desk.core, desk.pool, want())).session is desk.session
    (found,) = desk.run(verbs.lookup(desk.pool, Namespace("m"), [TOKENS]))
    assert (found.device_tokens, found.host_tokens) == (4, 0)


def test_a_daemon_that_ends_every_session(desk: Any) -> None:
    def answer(request: Any) -> Any:
        desk.core.ended(desk.session)
        desk.connect()
        return LOST

    desk.answer = answer
    with pytest.raises(SessionLost):
        desk.run(verbs.reserve(desk.core, desk.pool, want()))


def test_no_daemon(desk: Any) -> None:
    seq = desk.sequence()
    desk.core.ended(desk.session)
    for verb in (verbs.reserve(desk.core, desk.pool, want()), verbs.commit(desk.core, seq, 1, None)):
        with pytest.raises((Unavailable, SessionLost)):
            desk.run(verb)


def test_an_answer_to_another_question(desk: Any) -> None:
    desk.answer = lambda request: Done()
    with pytest.raises(VersionMismatch):
        desk.run(verbs.reserve(desk.core, desk.pool, want()))


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 86401, "1", None, True])
def test_times_are_seconds_up_to_a_day(value: Any) -> None:
    with pytest.raises(BadRequest):
        asking.seconds("timeout", value)


@pytest.mark.parametrize("ticket", [b"short", b"x" * 17, "x" * 16, None])
def test_tickets_are_16_bytes(desk: Any, ticket: Any) -> None:
    with pytest.raises(BadRequest):
        desk.run(verbs.adopt(desk.core, desk.pool, ticket, True))


def test_a_reserve_says_how_fast_the_worker_computes(desk: Any, good: Any) -> None:
    desk.pool.prefill_tokens_per_s = 8000
    for wrong in (-1, float("inf"), float("nan"), True, "fast"):
        with pytest.raises(BadRequest):
            desk.pool.prefill_tokens_per_s = wrong
    desk.answer = good
    desk.run(verbs.reserve(desk.core, desk.pool, want()))
    assert desk.bodies[0].prefill_tokens_per_s == 8000.0


def test_rows_of_a_truncate_are_not_copied_once_the_sequence_is_given_up(desk: Any, good: Any) -> None:
    """Both went out together: by the time that the answers are read the target may be another sequence's."""
    desk.answer = good
    seq = desk.run(verbs.reserve(desk.core, desk.pool, want()))
    copied: list[Any] = []
    seq.memory.copy_rows = lambda rows: copied.extend(rows) or True
    reply = Truncated(1, np.int32(9).tobytes(), [(int(seq.page_table[0]), 9, 1)])
    seq.closed = True
    seq.truncated_to(1, reply, copy=True)
    assert copied == []
    seq.closed = False
    seq.truncated_to(1, reply, copy=True)
    assert copied == reply.copy_rows


def test_of_two_truncates_on_their_way_the_last_one_copies(desk: Any, good: Any) -> None:
    """The daemon has carried out both when the first answer is read: what the second gave up may be another's."""
    desk.answer = good
    seq = desk.run(verbs.reserve(desk.core, desk.pool, want()))
    source = int(seq.page_table[0])
    first, second = TruncateItem(seq, 1), TruncateItem(seq, 1)
    flying = desk.core.outbox._flying
    flying[seq] = [first, second]
    first.apply(Truncated(1, np.int32(9).tobytes(), [(source, 9, 1)]))
    assert (seq.memory.copied, seq.copy_rows) == ([], [(source, 9, 1)])
    flying[seq] = [second]
    second.apply(Truncated(1))
    assert (seq.memory.copied, seq.copy_rows) == ([(source, 9, 1)], [])
    del flying[seq]
