"""The end of a pool's cache: its device's memory is not to be believed any more. The daemon and the other pools go on.

Nothing that the pool holds matches any longer, in either tier; its pages come back in slices, a slice a tick. Sessions
that use it end, as if they had been silent for too long: their sequences, those of other pools too, answer
``SessionLost``, and their clients open others. What they could still write to stays in quarantine until their processes
are gone.
"""

from __future__ import annotations

from radixkv.engine import life
from radixkv.engine.state import State


def lose_pool(state: State, name: str) -> None:
    pool = state.pools[name]
    state.counters["lost_pools"] += 1
    for namespace in pool.namespaces.all():
        pool.invalidate(namespace)
    for seq in state.transit.take_all_of(name):
        life.close(pool, seq)
    for session in list(state.sessions.all()):
        uses = any(seq.pool == name for seq in session.sequences.values()) or name in session.waiting.values()
        if uses or session.id in state.resuming:
            state.ended.append(session.id)
            state.end_session(session.id, True)
