"""What a page may be and become: one table. Everything that is not in it is a bug.

::

                take                publish
        FREE ─────────> PRIVATE ─────────────> CACHED ──evict──> FREE, ──reuse──> PRIVATE
          ^   release      │  │ shade             │ ^
          ├────────────────┘  └──────> SHADOW     │ │ saved
          │        release                │       v │
          ├───────────────────────────────┘     SAVING
          │                            quarantine (from PRIVATE, SHADOW, LOADING, SAVING)
          └──clear── QUARANTINED <─────
                         └──claim──> PRIVATE    └──claim shadow──> SHADOW

        FREE ──load──> LOADING ──loaded──> CACHED        LOADING ──abandon──> FREE
                          └──shade──> SHADOW

* FREE: in the free list, content unknown.
* PRIVATE: one sequence writes it.
* CACHED: complete, immutable, in the tree.
* SHADOW: complete, immutable, outside the tree: another page with the same tokens was there first.
* LOADING, SAVING: a copy between tiers runs; untouchable until it is known to have ended.
* QUARANTINED: its owner is gone but could still write to it, or has yet to claim it after a restart.
"""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    FREE = 0
    PRIVATE = 1
    CACHED = 2
    SHADOW = 3
    LOADING = 4
    SAVING = 5
    QUARANTINED = 6


FREE, PRIVATE, CACHED, SHADOW, LOADING, SAVING, QUARANTINED = map(int, State)
"""The same as plain ints. To look a member up on its class, or to index by one, is felt where every command does it."""


class Event(IntEnum):
    TAKE = 0
    PUBLISH = 1
    SHADE = 2
    RELEASE = 3
    EVICT = 4
    QUARANTINE = 5
    CLEAR = 6
    LOAD = 7
    LOADED = 8
    ABANDON = 9
    SAVE = 10
    SAVED = 11
    CLAIM = 12
    CLAIM_SHADOW = 13
    REUSE = 14
    """Evicted for somebody who takes it at once."""


TAKE, PUBLISH, SHADE, RELEASE, EVICT, QUARANTINE, CLEAR = map(int, list(Event)[:7])
LOAD, LOADED, ABANDON, SAVE, SAVED = map(int, list(Event)[7:12])
REUSE = int(Event.REUSE)

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.FREE, Event.TAKE): State.PRIVATE,
    (State.PRIVATE, Event.PUBLISH): State.CACHED,
    (State.PRIVATE, Event.SHADE): State.SHADOW,
    (State.PRIVATE, Event.RELEASE): State.FREE,
    (State.SHADOW, Event.RELEASE): State.FREE,
    (State.CACHED, Event.EVICT): State.FREE,
    (State.CACHED, Event.REUSE): State.PRIVATE,
    (State.PRIVATE, Event.QUARANTINE): State.QUARANTINED,
    (State.SHADOW, Event.QUARANTINE): State.QUARANTINED,
    (State.LOADING, Event.QUARANTINE): State.QUARANTINED,
    (State.SAVING, Event.QUARANTINE): State.QUARANTINED,
    (State.QUARANTINED, Event.CLEAR): State.FREE,
    (State.QUARANTINED, Event.CLAIM): State.PRIVATE,
    (State.QUARANTINED, Event.CLAIM_SHADOW): State.SHADOW,
    (State.FREE, Event.LOAD): State.LOADING,
    (State.LOADING, Event.LOADED): State.CACHED,
    (State.LOADING, Event.ABANDON): State.FREE,
    (State.LOADING, Event.SHADE): State.SHADOW,
    (State.CACHED, Event.SAVE): State.SAVING,
    (State.SAVING, Event.SAVED): State.CACHED,
}

ILLEGAL = -1
NEXT: tuple[tuple[int, ...], ...] = tuple(
    tuple(int(TRANSITIONS.get((state, event), ILLEGAL)) for state in State) for event in Event
)
"""The same table for the hot path: ``NEXT[event][state]``, plain ints."""
