"""Namespaces differ exactly when a field differs."""

from __future__ import annotations

import pickle
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.client.namespace import CANONICAL_MAX_BYTES, Namespace
from radixkv.errors import BadRequest, LimitExceeded

OPTIONAL = st.none() | st.text(max_size=4) | st.binary(max_size=4)
FIELDS = st.fixed_dictionaries(
    {
        "model": st.text(max_size=4),
        "lora": OPTIONAL,
        "salt": OPTIONAL,
        "extra": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
    }
)


@given(FIELDS, FIELDS)
def test_equal_exactly_when_all_fields_are_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    a, b = Namespace(**left), Namespace(**right)
    same = left == right
    assert (a == b) is same
    assert (a.canonical == b.canonical) is same
    assert not same or hash(a) == hash(b)


def test_look_alikes_differ() -> None:
    look_alikes = [
        Namespace("m"),
        Namespace("m", lora=""),
        Namespace("m", lora=b""),
        Namespace("m", salt=""),
        Namespace("m", lora="a"),
        Namespace("m", lora=b"a"),
        Namespace("m", salt="a"),
        Namespace("m", extra={"lora": "a"}),
        Namespace("m", extra={"": "a"}),
        Namespace("m", extra={"a": ""}),
        Namespace("m", extra={"a": "b", "c": "d"}),
        Namespace("m", extra={"a": "bcd"}),
        Namespace("ma"),
    ]
    assert all(a.canonical != b.canonical for a, b in combinations(look_alikes, 2))


def test_the_order_of_extra_does_not_matter() -> None:
    assert Namespace("m", extra={"a": "1", "b": "2"}) == Namespace("m", extra={"b": "2", "a": "1"})


def test_the_canonical_bytes_never_change() -> None:
    """They are compared with those of earlier versions, and after a restart."""
    namespace = Namespace("m", lora="l", salt=b"s", extra={"rope": "2"})
    assert namespace.canonical == (
        b"radixkv namespace 1"
        b"\x01\x04\x00\x00\x00lora\x01\x01\x00\x00\x00l"
        b"\x01\x05\x00\x00\x00model\x01\x01\x00\x00\x00m"
        b"\x01\x04\x00\x00\x00salt\x02\x01\x00\x00\x00s"
        b"\x02\x04\x00\x00\x00rope\x01\x01\x00\x00\x002"
    )


def test_frozen_also_against_changes_of_its_arguments() -> None:
    extra = {"a": "1"}
    namespace = Namespace("m", extra=extra)
    extra["a"] = "2"
    assert namespace.extra["a"] == "1"
    with pytest.raises(AttributeError):
        namespace.model = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        del namespace.model
    with pytest.raises(TypeError):
        namespace.extra["a"] = "3"  # type: ignore[index]


def test_survives_pickling() -> None:
    namespace = Namespace("m", lora=b"l", extra={"a": "1"})
    assert pickle.loads(pickle.dumps(namespace)) == namespace


@pytest.mark.parametrize(
    "fields",
    [
        {"model": b"m"},
        {"model": None},
        {"model": "m", "lora": 1},
        {"model": "m", "salt": bytearray(b"s")},
        {"model": "m", "extra": {"a": 1}},
        {"model": "m", "extra": {1: "a"}},
        {"model": "\ud800"},
    ],
)
def test_other_types_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        Namespace(**fields)


def test_at_most_one_kibibyte() -> None:
    spare = CANONICAL_MAX_BYTES - len(Namespace("").canonical)
    assert len(Namespace("x" * spare).canonical) == CANONICAL_MAX_BYTES
    with pytest.raises(LimitExceeded) as caught:
        Namespace("x" * (spare + 1))
    assert caught.value.limit == CANONICAL_MAX_BYTES
