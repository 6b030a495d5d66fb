from __future__ import annotations

import copy
import json
import pickle

import pytest

from radixkv.client.snapshot import Snapshot

FIELDS = {"version": "1", "pools": {"default": {"pages": {"free": 3}}}, "names": ["a", {"b": 1}]}


def test_items_and_attributes_are_the_same() -> None:
    snapshot = Snapshot(FIELDS)
    assert snapshot.version == snapshot["version"] == "1"
    assert snapshot.pools["default"].pages.free == snapshot["pools"]["default"]["pages"]["free"] == 3
    assert snapshot.names[1].b == 1


def test_nothing_can_change_it() -> None:
    fields = copy.deepcopy(FIELDS)
    snapshot = Snapshot(fields)
    fields["pools"]["default"]["pages"]["free"] = 0  # type: ignore[index]
    assert snapshot.pools.default.pages.free == 3
    with pytest.raises(AttributeError):
        snapshot.version = "2"
    with pytest.raises(TypeError):
        snapshot["version"] = "2"  # type: ignore[index]
    with pytest.raises(AttributeError):
        snapshot.names.append(1)


def test_what_is_not_there() -> None:
    snapshot = Snapshot(FIELDS)
    with pytest.raises(AttributeError, match=r"no 'colour'.*version, pools, names"):
        _ = snapshot.colour
    with pytest.raises(KeyError):
        _ = snapshot["colour"]


def test_a_mapping_like_its_plain_data() -> None:
    snapshot = Snapshot(FIELDS)
    assert snapshot == Snapshot(FIELDS)
    assert hash(snapshot) == hash(Snapshot(FIELDS))
    assert list(snapshot) == list(FIELDS)
    assert len(snapshot) == len(FIELDS)
    assert json.loads(json.dumps(snapshot.as_dict())) == FIELDS
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    assert copy.copy(snapshot) == snapshot
