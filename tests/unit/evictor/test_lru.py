"""The ordered map of idle keys."""

import pytest

from radixkv.evictor.lru import LRU


def test_the_front_is_who_came_first_and_waking_takes_out():
    order = LRU()
    for key in "abc":
        order.add(key)
    assert (order.front(), list(order), len(order)) == ("a", ["a", "b", "c"], 3)
    order.remove("a")
    order.add("a")
    assert (order.front(), "b" in order, list(order)) == ("b", True, ["b", "c", "a"])
    order.remove("b")
    assert "b" not in order


def test_a_key_that_is_not_idle_cannot_be_removed():
    with pytest.raises(KeyError):
        LRU().remove("a")
