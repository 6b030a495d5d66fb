"""The session goes on with the next daemon: every order of a reply, the daemon's death, rejoin and the claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixkv.client import verbs
from radixkv.client.batch import ShareItem, TruncateItem
from radixkv.client.core import Away
from radixkv.client.effects import Ask, NeedSession
from radixkv.client.namespace import Namespace
from radixkv.client.step import Plan, step
from radixkv.client.verbs import Want
from radixkv.commands import (
    Claim,
    Commit,
    Extend,
    Failure,
    Free,
    Heartbeat,
    Kept,
    LookedUp,
    Lookup,
    Reserve,
    Reserved,
    Resume,
    Resumed,
    Shared,
    Step,
    Stepped,
    Truncate,
    Truncated,
)
from radixkv.errors import BadRequest, SessionLost, StaleHandle, Timeout, Unavailable

TOKENS = np.arange(6, dtype=np.uint32).tobytes()
FOUR = {"committed_tokens": 4, "cached_tokens": 4, "writable_from_tokens": 4}
LOST = Failure("session_lost", "unknown session")


def want(wait_s: float = 0.0) -> Want:
    return Want(Namespace("m"), TOKENS, 2, "copy", wait_s, True)


def packed(*pages: int) -> bytes:
    return np.array(pages, np.int32).tobytes()


class Call:
    """A verb of a thread that is stopped when its request has left."""

    def __init__(self, desk: Any, verb: Any) -> None:
        self.desk, self.verb, self.session = desk, verb, desk.session
        self.effect = next(verb)
        while not (isinstance(self.effect, Ask) and self.effect.parts):
            self.effect = verb.send(desk._carry_out(self.effect))
        self.out = desk.core.envelop(self.effect, desk.now + 5.0, desk.epoch)

    def receive(self, answer: Callable[[Any], Any]) -> None:
        for out in self.out:
            self.desk.core.receive(out.request.id, answer(out.request), self.session)

    def go_on(self) -> Any:
        """The thread runs on, as it does when the connection has ended."""
        try:
            if all(out.reply is not None for out in self.out):
                effect = self.verb.send(self.effect.answers())
            else:
                self.desk.core.abandon(self.out, self.session, Unavailable("ended"))
                effect = self.verb.throw(Away("ended"))
        except StopIteration as end:
            return end.value
        return self.desk.run(_begun(self.verb, effect))


def _begun(verb: Any, effect: Any) -> Any:
    """The rest of a generator whose next effect is known already."""
    while True:
        try:
            answer = yield effect
        except Exception as error:  # noqa: BLE001 - for the verb to judge
            step_on, given = verb.throw, error
        else:
            step_on, given = verb.send, answer
        try:
            effect = step_on(given)
        except StopIteration as end:
            return end.value


VERBS: dict[str, Any] = {
    "reserve": lambda desk, seq: verbs.reserve(desk.core, desk.pool, want()),
    "adopt": lambda desk, seq: verbs.adopt(desk.core, desk.pool, b"t" * 16, True),
    "extend": lambda desk, seq: verbs.extend(desk.core, seq, TOKENS, 0),
    "commit": lambda desk, seq: verbs.commit(desk.core, seq, 8, None),
    "truncate": lambda desk, seq: verbs.truncate(desk.core, TruncateItem(seq, 6), None),
    "share": lambda desk, seq: verbs.share(desk.core, ShareItem(seq, None, 2)),
    "compact": lambda desk, seq: verbs.compact(desk.core, seq),
    "handoff": lambda desk, seq: verbs.handoff(desk.core, seq, 30.0, None),
    "free": lambda desk, seq: verbs.free(desk.core, seq, None),
    "copied": lambda desk, seq: verbs.copied(desk.core, seq, None),
    "step": lambda desk, seq: step(desk.core, Plan(commit={seq: 8}, extend={seq: [1, 2]}, share={seq: (4, 1)})),
}
WAITING = [verb for verb in VERBS if verb != "free"]


def known(desk: Any) -> dict[int, Any]:
    """All that the client believes: facts and tokens of its sequences, and which of them the daemon holds."""
    held = {seq.id for seq in desk.session.sequences}
    return {
        seq.id: (seq.facts[0].tolist(), *seq.facts[2:], seq.packed_tokens(), seq.id in held) for seq in desk.pool.held
    }


def claims_of(desk: Any) -> dict[int, Claim]:
    return {claim.seq: claim for body in desk.bodies if isinstance(body, Resume) for claim in body.claims}


# -- every order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_a_reply_before_the_rejoin_counts_and_is_claimed(kept: Any, good: Any, verb: str) -> None:
    seq = kept.sequence(8, (0, 1, 2), **FOUR)
    call = Call(kept, VERBS[verb](kept, seq))
    kept.die()
    call.receive(good)
    before = known(kept)
    kept.come_back()
    assert known(kept) == before
    claimed = claims_of(kept)
    assert {seq: claim.page_table for seq, claim in claimed.items()} == {
        seq: packed(*facts[0]) for seq, facts in before.items() if facts[-1]
    }
    call.go_on()
    assert kept.bodies == [], "nothing is asked twice"
    assert known(kept) == before


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("verb", VERBS)
def test_a_reply_after_the_rejoin_is_nothing_and_the_request_is_sent_again(
    kept: Any, good: Any, verb: str, place: int
) -> None:
    """Wherever in the resume it comes. With a new id and the new epoch, and only when all has been claimed."""
    seq = kept.sequence(8, (0, 1, 2), **FOUR)
    before = known(kept)
    call = Call(kept, VERBS[verb](kept, seq))
    kept.die()
    for i, _ in enumerate(kept.coming_back()):
        if i == place:
            call.receive(good)
        assert known(kept) == before, "from the rejoin on nothing changes but by the next daemon's answers"
    if place == 2:
        call.receive(good)
    assert known(kept) == before
    assert list(claims_of(kept)) == [seq.id]
    call.go_on()
    if verb == "free":
        kept.ship()  # with the next message
    (again,) = kept.seen
    assert (again.session, again.epoch, again.body) == (call.session.id, 2, call.out[0].request.body)
    assert again.id > call.out[0].request.id
    assert known(kept) != before or verb == "copied"


@pytest.mark.parametrize("verb", WAITING)
def test_a_thread_that_gives_up_before_the_rejoin_sends_again_after_it(kept: Any, good: Any, verb: str) -> None:
    seq = kept.sequence(8, (0, 1, 2), **FOUR)
    call = Call(kept, VERBS[verb](kept, seq))
    kept.die()
    kept.while_away = kept.come_back
    call.go_on()
    first, last, again = kept.seen
    assert ([claim.seq for claim in first.body.claims], first.body.last) == ([seq.id], False)
    assert last.body == Resume([], True)
    assert again.body == call.out[0].request.body


@pytest.mark.parametrize("verb", WAITING)
def test_no_daemon_in_time_is_unavailable_and_the_sequence_works_later(kept: Any, good: Any, verb: str) -> None:
    seq = kept.sequence(8, (0, 1, 2), **FOUR)
    before = known(kept)
    call = Call(kept, VERBS[verb](kept, seq))
    kept.die()
    with pytest.raises(Unavailable):
        call.go_on()
    assert known(kept) == before
    kept.come_back()
    kept.run(verbs.commit(kept.core, seq, 8, None))
    assert seq.committed_tokens == 8


def test_to_free_waits_for_no_daemon(kept: Any, new_event: Any) -> None:
    flying, later, fenced = kept.sequence(), kept.sequence(), kept.sequence()
    event = new_event()
    call = Call(kept, verbs.free(kept.core, flying, None))
    kept.die()
    call.go_on()
    kept.run(verbs.free(kept.core, later, None))
    kept.run(verbs.free(kept.core, fenced, event))
    assert all(seq.closed for seq in kept.pool.held)
    kept.come_back()
    assert len(claims_of(kept)) == 3, "until it has been told, the daemon holds them"
    kept.ship()
    assert kept.bodies == [Step(free=[Free(flying.id), Free(later.id)])]
    event.done = True
    kept.ship()
    assert kept.bodies == [Step(free=[Free(fenced.id)])]


def test_the_frees_of_a_step_that_no_daemon_heard_are_sent_later(kept: Any) -> None:
    seq, other = kept.sequence(), kept.sequence()
    call = Call(kept, step(kept.core, Plan(free=[seq], commit={other: 4})))
    kept.die()
    with pytest.raises(Unavailable):
        call.go_on()
    kept.come_back()
    kept.seen.clear()
    kept.ship()
    assert kept.bodies == [Step(free=[Free(seq.id)])]


def test_the_former_daemons_replies_mean_nothing_even_to_repeats(kept: Any, good: Any) -> None:
    """A request without an answer would be asked about; the next daemon would execute it anew."""
    seq = kept.sequence(4, (0,))
    kept.answer = lambda request: None
    with pytest.raises(Timeout):
        kept.run(verbs.extend(kept.core, seq, TOKENS, 0))
    (first,) = kept.seen
    kept.seen.clear()
    kept.answer = good
    kept.die()
    kept.come_back()
    kept.seen.clear()
    kept.core.receive(first.id, good(first), kept.session)
    assert (seq.length, seq.page_table.tolist(), seq.unsettled) == (4, [0], [])
    kept.run(verbs.commit(kept.core, seq, 4, None))
    assert kept.bodies == [Step(commit=[Commit(seq.id, 4)])]


def test_a_repeat_in_flight_is_not_sent_to_the_next_daemon(kept: Any, good: Any) -> None:
    seq = kept.sequence(4, (0,))
    kept.answer = lambda request: None
    with pytest.raises(Timeout):
        kept.run(verbs.extend(kept.core, seq, TOKENS, 0))
    kept.seen.clear()

    def answer(request: Any) -> Any:
        if request.epoch == 1:
            kept.die()
            return None
        return good(request)

    kept.answer, kept.while_away = answer, kept.come_back
    kept.run(verbs.commit(kept.core, seq, 4, None))
    assert [type(body) for body in kept.bodies] == [Step, Resume, Resume, Step]
    assert (seq.length, seq.committed_tokens) == (4, 4)


def test_the_next_daemon_answers_before_the_end_of_the_last_was_noticed(kept: Any, good: Any) -> None:
    """An old request reaches it, it does not know the epoch: that ends no session."""
    seq = kept.sequence(8, (0, 1, 2))
    kept.answer = lambda request: good(request) if request.epoch == 2 else LOST
    kept.while_away = kept.come_back
    with pytest.raises(Away):
        kept._carry_out(Ask(kept.session, [Heartbeat()]))
    assert (kept.session.away, kept.session.over) == (True, False)
    kept.run(verbs.commit(kept.core, seq, 4, None))
    assert seq.committed_tokens == 4


def test_who_still_looks_at_the_old_connection_sees_nothing_new(kept: Any) -> None:
    session = kept.session
    kept.die()
    kept.come_back()
    kept.core.left(session, 1)
    assert not session.away
    kept.core.left(session, 2)
    assert session.away


def test_nothing_is_numbered_for_another_daemon(kept: Any) -> None:
    kept.die()
    kept.come_back()
    with pytest.raises(Away):
        kept.core.envelop(Ask(kept.session, [Heartbeat()]), 105.0, 1)


def test_the_outbox_waits_until_all_is_claimed(kept: Any, new_event: Any) -> None:
    seq, event = kept.sequence(), new_event()
    kept.run(verbs.commit(kept.core, seq, 4, event))
    kept.core.outbox.drop(kept.session, 901)
    kept.die()
    event.done = True
    kept.come_back()
    assert [type(body) for body in kept.bodies] == [Resume, Resume]
    kept.ship()
    assert kept.bodies == [Step(free=[Free(901)], commit=[Commit(seq.id, 4)])]


# -- what is claimed -----------------------------------------------------------------------------------------------


def test_a_claim_says_what_is_known(kept: Any) -> None:
    kept.memory.counts[:] = np.arange(32) + 7
    kept.memory.copies = False
    seq = kept.sequence(6, (3, 4), committed_tokens=5, cached_tokens=5, writable_from_tokens=4, copy_rows=[(9, 4, 1)])
    kept.die()
    kept.come_back()
    generations = np.array([10, 11], "<u8").tobytes()
    claim = Claim("p", seq.id, b"ns", TOKENS, packed(3, 4), generations, 5, 5, [(9, 4, 1)])
    assert kept.bodies == [Resume([claim], False), Resume([], True)]


def test_only_what_the_daemon_may_hold_is_claimed(kept: Any, new_event: Any) -> None:
    """Not what was freed or handed off. What waits to be freed behind a fence is: a device still writes to it."""
    freed, handed, fenced, dropped, live = (kept.sequence() for _ in range(5))
    kept.run(verbs.free(kept.core, freed, None))
    kept.run(verbs.handoff(kept.core, handed, 30.0, None))
    kept.run(verbs.free(kept.core, fenced, new_event()))
    dropped.closed = True
    kept.pool.held.remove(dropped)
    del dropped
    kept.die()
    kept.bodies.clear()
    kept.come_back()
    assert list(claims_of(kept)) == [fenced.id, live.id]


def test_a_sequence_forgotten_while_away_is_freed(kept: Any) -> None:
    seq = kept.sequence()
    kept.die()
    kept.pool.held.remove(seq)
    identity = seq.id
    coming = kept.coming_back()
    next(coming)
    with pytest.warns(ResourceWarning):
        del seq
        for _ in coming:
            pass
        coming.close()
    kept.seen.clear()
    kept.ship()
    assert kept.bodies == [Step(free=[Free(identity)])]


def test_many_claims_go_in_many_messages_the_source_of_a_fork_before_it(kept: Any) -> None:
    sequences = [kept.sequence() for _ in range(150)]
    kept.die()
    kept.come_back()
    bodies = kept.bodies
    assert [(len(body.claims), body.last) for body in bodies] == [(64, False), (64, False), (22, False), (0, True)]
    assert [claim.seq for body in bodies for claim in body.claims] == [seq.id for seq in sequences]


def test_claims_that_are_too_large_together_go_alone(kept: Any, good: Any) -> None:
    small = [kept.sequence() for _ in range(5)]
    large = kept.sequence(64, range(16))

    def answer(request: Any) -> Any:
        body = request.body
        big = isinstance(body, Resume) and sum(len(claim.tokens) for claim in body.claims) > 64
        return Failure("limit_exceeded", "too many bytes in a message") if big else good(request)

    kept.answer = answer
    kept.die()
    kept.come_back()
    for seq in small:
        kept.run(verbs.commit(kept.core, seq, 4, None))
    with pytest.raises(SessionLost, match="too many bytes"):
        kept.run(verbs.commit(kept.core, large, 4, None))


# -- results -------------------------------------------------------------------------------------------------------


def losing(good: Any, *lost: Any) -> Any:
    names = {seq.id for seq in lost}

    def answer(request: Any) -> Any:
        if not isinstance(request.body, Resume):
            return good(request)
        gone = Failure("session_lost", "a page has been handed out again", {"page": 1})
        claims = request.body.claims
        return Resumed([gone if claim.seq in names else Kept(claim.committed, 0) for claim in claims])

    return answer


def test_one_is_lost_and_the_others_go_on(kept: Any, good: Any, new_event: Any) -> None:
    lost, live = kept.sequence(), kept.sequence(8, (3, 4))
    kept.run(verbs.commit(kept.core, lost, 4, new_event(done=False)))
    assert lost.intact()
    kept.die()
    assert lost.intact(), "nobody has touched its pages"
    kept.answer = losing(good, lost)
    kept.come_back()
    assert (lost.intact(), live.intact(), "lost" in repr(lost)) == (False, True, True)
    kept.seen.clear()
    result = kept.run(step(kept.core, Plan(commit={lost: 8, live: 8}, extend={live: [1]})))
    assert isinstance(result.commit[lost], SessionLost)
    assert (result.commit[live], live.length) == (None, 9)
    for verb in ("extend", "commit", "truncate", "share", "compact", "handoff"):
        with pytest.raises((SessionLost, StaleHandle)):
            kept.run(VERBS[verb](kept, lost))
    assert not any(str(lost.id) in str(body) for body in kept.bodies if not isinstance(body, Step))
    kept.run(verbs.free(kept.core, lost, None))
    with pytest.raises(SessionLost):
        kept.run(verbs.flush(kept.core, kept.pool, 1))
    kept.pool.held.remove(lost)


def test_a_free_of_a_lost_sequence_says_so_once(kept: Any, good: Any) -> None:
    lost = kept.sequence()
    kept.answer = losing(good, lost)
    kept.die()
    kept.come_back()
    with pytest.raises(SessionLost):
        kept.run(verbs.free(kept.core, lost, None))
    kept.run(verbs.free(kept.core, lost, None))


def test_a_call_in_flight_whose_sequence_is_lost(kept: Any, good: Any) -> None:
    """The daemon executed it and could not say so: it gave up pages that the claim still names."""
    seq = kept.sequence(8, (0, 1, 2))
    call = Call(kept, VERBS["truncate"](kept, seq))
    kept.die()
    refused = losing(good, seq)
    unknown = Failure("stale_handle", "no such sequence")
    kept.answer = lambda request: Stepped(truncate=[unknown]) if isinstance(request.body, Step) else refused(request)
    kept.come_back()
    with pytest.raises(SessionLost):
        call.go_on()


def test_a_commit_that_was_executed_shows_in_the_result(kept: Any, good: Any) -> None:
    kept.memory.copies = False
    seq = kept.sequence(10, (0, 1, 2), committed_tokens=3, cached_tokens=3, copy_rows=[(9, 0, 3)])
    call = Call(kept, verbs.commit(kept.core, seq, 9, None))
    kept.die()
    kept.answer = lambda request: Resumed([Kept(8, 8)] * len(request.body.claims))
    kept.come_back()
    assert (seq.committed_tokens, seq.writable_from_tokens, seq.copy_rows) == (8, 8, [])
    kept.answer = good
    call.go_on()
    assert (seq.committed_tokens, kept.bodies[-1]) == (9, Step(commit=[Commit(seq.id, 9)]))


def test_a_daemon_that_takes_no_claims_ends_the_session(kept: Any) -> None:
    seq = kept.sequence()
    kept.answer = lambda request: Failure("bad_request", "what is that?")
    kept.die()
    with pytest.raises(SessionLost, match="what is that"):
        kept.come_back()
    assert kept.core.session is None
    assert not seq.intact()


def test_it_dies_again_in_the_middle_and_all_begins_anew(kept: Any, good: Any) -> None:
    first, second = kept.sequence(), kept.sequence(8, (3, 4))
    kept.die()
    for _ in kept.coming_back():
        break  # rejoined, nothing claimed yet
    kept.die()
    lost_one = losing(good, first)
    for i, _ in enumerate(kept.coming_back()):
        kept.answer = lost_one
        if i == 1:
            break  # one message answered, the last one not
    kept.die()
    kept.answer, kept.seen = good, []
    kept.come_back()
    assert list(claims_of(kept)) == [second.id], "what a daemon refused stays lost"
    assert kept.session.epoch == 4
    kept.run(verbs.commit(kept.core, second, 8, None))
    assert (second.committed_tokens, second.intact(), first.intact()) == (8, True, False)


def test_an_answer_to_a_claim_that_comes_after_the_daemons_death(kept: Any, good: Any) -> None:
    """Of the daemon before the last one: its word on a claim is nothing any more either."""
    seq = kept.sequence()
    kept.die()
    coming = kept.coming_back()
    ask = next(coming)
    (out,) = kept.core.envelop(ask, 1e9, kept.epoch)
    kept.die()
    kept.core.abandon([out], kept.session, Unavailable("ended"))
    kept.come_back()
    kept.core.receive(out.request.id, Resumed([LOST]), kept.session)
    assert seq.intact()


# -- reading and copying at the moment of death --------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["reserve", "adopt", "extend", "share", "truncate", "compact"])
def test_generations_read_after_the_daemons_death_are_nothing_until_confirmed(kept: Any, good: Any, verb: str) -> None:
    """The next daemon could have handed out the pages already: then what was read is somebody else's."""
    seq = kept.sequence(8, (0, 1, 2), committed_tokens=6)
    call = Call(kept, VERBS[verb](kept, seq))
    kept.daemon_lives = False
    tail = {
        "truncate": Stepped(truncate=[Truncated(2, packed(7))]),
        "share": Stepped(share=[Shared(6, 1, packed(7, 8))]),
    }
    call.receive(lambda request: tail.get(verb) or good(request))
    assert kept.session.away
    touched = [one for one in kept.pool.held if not one.intact()]
    assert touched
    kept.while_away = kept.come_back
    call.go_on()
    assert all(one.intact() for one in kept.pool.held), "the call waited for the next daemon's word"


def test_a_call_that_was_answered_does_not_fail_for_want_of_the_next_daemon(kept: Any, good: Any) -> None:
    call = Call(kept, VERBS["reserve"](kept, None))
    kept.daemon_lives = False
    call.receive(good)
    seq = call.go_on()
    assert (seq.length, seq.intact()) == (6, False)
    kept.come_back()
    assert seq.intact()


def test_rows_copied_after_the_daemons_death_are_claimed_as_not_copied(kept: Any, good: Any) -> None:
    """Its source may have been evicted: only the next daemon can say."""
    call = Call(kept, VERBS["reserve"](kept, None))
    kept.daemon_lives = False
    call.receive(lambda request: Reserved(packed(3, 4), 5, 4, [(9, 4, 1)]))
    (seq,) = kept.pool.held
    assert (seq.copy_rows, seq.intact()) == ([(9, 4, 1)], False)
    kept.come_back()
    assert claims_of(kept)[seq.id].copy_rows == [(9, 4, 1)]
    assert seq.intact()


@pytest.mark.parametrize("verb", ["commit", "copied"])
def test_rows_that_the_caller_has_said_to_be_copied_are_not_claimed(kept: Any, good: Any, verb: str) -> None:
    """If the daemon has heard it, it has let go of the source, which is another's by now."""
    kept.memory.copies = False
    seq = kept.sequence(6, (3, 4), committed_tokens=5, copy_rows=[(9, 4, 1)])
    if verb == "commit":
        with pytest.raises(BadRequest):
            kept.answer = lambda request: Stepped(commit=[Failure("bad_request", "there are only 6")])
            kept.run(verbs.commit(kept.core, seq, 7, None))
        kept.answer = good
    call = Call(kept, verbs.commit(kept.core, seq, 6, None) if verb == "commit" else verbs.copied(kept.core, seq, None))
    assert seq.copy_rows == [(9, 4, 1)]
    kept.die()
    kept.come_back()
    assert claims_of(kept)[seq.id].copy_rows == []
    assert (seq.copy_rows, seq.intact()) == ([], True)
    call.go_on()


def test_what_is_said_of_rows_after_the_daemons_death_counts_for_nothing(kept: Any) -> None:
    """Whoever stood still that long may have copied from a page that had become another's."""
    kept.memory.copies = False
    seq = kept.sequence(6, (3, 4), committed_tokens=5, copy_rows=[(9, 4, 1)])
    kept.daemon_lives = False
    Call(kept, verbs.copied(kept.core, seq, None))
    kept.die()
    kept.come_back()
    assert claims_of(kept)[seq.id].copy_rows == seq.copy_rows == [(9, 4, 1)]


def test_while_nobody_holds_the_source_of_rows_the_sequence_is_not_valid(kept: Any) -> None:
    kept.memory.copies = False
    seq = kept.sequence(6, (3, 4), committed_tokens=5, copy_rows=[(9, 4, 1)])
    assert seq.intact()
    kept.daemon_lives = False
    assert not seq.intact()
    kept.die()
    kept.come_back()
    assert seq.intact()


def test_the_library_copies_once_and_the_daemon_is_told_later(kept: Any) -> None:
    seq = kept.sequence(6, (3, 4), committed_tokens=5, copy_rows=[(9, 4, 1)])
    kept.die()
    kept.come_back()
    assert claims_of(kept)[seq.id].copy_rows == []
    assert kept.memory.copied == [(9, 4, 1)]


# -- the outbox ----------------------------------------------------------------------------------------------------


def flying(desk: Any) -> list[Any]:
    """The heartbeat takes along what is ready."""
    return desk.core.envelop(Ask(desk.session), desk.now + 5.0, desk.epoch)


def test_fenced_operations_in_flight_go_to_the_next_daemon_in_their_order(kept: Any, new_event: Any) -> None:
    seq, other, event = kept.sequence(), kept.sequence(8, (3, 4)), new_event()
    kept.run(verbs.commit(kept.core, seq, 4, event))
    kept.run(verbs.truncate(kept.core, TruncateItem(seq, 4), None))
    kept.run(verbs.commit(kept.core, seq, 4, None))
    kept.run(verbs.handoff(kept.core, other, 30.0, new_event(done=False)))
    later = new_event()
    kept.run(verbs.commit(kept.core, seq, 4, later))
    event.done = True
    outgoing = flying(kept)
    assert [out.request.body for out in outgoing] == [Step(commit=[Commit(seq.id, 4)])]
    kept.die()
    kept.come_back()
    kept.core.abandon(outgoing, kept.session, Unavailable("ended"))
    kept.seen.clear()
    kept.ship()
    kept.ship()
    assert kept.bodies == [
        Step(commit=[Commit(seq.id, 4)]),
        Step(truncate=[Truncate(seq.id, 4)], commit=[Commit(seq.id, 4)]),
    ]
    later.done = True
    kept.ship()
    assert kept.bodies == [Step(commit=[Commit(seq.id, 4)])]


def test_commits_in_flight_that_were_executed_are_not_sent_again(kept: Any, good: Any, new_event: Any) -> None:
    """The first of two would now be a step back."""
    seq, event = kept.sequence(), new_event()
    kept.run(verbs.commit(kept.core, seq, 4, event))
    kept.run(verbs.commit(kept.core, seq, 8, None))
    event.done = True
    outgoing = flying(kept)
    kept.die()
    kept.core.abandon(outgoing, kept.session, Unavailable("ended"))
    kept.answer = lambda request: Resumed([Kept(8, 8)] * len(request.body.claims))
    kept.come_back()
    kept.answer, kept.seen = good, []
    kept.run(verbs.flush(kept.core, kept.pool, None))
    assert kept.bodies == [Step(commit=[Commit(seq.id, 8)])]


def test_a_fenced_free_in_flight(kept: Any, good: Any, new_event: Any) -> None:
    """Executed: the claim cannot be proven, and that is all right. Not executed: it is sent again."""
    executed, other, event = kept.sequence(), kept.sequence(8, (3, 4)), new_event()
    kept.run(verbs.free(kept.core, executed, event))
    kept.run(verbs.free(kept.core, other, event))
    event.done = True
    outgoing = flying(kept)
    kept.die()
    kept.answer = losing(good, executed)
    kept.come_back()
    kept.core.abandon(outgoing, kept.session, Unavailable("ended"))
    kept.seen.clear()
    kept.run(verbs.flush(kept.core, kept.pool, None))
    assert kept.bodies == [Step(free=[Free(other.id)])]


def test_frees_in_flight_that_nobody_waits_for_are_sent_again(kept: Any) -> None:
    """Of a sequence that is still there, given up by a step that failed: it is claimed, so it has to be freed."""
    seq = kept.sequence()
    seq.closed = True
    kept.core.outbox.drop(kept.session, seq.id)
    outgoing = flying(kept)
    assert [out.request.body for out in outgoing] == [Step(free=[Free(seq.id)])]
    kept.die()
    kept.come_back()
    kept.core.abandon(outgoing, kept.session, Unavailable("ended"))
    assert list(claims_of(kept)) == [seq.id]
    kept.ship()
    assert kept.bodies == [Step(free=[Free(seq.id)])]


def test_a_waiter_for_what_was_in_flight_goes_on(kept: Any, new_event: Any) -> None:
    seq, event = kept.sequence(), new_event()
    kept.run(verbs.truncate(kept.core, TruncateItem(seq, 4), event))
    event.done = True
    woken = []
    kept.core.outbox.changed = lambda: woken.append(kept.core.outbox.flying(seq))
    flying(kept)
    assert kept.core.outbox.flying(seq)
    kept.die()
    kept.come_back()
    assert woken == [False]
    kept.run(verbs.extend(kept.core, seq, b"", 4))
    assert [kind for kind in kept.bodies if isinstance(kind, Step)][-1] == Step(extend=[Extend(seq.id, b"", 4)])


# -- the rest ------------------------------------------------------------------------------------------------------


def test_a_queued_reserve_waits_on_for_what_is_left_of_its_time(kept: Any, good: Any) -> None:
    call = Call(kept, verbs.reserve(kept.core, kept.pool, want(wait_s=60.0)))
    kept.now += 25.0
    kept.die()
    kept.while_away = kept.come_back
    call.go_on()
    waits = [request.body.wait_s for request in kept.seen if isinstance(request.body, Reserve)]
    assert (call.out[0].request.body.wait_s, waits) == (60.0, [35.0])


def test_a_queued_reserve_waits_for_the_next_daemon_within_its_own_time(kept: Any) -> None:
    verb = verbs.reserve(kept.core, kept.pool, want(wait_s=60.0))
    ask = verb.send(kept._carry_out(next(verb)))
    assert isinstance(ask, Ask)
    need = verb.throw(Away("ended"))
    assert need == NeedSession(60.0)
    verb.close()


def test_what_needs_no_session_goes_on(kept: Any, good: Any) -> None:
    def found(request: Any) -> Any:
        if request.epoch == 1:
            return kept.die()
        return LookedUp([4], [0]) if isinstance(request.body, Lookup) else good(request)

    kept.answer, kept.while_away = found, kept.come_back
    (one,) = kept.run(verbs.lookup(kept.pool, Namespace("m"), [TOKENS]))
    assert one.device_tokens == 4


def test_parts_that_were_answered_are_not_sent_again(kept: Any, good: Any) -> None:
    """A message of two parts, the daemon dies between them."""
    seq, other = kept.sequence(8, (0, 1, 2), **FOUR), kept.sequence(8, (3, 4))

    def answer(request: Any) -> Any:
        if request.epoch == 1 and getattr(request.body, "free", None):
            return kept.die()
        return good(request)

    kept.answer, kept.while_away = answer, kept.come_back
    kept.run(step(kept.core, Plan(free=[seq], commit={seq: 8, other: 8})))
    steps = [body for body in kept.bodies if isinstance(body, Step)]
    assert steps == [
        Step(commit=[Commit(seq.id, 8), Commit(other.id, 8)]),
        Step(free=[Free(seq.id)]),
        Step(free=[Free(seq.id)]),
    ]


def test_the_next_daemon_does_not_know_the_session(kept: Any, good: Any) -> None:
    seq = kept.sequence()
    call = Call(kept, verbs.commit(kept.core, seq, 4, None))
    old = kept.session

    def cold() -> None:
        kept.core.ended(old)
        kept.connect(resumes=True)

    kept.die()
    kept.while_away = cold
    with pytest.raises(SessionLost):
        call.go_on()
    fresh = kept.run(verbs.reserve(kept.core, kept.pool, want()))
    assert fresh.session is kept.session is not old
    assert not seq.intact()


def test_without_a_keeper_the_session_ends_with_the_daemon(desk: Any) -> None:
    seq = desk.sequence()
    desk.die()
    assert (desk.core.session, seq.session.over, seq.intact()) == (None, True, False)
