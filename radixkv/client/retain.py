"""How firmly a sequence's pages are kept when nobody holds them any longer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from radixkv import commands
from radixkv.errors import BadRequest


class Retain(NamedTuple):
    """The priority of pages whose first token is one of [start, end).

    0: they leave first, 50: as all others, 100: pinned, they leave when nothing else can.

    ``seconds``: from when they are let go of; None: for as long as they are cached, which a pin cannot be.
    ``end``: None: to the sequence's end, of a pin to the prompt's.
    """

    priority: int
    seconds: float | None = None
    start: int = 0
    end: int | None = None


def on_the_wire(retain: Any) -> list[commands.Retain]:
    """Of a ``Retain``, or several. Errors: BadRequest."""
    many: Iterable[Any] = (retain,) if isinstance(retain, Retain) else retain
    made = []
    for one in many:
        try:
            priority, seconds, start, end = Retain(*one)
        except TypeError:
            raise BadRequest(f"retain takes Retain(priority, seconds, start, end), not {one!r}") from None
        if not _natural(priority) or priority > 100:
            raise BadRequest(f"a priority is a whole number from 0 to 100, not {priority!r}")
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float)):
            raise BadRequest(f"pages are retained for seconds or None, not {seconds!r}")
        if seconds is not None and not 0 <= seconds <= 86400:
            raise BadRequest(f"pages are retained for 0 to 86400 seconds, not {seconds!r}")
        if not _natural(start) or not (end is None or _natural(end)):
            raise BadRequest(f"tokens are counted from 0, not from {start!r} to {end!r}")
        made.append(commands.Retain(priority, None if seconds is None else float(seconds), start, end))
    return made


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
