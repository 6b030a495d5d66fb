"""When pages of the dead come back from a GPU, with the driver's word played."""

from __future__ import annotations

from radixkv.device.cuda_driver import CudaUnavailable
from radixkv.device.quiescence import QUIET_WITHIN_S, Quiescence


def test_they_come_back_when_the_driver_shows_none_of_the_processes() -> None:
    there = {10, 11, 99}
    quiescence = Quiescence(lambda: there)
    quiescence.expect(1, [10, 12], 0.0)
    quiescence.expect(2, [11], 0.0)
    quiescence.expect(3, [13], 0.0)
    assert quiescence.settle(0.1) == ([3], [])
    there.discard(11)
    assert quiescence.settle(0.2) == ([2], [])
    assert len(quiescence) == 1
    there.clear()
    assert quiescence.settle(QUIET_WITHIN_S + 1) == ([1], []), "late, and true all the same"
    assert (quiescence.settle(100.0), quiescence.given_up) == (([], []), 0)


def test_they_stay_out_of_use_when_it_never_does() -> None:
    quiescence = Quiescence(lambda: {10})
    quiescence.expect(1, [10], 5.0)
    assert quiescence.settle(5.0 + QUIET_WITHIN_S - 0.01) == ([], [])
    assert quiescence.settle(5.0 + QUIET_WITHIN_S) == ([], [1])
    assert (len(quiescence), quiescence.given_up) == (0, 1)


def test_of_a_process_that_nobody_knows_the_driver_shows_nothing_when_all_it_shows_live() -> None:
    there, living = {10, 11}, {10}
    quiescence = Quiescence(lambda: there, living.__contains__)
    quiescence.expect(1, [-1], 0.0)
    quiescence.expect(2, [12], 0.0)
    assert quiescence.settle(0.0) == ([2], []), "11 could be the first session's"
    there.discard(11)
    assert quiescence.settle(0.1) == ([1], [])


def test_no_word_is_no_leave() -> None:
    def silent() -> set[int]:
        raise CudaUnavailable("no NVML")

    quiescence = Quiescence(silent)
    assert quiescence.try_out() == "no NVML" and Quiescence(set).try_out() == ""
    quiescence.expect(1, [10], 0.0)
    assert quiescence.settle(0.0) == ([], [])
    assert quiescence.settle(QUIET_WITHIN_S) == ([], [1])
