"""What is in the store: which pools, of which sizes. A small memfd beside theirs, sent to the store after them.

A daemon that starts compares it with its own configuration: what differs is said key by key, before anything is mapped.
Without it, what is stored comes from a daemon that was killed while it started for the first time; nobody has used it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from radixkv.config import PoolConfig
from radixkv.device.descriptors import TABLE_VERSION

_FREE_TO_CHANGE = (
    "decode_reserve_pages", "session_floor_pages", "session_cap_pages", "pin_limit_pages", "reclaim_pages",
    "namespace_floor_pages", "namespace_cap_pages",
    "host_write", "host_load_min_tokens",
)  # fmt: skip
"""Rules of a pool that are not part of its memory."""
_NEW_SINCE = {"host_pages": 0, "host_staging_pages": 0, "device": "cpu"}
"""Keys that an earlier version did not write, and what was true of its pools."""
_BYTES_MAX = 2**20


def describe(pools: Sequence[PoolConfig], sessions: int) -> dict[str, Any]:
    """``pools``: by name; ``order``: their names, in the order of the stored descriptors."""
    return {
        "table_version": TABLE_VERSION,
        "sessions": sessions,
        "order": [pool.name for pool in pools],
        "pools": {pool.name: _shape(pool) for pool in pools},
    }


def _shape(pool: PoolConfig) -> dict[str, Any]:
    fields = asdict(pool)
    return {key: value for key, value in (fields | fields.pop("spec")).items() if key not in ("spec", *_FREE_TO_CHANGE)}


def write(manifest: Mapping[str, Any]) -> int:
    """A memfd with this content."""
    fd = os.memfd_create("radixkv-manifest", os.MFD_CLOEXEC)
    os.write(fd, json.dumps(manifest).encode())
    return fd


def read(fd: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.pread(fd, _BYTES_MAX, 0))
    return found


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """What keeps a daemon that wants the one from going on with the other, in words."""
    if stored["table_version"] != wanted["table_version"]:
        yield f"the descriptor table has version {stored['table_version']}, not {wanted['table_version']}"
        return
    if stored["sessions"] != wanted["sessions"]:
        yield f"limits.sessions was {stored['sessions']} and is {wanted['sessions']}"
    before, now = stored["pools"], wanted["pools"]
    for name in before.keys() - now.keys():
        yield f"pool {name!r} is not configured any more"
    for name in now.keys() - before.keys():
        yield f"pool {name!r} is new"
    for name in now.keys() & before.keys():
        for key in sorted(now[name]):
            was = before[name].get(key, _NEW_SINCE.get(key))
            if was != now[name][key]:
                yield f"{key} of pool {name!r} was {was!r} and is {now[name][key]!r}"
