"""When two replies are the same, and whether a snapshot tells the truth."""

from __future__ import annotations

from typing import Any

from fuzz.model.mismatch import expect
from fuzz.model.state import COUNTED, State
from radixkv import commands


def same_reply(actual: commands.Reply | None, expected: commands.Reply | None) -> None:
    """Raise Mismatch unless the real reply is the expected one, but for the words of an error."""
    expect("I28" if _refuses(actual) or _refuses(expected) else "I6", "reply", _plain(actual), _plain(expected))


def _refuses(reply: object) -> bool:
    return isinstance(reply, commands.Failure)


def _plain(reply: Any) -> Any:
    """A reply without what the protocol leaves open: the words of an error, and numbers that only explain it."""
    if isinstance(reply, commands.Failure):
        numbers = {name: value for name, value in reply.details.items() if not isinstance(value, str)}
        numbers = numbers if reply.code == "out_of_pages" else {}
        return reply.code, {"waited_s": 0.0, **numbers}
    if isinstance(reply, commands.Stepped):
        names = ("copied", "free", "truncate", "commit", "extend", "share")
        return {name: [_plain(item) for item in getattr(reply, name)] for name in names}
    return reply


def same_counts(state: State, snapshot: dict[str, Any]) -> None:
    """Raise Mismatch where the engine's own snapshot does not tell the model's counts."""
    for name, pool in state.pools.items():
        seen = snapshot["pools"][name]
        expect("I1", f"pages of {name}", seen["pages"], pool.counts())
        expect("I24", f"evictable pages of {name}", seen["evictable_pages"], pool.evictable(state.held(pool)))
        sequences = sum(1 for sequence in state.sequences() if sequence.pool == name)
        expect("I24", f"sequences of {name}", seen["sequences"], sequences)
    expect("I24", "sessions", snapshot["sessions"], len(state.sessions))
    expect("I24", "sequences in transit", snapshot["in_transit"], len(state.transit))
    expect("I24", "waiting requests", snapshot["queued"], sum(len(queue) for queue in state.queue.values()))
    seen = {name: snapshot["counters"][name] for name in COUNTED}
    expect("I24", "counters", seen, state.counters)
