"""What hello was answered with, and the memory that came with it. Outlives daemons, if they are kept (``resume.py``).

::

    here ──(the daemon goes away, or says session_lost)──> away ──(resumed with the next one: a new epoch)──> here
      │                                                      │
      └──(without a keeper)──────────> over <────────────────┴── (the next daemon does not know it)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from radixkv.commands import CopyRow, Welcome
from radixkv.config import KVSpec
from radixkv.errors import Unavailable

if TYPE_CHECKING:
    from radixkv.client.batch import Outgoing
    from radixkv.client.sequence import SequenceState

Pages = NDArray[np.int32]
"""Page ids, read-only."""


class Memory(Protocol):
    """What the core asks of a pool's mapped memory (``mapping.py`` is the real one)."""

    @property
    def spec(self) -> KVSpec: ...

    @property
    def pages(self) -> int: ...

    @property
    def host_pages(self) -> int: ...

    def generations(self, pages: Pages) -> NDArray[Any]:
        """How often each of these pages has been assigned so far."""
        ...

    def knows(self, session: Session) -> bool:
        """Does the table say that this session goes on? Whatever its epoch: only we can resume it."""
        ...

    def copy_rows(self, rows: Iterable[CopyRow]) -> bool:
        """Carry the copies out at once and say True; False where the caller has to (on its own stream)."""
        ...

    def take_page(self, page: int) -> Any:
        """A copy of what a page holds, for ``put_page``; None where this process cannot reach all of it."""
        ...

    def put_page(self, page: int, content: Any) -> None: ...


def _always() -> bool:
    return True


@dataclass(eq=False, slots=True)
class Session:
    """A sequence belongs to the session it was made in, by identity. Changed by ``Core`` alone."""

    welcome: Welcome
    """Of the present daemon, or of the last one while the session is away."""
    memories: dict[str, Memory] = field(default_factory=dict)
    over: bool = False
    away: bool = False
    sequences: WeakSet[SequenceState] = field(default_factory=WeakSet)
    """Those that the daemon holds for us, as far as its answers have told."""
    doubts: dict[int, Outgoing] = field(default_factory=dict)
    """By request id, the oldest first: sent, not answered in time. They are sent again until they are answered."""
    daemon_lives: Callable[[], bool] = _always
    """Asked of the shell: has the daemon of the present epoch certainly not been replaced by now?"""
    lifeline: Any = None
    """The shell's: kept open as long as our mappings may be used."""

    @property
    def id(self) -> int:
        return self.welcome.session

    @property
    def epoch(self) -> int:
        """Grows with each daemon. One daemon's answers are nothing to a session that goes on with another."""
        return self.welcome.epoch

    def memory(self, pool: str) -> Memory:
        """Errors: Unavailable when the daemon that came after a restart has no such pool."""
        memory = self.memories.get(pool)
        if memory is None:
            raise Unavailable(f"the daemon has no pool {pool!r} any more")
        return memory
