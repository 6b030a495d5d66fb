"""Sessions: who is there, for how long one may be silent, and that requests act once."""

import pytest

from radixkv.errors import BadRequest, LimitExceeded, SessionLost
from radixkv.sessions.registry import Registry
from radixkv.sessions.window import SPAN, ReplyWindow


@pytest.fixture
def registry():
    return Registry(limit=2, keep_replies=3, lease_s=10.0)


def test_who_is_over_or_of_another_epoch_is_not_found(registry):
    registry.open(7, b"t", "w")
    assert registry.find(7, 1).id == 7
    for identity, epoch in ((7, 0), (7, 2), (8, 1), (0, 0)):
        with pytest.raises(SessionLost):
            registry.find(identity, epoch)
    registry.end(7)
    with pytest.raises(SessionLost):
        registry.find(7, 1)
    assert registry.end(7) is None


def test_slots_are_used_again_and_never_by_two(registry):
    first, second = registry.open(1, b"t", "w"), registry.open(2, b"t", "w")
    with pytest.raises(LimitExceeded) as full:
        registry.open(3, b"t", "w")
    assert (full.value.sessions, full.value.limit) == (2, 2)
    assert {first.slot, second.slot} == {0, 1}
    registry.end(1)
    assert registry.open(3, b"t", "w").slot == first.slot


def test_silence_is_counted_in_running_time(registry):
    registry.open(1, b"t", "w")
    registry.open(2, b"t", "w")
    registry.running_s = 10.0
    registry.find(2, 1)
    assert registry.lapsed(besides=0) is None
    registry.running_s = 10.5
    assert registry.lapsed(besides=0).id == 1
    assert registry.lapsed(besides=1) is None
    registry.running_s = 30.0
    assert registry.lapsed(besides=0).id == 1
    assert registry.lapsed(besides=1).id == 2
    registry.find(1, 1)
    assert registry.lapsed(besides=0).id == 2


def test_a_look_that_is_no_sign_of_life(registry):
    registry.open(1, b"t", "w")
    registry.running_s = 11.0
    assert registry.find_quietly(1).seen_s == 0.0


def test_a_kept_reply_is_given_again_and_a_forgotten_one_refused():
    window = ReplyWindow(keep=2)
    for request in (1, 2, 3):
        assert window.admit(request) is None
        window.keep(request, f"reply {request}")
    assert (window.admit(2), window.admit(3), len(window)) == ("reply 2", "reply 3", 2)
    with pytest.raises(BadRequest) as old:
        window.admit(1)
    assert (old.value.id, old.value.newest) == (1, 3)


def test_requests_may_overtake_each_other_within_the_window():
    window = ReplyWindow(keep=2)
    assert window.admit(SPAN + 1) is None
    assert window.admit(2) is None
    with pytest.raises(BadRequest):
        window.admit(1)
    with pytest.raises(BadRequest):
        window.admit(2)
    assert window.admit(10 * SPAN) is None
    with pytest.raises(BadRequest):
        window.admit(SPAN + 2)
    assert window.missing() < SPAN
