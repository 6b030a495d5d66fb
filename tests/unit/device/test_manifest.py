"""What the store's manifest says, and which configurations it does not fit."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from radixkv.config import KVSpec, PoolConfig
from radixkv.device import manifest

POOL = PoolConfig("a", KVSpec(layers=2), pages=8)
OTHER = PoolConfig("b", pages=9)


def differences(before, now, sessions: int = 5) -> list[str]:
    return list(manifest.differences(manifest.describe(before, 5), manifest.describe(now, sessions)))


def test_it_comes_back_as_it_was_written() -> None:
    described = manifest.describe([POOL, OTHER], 5)
    fd = manifest.write(described)
    assert manifest.read(fd) == described
    assert described["order"] == ["a", "b"]
    os.close(fd)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (replace(POOL, pages=16), "pages of pool 'a' was 8 and is 16"),
        (replace(POOL, ranks=2), "ranks of pool 'a' was 1 and is 2"),
        (replace(POOL, device="cuda"), "device of pool 'a' was 'cpu' and is 'cuda'"),
        (replace(POOL, host_pages=3), "host_pages of pool 'a' was 0 and is 3"),
        (replace(POOL, host_staging_pages=3), "host_staging_pages of pool 'a' was 0 and is 3"),
        (replace(POOL, namespaces=16), "namespaces of pool 'a' was 1024 and is 16"),
        (replace(POOL, spec=KVSpec(layers=3)), "layers of pool 'a' was 2 and is 3"),
        (replace(POOL, spec=KVSpec(layers=2, dtype="float16")), "dtype of pool 'a' was 'float32' and is 'float16'"),
        (replace(POOL, name="c"), "pool 'a' is not configured any more, pool 'c' is new"),
    ],
)
def test_what_the_memory_depends_on(changed: PoolConfig, said: str) -> None:
    assert ", ".join(differences([POOL], [changed])) == said


def test_every_key_is_one_or_the_other() -> None:
    """A new key of a pool has to be thought about here: may it change over a restart?"""
    keys = set(manifest.describe([POOL], 5)["pools"]["a"])
    fixed = {"name", "pages", "namespaces", "policy", "ranks", "host_pages", "host_staging_pages", "device"}
    fixed |= {*KVSpec.__dataclass_fields__}
    assert keys == fixed
    assert set(PoolConfig.__dataclass_fields__) - fixed - {"spec"} == {
        "decode_reserve_pages", "session_floor_pages", "session_cap_pages", "pin_limit_pages",
        "namespace_floor_pages", "namespace_cap_pages", "reclaim_pages",
        "host_write", "host_load_min_tokens",
    }  # fmt: skip


def test_what_may_change() -> None:
    rules = replace(POOL, decode_reserve_pages=1, session_floor_pages=2, session_cap_pages=3, reclaim_pages=4)
    assert differences([POOL, OTHER], [OTHER, rules]) == []
    assert differences([POOL], [POOL], sessions=6) == ["limits.sessions was 5 and is 6"]


def test_another_version_says_nothing_else() -> None:
    old = manifest.describe([POOL], 5) | {"table_version": 1, "pools": "whatever it was then"}
    (said,) = manifest.differences(old, manifest.describe([OTHER], 6))
    assert "version 1, not" in said
