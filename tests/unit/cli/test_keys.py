"""The tables of keys against the dataclasses they describe."""

from dataclasses import fields

import pytest

from radixkv.cli import keys
from radixkv.config import EventsConfig, KVSpec, Limits, PoolConfig, ServerConfig


def names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def test_every_setting_has_its_key_and_every_key_its_setting() -> None:
    assert list(keys.SERVER) == names(ServerConfig)
    assert list(keys.LIMITS) == names(Limits)
    assert list(keys.EVENTS) == names(EventsConfig)
    assert list(keys.SPEC) == names(KVSpec)
    own = [*names(KVSpec), *(name for name in names(PoolConfig) if name != "spec")]
    extra = {"model_config", "device_bytes", "host_bytes"}
    assert set(keys.POOL) == {*own, *extra}


@pytest.mark.parametrize("table", [keys.SERVER, keys.LIMITS, keys.EVENTS, keys.POOL])
def test_every_key_says_its_unit_and_what_it_means(table: dict[str, keys.Key]) -> None:
    for key in table.values():
        assert key.unit.isupper()
        assert len(key.meaning) > 10


def test_defaults_are_those_of_the_dataclasses() -> None:
    assert keys.default_of("server.lease_s") == ServerConfig().lease_s
    assert keys.default_of("limits.tokens") == Limits().tokens
    assert keys.default_of("pool.layers") == KVSpec().layers
    assert keys.default_of("pool.name") == PoolConfig().name
    assert keys.default_of("pool.ranks") == 1
    assert keys.default_of("pool.model_config") is None


def test_an_unknown_key_is_answered_with_the_near_ones_and_all() -> None:
    message = str(keys.unknown("leas_s", keys.SERVER, "a test"))
    assert message.startswith("'leas_s' (from a test) is not a known key; did you mean lease_s? allowed: endpoint, ")
    assert "did you mean" not in str(keys.unknown("qqq", keys.SERVER, "a test"))
