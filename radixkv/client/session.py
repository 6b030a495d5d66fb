"""One time of being connected, and the memory that came with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from radixkv.commands import CopyRow, Welcome
from radixkv.config import KVSpec
from radixkv.errors import Unavailable

Pages = NDArray[np.int32]
"""Page ids, read-only."""


class Memory(Protocol):
    """What the core asks of a pool's mapped memory (``mapping.py`` is the real one)."""

    @property
    def spec(self) -> KVSpec: ...

    @property
    def pages(self) -> int: ...

    def generations(self, pages: Pages) -> NDArray[Any]:
        """How often each of these pages has been assigned so far."""
        ...

    def knows(self, session: Session) -> bool:
        """Does the table say that this session goes on?"""
        ...

    def copy_rows(self, rows: Iterable[CopyRow]) -> bool:
        """Carry the copies out at once and say True; False where the caller has to (on its own stream)."""
        ...


@dataclass(eq=False, slots=True)
class Session:
    """What hello was answered with. A sequence belongs to the session it was made in, by identity."""

    welcome: Welcome
    memories: dict[str, Memory] = field(default_factory=dict)
    over: bool = False

    @property
    def id(self) -> int:
        return self.welcome.session

    @property
    def epoch(self) -> int:
        return self.welcome.epoch

    def memory(self, pool: str) -> Memory:
        """Errors: Unavailable when the daemon that came after a restart has no such pool."""
        memory = self.memories.get(pool)
        if memory is None:
            raise Unavailable(f"the daemon has no pool {pool!r} any more")
        return memory
