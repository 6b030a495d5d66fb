"""The circuit breaker, by a clock that the test moves."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from radixkv.adapters.vllm.breaker import Breaker


def test_lets_everything_through_as_long_as_nothing_failed() -> None:
    breaker = Breaker()
    assert all(breaker.lets_through(now) for now in range(5))
    assert not breaker.is_open


def test_after_a_failure_one_question_is_let_through_when_the_pause_is_over() -> None:
    breaker = Breaker(1.0, 8.0)
    breaker.failed(10.0)
    assert breaker.is_open
    assert not breaker.lets_through(10.9)
    assert breaker.lets_through(11.0)
    assert not breaker.lets_through(11.1)  # the one on trial has no answer yet


def test_pauses_double_up_to_the_longest() -> None:
    breaker = Breaker(1.0, 8.0)
    now, pauses = 0.0, []
    for _ in range(6):
        breaker.failed(now)
        begin = now
        while not breaker.lets_through(now):
            now += 0.5
        pauses.append(now - begin)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_success_closes_it_and_the_next_pause_is_short_again() -> None:
    breaker = Breaker(1.0, 8.0)
    for now in (0.0, 1.0, 3.0):
        breaker.failed(now)
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.lets_through(3.0)
    breaker.failed(20.0)
    assert breaker.lets_through(21.0)


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=60))
def test_a_sick_daemon_is_asked_no_oftener_than_the_pauses_allow(steps: list[float]) -> None:
    breaker = Breaker(1.0, 4.0)
    now, asked = 0.0, []
    for step in steps:
        now += step
        if breaker.lets_through(now):
            asked.append(now)
            breaker.failed(now)
    gaps = [after - before for before, after in itertools.pairwise(asked)]
    assert all(gap >= min(2.0**number, 4.0) for number, gap in enumerate(gaps))
