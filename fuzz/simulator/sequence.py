"""A sequence and a pool as the simulator's workers hold them: the client library's own, and what is in the pages.

``check`` is the point of it all: whatever rows the client says are there must hold the tokens' path, or ``intact()``
(``valid()`` of the public API), asked after the read, must say no, and never yes again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.model.mismatch import Mismatch, require
from fuzz.simulator.stage import Stage
from radixkv.client.core import Core
from radixkv.client.pool import PoolState
from radixkv.client.sequence import Facts, Grant, SequenceState
from radixkv.client.session import Session
from radixkv.commands import CopyRow, Kept, Truncated

if TYPE_CHECKING:
    from fuzz.simulator.client import Mapped
    from fuzz.simulator.device import Job


class Sequence(SequenceState):
    """``written``: leading tokens whose KV is in the pages, as this worker knows it; ``job``: what its device does.

    ``asked``: how many tokens a commit has been asked for, also one that waits for its fence. ``doubtful``: a daemon
    died that may have given up pages of it.
    """

    __slots__ = ("_copied", "asked", "busy", "doubtful", "job", "stage", "was_wrong", "written")

    memory: Mapped

    def __init__(self, pool: Pool, session: Session, grant: Grant) -> None:
        super().__init__(pool, session, grant)
        self.stage = pool.stage
        self.written = self.committed_tokens
        self.asked = self.written
        self.job: Job | None = None
        self.busy = True  # until the verb that asked for it has returned it
        self.doubtful = False
        self.was_wrong = False
        self._copied: set[CopyRow] = set()

    def __del__(self) -> None:
        """Does nothing: when Python collects it is no event of this world."""

    def truncated_to(self, n: int, reply: Truncated, copy: bool) -> None:
        super().truncated_to(n, reply, copy)
        self.written, self.asked = min(self.written, n), min(self.asked, n)
        self.was_wrong = False  # these are other pages; they are read anew

    def compacted_to(self, page_table: bytes) -> None:
        super().compacted_to(page_table)
        self.was_wrong = False

    def kept(self, reply: Kept) -> None:
        super().kept(reply)
        self.doubtful = False
        if self.session.daemon_lives() and not self.closed:
            require("I4", self.intact(), f"sequence {self.id} of session {self.session.id} was kept and is not valid")
        self.stage.note("kept", f"sequence {self.id} of session {self.session.id}")

    def lose(self, why: str) -> None:
        super().lose(why)
        self.stage.note("claim refused", f"sequence {self.id} of session {self.session.id}: {why}")
        self.stage.events["claim refused while a device writes"] += self.job is not None

    # -- rows that the caller has to copy -------------------------------------------------------------------------

    def rows_to_copy(self) -> list[CopyRow]:
        self._copied.intersection_update(self.copy_rows)
        return [row for row in self.copy_rows if row not in self._copied]

    def copy_now(self) -> None:
        rows = self.rows_to_copy()
        self.memory.arena.copy_rows(rows, f"sequence {self.id} of session {self.session.id}")
        self._copied.update(rows)

    # -- what is in the pages -------------------------------------------------------------------------------------

    def expected(self, n: int) -> list[int]:
        """The paths that the rows of the first n tokens should hold."""
        scope = self.memory.scopes.of(self.session.id, self.id)
        return self.stage.paths.of(scope, self.tokens[:n].tolist())

    def check(self) -> None:
        """Read all that should be there; then ask whether it may be used. Raises Mismatch (I4)."""
        facts: Facts = self.facts
        readable = self.written if not self.rows_to_copy() else min(self.written, facts.writable_from)
        wrong = self._wrong(facts, self.expected(readable))
        valid = self.intact()
        if valid and (wrong or self.was_wrong):
            raise Mismatch(
                "I4",
                f"sequence {self.id} of session {self.session.id} is called valid, pages {facts.page_table.tolist()}, "
                f"tokens {self.tokens.tolist()}: {wrong or 'it was wrong before'}",
            )
        self.was_wrong = self.was_wrong or bool(wrong)
        self.stage.events["read"] += 1
        self.stage.events["read, right" if valid else "read, refused"] += 1
        if wrong:
            self.stage.note("read, overwritten", f"sequence {self.id}: {wrong}")

    def _wrong(self, facts: Facts, expected: list[int]) -> str:
        """Pages that are still loading are read as far as they are known to be there: so many layers of them."""
        arena, size = self.memory.arena, self.memory.spec.page_size
        arriving = self.arriving
        if arriving is None:
            return arena.wrong(facts.page_table, expected)
        first, count = arriving.loading
        parts: list[tuple[int, int, int | None]] = [(0, first, None), (first + count, len(facts.page_table), None)]
        if arriving.layers:
            parts.append((first, first + count, arriving.layers))
            self.stage.events["read by layer"] += 1
        wrongs = [
            arena.wrong(facts.page_table[begin:end], expected[begin * size : end * size], layers)
            for begin, end, layers in parts
        ]
        return next(filter(None, wrongs), "")


class Pool(PoolState):
    """Keeps its sequences until they are given up, so that nothing depends on when Python collects them."""

    def __init__(self, core: Core, stage: Stage, name: str) -> None:
        super().__init__(core, name)
        self.stage = stage
        self.sequences: list[Sequence] = []

    def make(self, session: Session, grant: Grant) -> Sequence:
        made = Sequence(self, session, grant)
        self.sequences.append(made)
        self.stage.events["cached tokens"] += made.cached_tokens
        made.check()
        return made
