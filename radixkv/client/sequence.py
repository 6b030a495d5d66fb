"""What the client knows about a sequence, and how each reply changes it. No I/O.

All numbers of a sequence stand in one immutable ``Facts``; a reply replaces it as a whole, so that another thread
never sees half a change. Arrays once handed out never change: a new page table is a new array.
"""

from __future__ import annotations

import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.client.session import Memory, Pages, Session
from radixkv.client.tokens import unpack
from radixkv.commands import NO_RANGE, CopyRow, Kept, Loaded, Range, Shared, Truncated
from radixkv.errors import CopyFailed, RadixKVError, SessionLost
from radixkv.types import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.client.batch import Outgoing
    from radixkv.client.pool import PoolState
    from radixkv.client.suspend import Suspension

PAGE_ID = np.dtype("<i4")


class Grant(NamedTuple):
    """What a reply says about a sequence that has just come into this client's hands."""

    id: int
    namespace: bytes
    """Canonical."""
    tokens: bytes
    page_table: bytes
    committed_tokens: int
    cached_tokens: int
    writable_from_tokens: int
    copy_rows: list[CopyRow]
    copy: bool
    """Whether the library is to carry out the copy_rows, where it can."""
    loading: Range = NO_RANGE


class Facts(NamedTuple):
    page_table: Pages
    generations: NDArray[Any]
    """Of the pages in the table, as they were when the sequence got them."""
    length: int
    committed: int
    cached: int
    writable_from: int
    copy_rows: tuple[CopyRow, ...]


class SequenceState:
    """One request's tokens and pages in the daemon, as far as replies have told.

    A shell derives from this and adds the verbs. Attributes are read-only for callers.
    """

    __slots__ = (
        "__weakref__", "_tokens", "arriving", "broken", "closed", "copies_made", "deferred_error", "facts", "id",
        "lock", "memory", "namespace", "pool", "session", "sound", "suspended", "unsettled",
    )  # fmt: skip

    def __init__(self, pool: PoolState, session: Session, grant: Grant) -> None:
        self.closed = True
        """Freed, handed off or never begun: no verb may name it any more. True until it is complete."""
        self.pool = pool
        self.session = session
        self.id = grant.id
        """Unique within the session, never used twice."""
        self.namespace = grant.namespace
        self.memory: Memory = session.memory(pool.name)
        self.lock = threading.RLock()
        """Held by the shell while a verb on this sequence runs."""
        self.sound = True
        """The recorded generations are ours: the daemon that granted the pages had not been replaced, and still knew
        the session, when they were read; or the next one has confirmed them."""
        self.unsettled: list[Outgoing] = []
        """Requests without an answer in time: whether they were executed has to be asked before the next one."""
        self.broken: RadixKVError | None = None
        """Why the sequence's state can no longer be known."""
        self.deferred_error: RadixKVError | None = None
        """Of an operation that went out later than its call; raised by the next call."""
        self.copies_made = False
        """The caller has said so of ``copy_rows`` while the daemon that held their source lived; no answer yet."""
        self.suspended: Suspension | None = None
        """What a resume needs, between it and the suspend; the daemon knows nothing of the sequence meanwhile."""
        self.arriving = Loaded(0, grant.loading) if grant.loading[1] else None
        """What was told last of pages that are still being loaded; None: all are there."""
        self._tokens = bytearray(grant.tokens)
        table = as_pages(grant.page_table)
        self.facts = Facts(
            page_table=table,
            generations=self._generations(table),
            length=len(grant.tokens) // TOKEN_BYTES,
            committed=grant.committed_tokens,
            cached=grant.cached_tokens,
            writable_from=grant.writable_from_tokens,
            copy_rows=self._carried_out(grant.copy_rows, grant.copy),
        )
        self.closed = False
        session.sequences.add(self)

    # -- what callers read ----------------------------------------------------------------------------------------

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """The tokens the daemon knows, a read-only copy."""
        return unpack(self._tokens[: self.facts.length * TOKEN_BYTES])

    @property
    def length(self) -> int:
        """Tokens known to the daemon."""
        return self.facts.length

    @property
    def committed_tokens(self) -> int:
        """Tokens whose KV is complete, counted from token 0; may end inside a page."""
        return self.facts.committed

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that need not be computed, at most length - 1."""
        facts = self.facts
        return min(facts.cached, max(0, facts.length - 1))

    @property
    def writable_from_tokens(self) -> int:
        """Positions before this one lie in shared pages and are read-only."""
        return self.facts.writable_from

    @property
    def copy_rows(self) -> list[CopyRow]:
        """(source page, target page, rows) that the caller has to copy before use; empty if the library did."""
        return list(self.facts.copy_rows)

    @property
    def page_table(self) -> Pages:
        """Read-only int32; entry i holds tokens [i * page_size, (i + 1) * page_size). Never changes; a verb that
        changes pages makes a new one."""
        return self.facts.page_table

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the page table has room for."""
        return len(self.facts.page_table) * self.memory.spec.page_size

    @property
    def loading(self) -> tuple[int, ...]:
        """Entries of the page table that are still being loaded from the host tier; empty: all are there.

        There are some only after ``reserve(wait_loaded=False)``; ``wait_loaded`` says what of them may be read when.
        """
        arriving = self.arriving
        if arriving is None:
            return ()
        first, count = arriving.loading
        return tuple(range(first, first + count))

    def has_loaded(self, layer: int | None) -> bool:
        """Is this layer (None: are all) of all pages known to be there?"""
        arriving = self.arriving
        return arriving is None or (layer is not None and layer < arriving.layers)

    # -- what replies change --------------------------------------------------------------------------------------

    def committed_to(self, n: int) -> None:
        """Complete up to n; the copies have been made, their sources are no longer held."""
        page = self.memory.spec.page_size
        table, generations, length, committed, cached, writable, _ = self.facts
        self.facts = Facts(table, generations, length, max(committed, n), cached, max(writable, n // page * page), ())

    def rows_copied(self) -> None:
        self.facts = self.facts._replace(copy_rows=())

    def said_copied(self) -> None:
        if self.facts.copy_rows and self.session.daemon_lives():
            self.copies_made = True

    def rows_to_claim(self) -> list[CopyRow]:
        """Those whose source the next daemon has to hold."""
        return [] if self.copies_made else list(self.facts.copy_rows)

    def extended_by(self, tokens: bytes, pages: bytes) -> None:
        self._tokens += tokens
        table, generations, _, committed, cached, writable, rows = self.facts
        if pages:
            new = as_pages(pages)
            table = _frozen(np.concatenate((table, new)))
            generations = np.concatenate((generations, self._generations(new)))
        length = len(self._tokens) // TOKEN_BYTES
        self.facts = Facts(table, generations, length, committed, cached, writable, rows)

    def truncated_to(self, n: int, reply: Truncated, copy: bool) -> None:
        page = self.memory.spec.page_size
        facts = self.facts
        table, generations = facts.page_table[: reply.kept_pages], facts.generations[: reply.kept_pages]
        # A page that was given up may come back at once, as the tail: with other rows to be copied into it.
        kept = table[:-1] if reply.tail else table
        left = tuple(row for row in facts.copy_rows if row[1] in kept)
        if reply.tail:
            tail = as_pages(reply.tail)
            table = _frozen(np.concatenate((table[:-1], tail)))
            generations = np.concatenate((generations[:-1], self._generations(tail)))
        self.copies_made = self.copies_made and not reply.copy_rows
        self.facts = Facts(
            page_table=table,
            generations=generations,
            length=n,
            committed=min(facts.committed, n),
            cached=min(facts.cached, n),
            writable_from=min(facts.writable_from, n // page * page),
            # Given up meanwhile, its pages may be another's by the time that this answer is read.
            copy_rows=self._carried_out([*left, *reply.copy_rows], copy and not self.closed),
        )
        del self._tokens[n * TOKEN_BYTES :]

    def loaded(self, reply: Loaded) -> None:
        self.arriving = reply if reply.loading[1] else None

    def not_loaded(self, error: CopyFailed) -> None:
        """And never will be: the pages may be another's by now."""
        self.broken = error
        self.sound = False

    def compacted_to(self, page_table: bytes) -> None:
        table = as_pages(page_table)
        self.facts = self.facts._replace(page_table=table, generations=self._generations(table))

    def given_up(self) -> None:
        """The daemon no longer holds it for us: freed, or handed off."""
        self.closed = True
        self.session.sequences.discard(self)

    def go_on_as(self, again: SequenceState) -> None:
        """What was granted anew is this sequence now."""
        names = "_tokens", "arriving", "broken", "copies_made", "facts", "id", "memory", "session", "sound", "unsettled"
        for name in names:
            setattr(self, name, getattr(again, name))
        again.given_up()
        self.session.sequences.add(self)
        self.suspended = None
        self.closed = False

    def kept(self, reply: Kept) -> None:
        """The next daemon goes on with it, and holds the source of the rows that were claimed. If it knows of more that
        is complete, a commit of ours that was not answered has been executed, and the copies before it were made."""
        facts = self.facts
        grown = reply.committed_tokens > facts.committed
        self.facts = facts._replace(
            committed=max(facts.committed, reply.committed_tokens),
            writable_from=max(facts.writable_from, reply.writable_from_tokens),
            copy_rows=() if grown or self.copies_made else facts.copy_rows,
        )
        self.sound = True
        self.arriving = None  # what was still being loaded could not have been proven

    def lose(self, why: str) -> None:
        """The next daemon could not confirm that all these pages are ours. The others of the session go on."""
        self.broken = SessionLost(why, seq=self.id)
        self.sound = False
        self.session.sequences.discard(self)

    def hears(self, error: BaseException | None) -> None:
        """What the caller is told. Whoever knows that it is lost has nothing left to free: that is a no-op then."""
        if isinstance(error, SessionLost) and (self.session.over or self.lost):
            self.closed = True

    @property
    def lost(self) -> SessionLost | None:
        """Why, if it did not outlive a daemon although its session did."""
        return self.broken if isinstance(self.broken, SessionLost) else None

    def packed_tokens(self) -> bytes:
        return bytes(self._tokens[: self.facts.length * TOKEN_BYTES])

    def child(self, identity: int, place: int, reply: Shared, copy: bool) -> SequenceState:
        """Number ``place`` of the children that a share made."""
        tail = reply.tails[place * PAGE_ID.itemsize : (place + 1) * PAGE_ID.itemsize]
        shared = self.facts.page_table[: reply.shared_pages].tobytes()
        rows = [row for row in reply.copy_rows if row[1] in as_pages(tail)]
        grant = Grant(
            id=identity,
            namespace=self.namespace,
            tokens=bytes(self._tokens[: reply.at * TOKEN_BYTES]),
            page_table=shared + tail,
            committed_tokens=reply.at,
            cached_tokens=reply.at,
            writable_from_tokens=reply.shared_pages * self.memory.spec.page_size,
            copy_rows=rows,
            copy=copy,
        )
        return self.pool.make(self.session, grant)

    def intact(self) -> bool:
        """Are all pages in the table still those that were granted, and the session the same? One numpy comparison."""
        facts = self.facts
        if self.closed or self.session.over or not self.sound:
            return False
        if facts.copy_rows and not self.session.daemon_lives():
            return False  # nobody holds what is still to be copied
        same = np.array_equal(self.memory.generations(facts.page_table), facts.generations)
        return same and self.memory.knows(self.session)

    def _generations(self, pages: Pages) -> NDArray[Any]:
        """Read the generations, then see that nobody can have changed them meanwhile: neither a daemon that ended the
        session nor one that came after it. Only then are they those we were granted."""
        generations = self.memory.generations(pages)
        if not self.memory.knows(self.session):
            self.sound = False
        self._daemon_lives()
        return generations

    def _daemon_lives(self) -> bool:
        """False: what was just read or copied may be another daemon's doing. The next one decides (``kept``)."""
        if self.session.daemon_lives():
            return True
        self.sound = False
        self.pool.core.left(self.session, self.session.epoch)
        return False

    def _carried_out(self, rows: list[CopyRow], copy: bool) -> tuple[CopyRow, ...]:
        if rows and copy and self.memory.copy_rows(rows) and self._daemon_lives():
            self.pool.rows_copied(self, [source for source, _, _ in rows])
            return ()
        return tuple(rows)

    def __repr__(self) -> str:
        facts = self.facts
        lost = self.session.over or self.lost is not None
        over = "suspended" if self.suspended else "closed" if self.closed else "lost" if lost else ""
        state = over or f"{len(facts.page_table)} pages"
        return (
            f"<Sequence {self.id} in {self.pool.name!r}: {facts.length} tokens, {facts.committed} committed, {state}>"
        )

    def __del__(self) -> None:
        """Collected without free: freed with the next message. Any thread may run this, so it only appends."""
        if getattr(self, "closed", True) or self.session.over or self.lost or sys.is_finalizing():
            return
        self.pool.core.outbox.drop(self.session, self.id)
        warnings.warn(f"{self!r} was collected without free()", ResourceWarning, stacklevel=2, source=self)


def as_pages(packed: bytes) -> Pages:
    """Read-only int32 array of packed page ids."""
    return np.frombuffer(packed, PAGE_ID)


def _frozen(pages: Pages) -> Pages:
    pages.setflags(write=False)
    return pages
