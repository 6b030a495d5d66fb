"""What a kill in the middle of a write can leave of a descriptor table, and worse.

The header's word (the serial given last) is stored before any record. A record's state word is stored last, everything
else in any order: of each record that changes either all words are new, or the state is old and each other word is old
or new. Of a namespace or session entry either all is old or new, or its last word (used, epoch) is 0 and the rest is
anything. Real tears are among these.
"""

from __future__ import annotations

import random

from radixkv.device.descriptors import NAMESPACE_BYTES, SESSION_BYTES, STATE, USED, Geometry

WORD = 8


def tear(rng: random.Random, geometry: Geometry, before: bytes, after: bytes) -> bytes:
    """A state of the table on the way from ``before`` to ``after``."""
    torn = bytearray(before)
    torn[: geometry.sessions_at] = after[: geometry.sessions_at]
    entries = [
        (geometry.sessions_at, SESSION_BYTES, geometry.sessions, WORD, True),
        (geometry.namespaces_at, NAMESPACE_BYTES, geometry.namespaces, USED, True),
        (geometry.records_at, geometry.record_bytes, geometry.pages, STATE, False),
    ]
    for start, size, count, last, cleared in entries:
        if before[start : start + size * count] == after[start : start + size * count]:
            continue
        for at in range(start, start + size * count, size):
            old, new = before[at : at + size], after[at : at + size]
            if old != new:
                torn[at : at + size] = _entry(rng, old, new, last, cleared)
    return bytes(torn)


def _entry(rng: random.Random, old: bytes, new: bytes, last: int, cleared: bool) -> bytes:
    kind = rng.randrange(4)
    if kind < 2:
        return (old, new)[kind]
    changed = [at for at in range(0, len(old), WORD) if old[at : at + WORD] != new[at : at + WORD]]
    if changed == [last] or len(changed) == 1:
        return old if kind == 2 else new  # a single word is stored whole
    mixed = bytearray(old)
    for at in changed:
        if at != last and rng.random() < 0.5:
            mixed[at : at + WORD] = new[at : at + WORD]
    if cleared:
        mixed[last : last + WORD] = bytes(WORD)
    return bytes(mixed)
