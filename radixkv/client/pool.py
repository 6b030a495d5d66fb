"""What the client knows about a pool. Its memory may be another one after the daemon was started anew."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from radixkv.client.core import Core
from radixkv.client.sequence import Grant, SequenceState
from radixkv.client.session import Memory, Session
from radixkv.commands import COPY_WAIT_S
from radixkv.config import KVSpec
from radixkv.errors import BadRequest, Unavailable


class PoolState:
    """A pool by name; ``current`` is what is mapped now. Sequences keep the memory they were made with.

    A shell derives from this and says what a sequence is to its callers.
    """

    def __init__(self, core: Core, name: str) -> None:
        self.core = core
        self.name = name
        self.current: Memory | None = None
        self._prefill_tokens_per_s = 0.0
        self._copied: WeakKeyDictionary[SequenceState, set[int]] = WeakKeyDictionary()
        """Sequences whose rows the library copied, and from which pages. The daemon may not know yet: it learns from
        their next commit, or is told (``untold``)."""
        self._lock = threading.Lock()

    @property
    def memory(self) -> Memory:
        if self.current is None:
            raise Unavailable(f"pool {self.name!r} is not attached")
        return self.current

    @property
    def spec(self) -> KVSpec:
        return self.memory.spec

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.memory.spec.page_size

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast this worker computes prompts, tokens a second; 0, until it is set: it does not say.

        With a host tier, what takes longer to load than to compute is not loaded. To set less than 0: BadRequest.
        """
        return self._prefill_tokens_per_s

    @prefill_tokens_per_s.setter
    def prefill_tokens_per_s(self, speed: Any) -> None:
        if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 <= speed < math.inf:
            raise BadRequest(f"prefill_tokens_per_s is a number of at least 0, not {speed!r}")
        self._prefill_tokens_per_s = float(speed)

    @property
    def copy_wait_s(self) -> float:
        """How much longer an answer may take because pages are copied first."""
        return COPY_WAIT_S if self.memory.host_pages else 0.0

    def rows_copied(self, seq: SequenceState, sources: Iterable[int]) -> None:
        with self._lock:
            self._copied.setdefault(seq, set()).update(sources)

    def told(self, seq: SequenceState) -> None:
        """The daemon knows that the rows of this sequence have been copied."""
        with self._lock:
            self._copied.pop(seq, None)

    def untold(self, seq: SequenceState) -> list[SequenceState]:
        """Whose copies the daemon has to be told of before this sequence's pages change hands: those that copied from
        its pages, and itself. Also those that have been given up, as long as the daemon holds them for us: a free may
        still wait for its event. Who has yet to copy other rows says so himself, when he has."""
        pages, session = set(seq.page_table.tolist()), seq.session
        with self._lock:
            copied = [one for one, sources in self._copied.items() if one is seq or not pages.isdisjoint(sources)]
        return [one for one in copied if one in session.sequences and not one.copy_rows]

    def make(self, session: Session, grant: Grant) -> SequenceState:
        """A sequence as the shell's callers see it."""
        return SequenceState(self, session, grant)
