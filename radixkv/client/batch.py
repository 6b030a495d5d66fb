"""Operations on sequences, the messages that they travel in, and what the answers change.

Which go together in a message, and in which order messages leave, is in ``packing.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from radixkv.client.sequence import SequenceState
from radixkv.commands import (
    Body,
    Commit,
    Compact,
    Compacted,
    Extend,
    Failure,
    Free,
    Handoff,
    Reply,
    Request,
    Share,
    Shared,
    Step,
    Stepped,
    Truncate,
    Truncated,
)
from radixkv.errors import (
    BadRequest,
    CopyFailed,
    RadixKVError,
    SessionLost,
    StaleHandle,
    Timeout,
    VersionMismatch,
    from_code,
)

BITS_SHOWN = 128
"""Of a number that is refused; of a larger one only its size is said."""


def as_error(failure: Failure) -> RadixKVError:
    return from_code(failure.code, failure.message, failure.details)


class Item:
    """One operation on one sequence and, once answered, what came of it: ``error``, or None and ``value``."""

    __slots__ = ("error", "seq", "value")

    field: ClassVar[str] = ""
    """The list of a Step it travels in; "" if it is a message of its own."""
    rank: ClassVar[int] = 0
    """The place of that list in a Step's order."""

    def __init__(self, seq: SequenceState) -> None:
        self.seq = seq
        self.value: Any = None
        self.error: RadixKVError | None = None

    @property
    def record(self) -> Any:
        """What travels."""
        raise NotImplementedError

    def leaves(self) -> None:
        """It is about to be sent: what the caller gave its word for by asking is so, whether or not it is answered."""

    def apply(self, result: Any) -> None:
        """Change the sequence as a good answer says."""

    def settle(self, result: Any) -> None:
        if isinstance(result, Failure):
            self.error = self.seq.broken or as_error(result)
            if isinstance(self.error, CopyFailed):
                self.seq.not_loaded(self.error)
        else:
            self.error = None
            self.apply(result)

    def outcome(self) -> Any:
        """The value, or raise the error."""
        if self.error is not None:
            self.seq.hears(self.error)
            raise self.error
        return self.value

    def _free_later(self) -> None:
        outbox = self.seq.pool.core.outbox
        outbox.drop(self.seq.session, self.seq.id)
        outbox.press()


class CopiedItem(Item):
    __slots__ = ()
    field, rank = "copied", 0

    @property
    def record(self) -> int:
        return self.seq.id

    def leaves(self) -> None:
        self.seq.said_copied()

    def apply(self, result: Any) -> None:  # noqa: ARG002 - the answer says nothing more
        self.seq.rows_copied()


class ToldItem(CopiedItem):
    """The library's own word that it has copied the rows. Nobody asked for it: what becomes of it is nobody's error."""

    __slots__ = ()

    def leaves(self) -> None:
        """Its rows are none of those that the caller has yet to copy."""

    def settle(self, result: Any) -> None:
        self.error = None
        if not isinstance(result, Failure):
            self.seq.pool.told(self.seq)


class FreeItem(Item):
    __slots__ = ("commit",)
    field, rank = "free", 1

    def __init__(self, seq: SequenceState, commit: int = 0) -> None:
        """``commit``: the first n tokens are complete, before the sequence is given up."""
        super().__init__(seq)
        self.commit = natural("commit", commit)

    @property
    def record(self) -> Free:
        return Free(self.seq.id, self.commit)

    def settle(self, result: Any) -> None:
        super().settle(result)
        # It came too late and was not executed; or nobody knows whether it was.
        if isinstance(self.error, Timeout) or (self.error is not None and self.seq.broken is not None):
            self._free_later()
        else:
            self.seq.given_up()


class TruncateItem(Item):
    __slots__ = ("copy", "n")
    field, rank = "truncate", 2

    def __init__(self, seq: SequenceState, n: int, copy: bool = True) -> None:
        super().__init__(seq)
        self.n = natural("truncate", n)
        self.copy = copy

    @property
    def record(self) -> Truncate:
        return Truncate(self.seq.id, self.n)

    def apply(self, result: Truncated) -> None:
        # A later one on its way may have given up the target: then the last of them copies what is left.
        last = not self.seq.pool.core.outbox.truncates_after(self)
        self.seq.truncated_to(self.n, result, self.copy and last)


class CommitItem(Item):
    __slots__ = ("n",)
    field, rank = "commit", 3

    def __init__(self, seq: SequenceState, n: int) -> None:
        super().__init__(seq)
        self.n = natural("commit", n)

    @property
    def record(self) -> Commit:
        return Commit(self.seq.id, self.n)

    def leaves(self) -> None:
        if self.seq.facts.committed <= self.n <= self.seq.facts.length:
            self.seq.said_copied()

    def apply(self, result: Any) -> None:  # noqa: ARG002 - the answer says nothing more
        self.seq.committed_to(self.n)


class ExtendItem(Item):
    __slots__ = ("headroom", "tokens")
    field, rank = "extend", 4

    def __init__(self, seq: SequenceState, tokens: bytes, headroom: int) -> None:
        super().__init__(seq)
        self.tokens = tokens
        self.headroom = natural("headroom_tokens", headroom)

    @property
    def record(self) -> Extend:
        return Extend(self.seq.id, self.tokens, self.headroom)

    def apply(self, result: bytes) -> None:
        self.seq.extended_by(self.tokens, result)


class ShareItem(Item):
    """``value``: the children. ``first_child`` begins a run of ids nobody else gets."""

    __slots__ = ("at", "copy", "count", "first_child")
    field, rank = "share", 5

    def __init__(self, seq: SequenceState, at: int | None, count: int, copy: bool = True) -> None:
        super().__init__(seq)
        self.at = None if at is None else natural("at", at)
        self.count = natural("count", count)
        self.copy = copy
        self.first_child = 0

    @property
    def record(self) -> Share:
        return Share(self.seq.id, self.at, self.count, self.first_child)

    def apply(self, result: Shared) -> None:
        self.value = [self.seq.child(self.first_child + i, i, result, self.copy) for i in range(self.count)]


class HandoffItem(Item):
    __slots__ = ("ticket", "ttl_s")
    rank = 6

    def __init__(self, seq: SequenceState, ticket: bytes, ttl_s: float) -> None:
        super().__init__(seq)
        self.ticket = self.value = ticket
        self.ttl_s = ttl_s

    @property
    def record(self) -> Handoff:
        return Handoff(self.seq.id, self.ticket, self.ttl_s)

    def apply(self, result: Any) -> None:  # noqa: ARG002 - the answer says nothing more
        self.seq.given_up()

    def settle(self, result: Any) -> None:
        super().settle(result)
        if self.error is not None and self.seq.closed:  # it was fenced: nobody can free it any more
            self._free_later()


class CompactItem(Item):
    __slots__ = ()
    rank = 6

    @property
    def record(self) -> Compact:
        return Compact(self.seq.id)

    def apply(self, result: Compacted) -> None:
        self.seq.compacted_to(result.page_table)


class Part:
    """A message and what its answer leads to."""

    __slots__ = ()

    def body(self) -> Body:
        raise NotImplementedError

    def settle(self, reply: Reply) -> None:
        """The one place where an answer changes what is known. Called once, under the core's lock."""
        raise NotImplementedError

    def makes(self) -> list[int]:
        """Ids of the sequences that it may make."""
        return []


class Batch(Part):
    """The items of one message: a Step, or the one item that is a message of its own."""

    __slots__ = ("dropped", "items")

    def __init__(self, dropped: Iterable[int] = ()) -> None:
        self.items: list[Item] = []
        self.dropped = list(dropped)
        """Ids nobody holds any more; freed first, whatever the answer."""

    def body(self) -> Body:
        if self.items and not self.items[0].field:
            return self.items[0].record  # type: ignore[no-any-return]
        lists: dict[str, list[Any]] = {"free": [Free(seq) for seq in self.dropped]} if self.dropped else {}
        for item in self.items:
            lists.setdefault(item.field, []).append(item.record)
        return Step(**lists)

    def makes(self) -> list[int]:
        shares = [item for item in self.items if isinstance(item, ShareItem)]
        return [child for item in shares for child in range(item.first_child, item.first_child + item.count)]

    def settle(self, reply: Reply) -> None:
        """Give each item its result; a Failure of the whole message is everybody's."""
        if not isinstance(reply, Stepped):
            for item in self.items:
                item.settle(reply)
            return
        results = {name: iter(getattr(reply, name)) for name in Stepped.__struct_fields__}
        try:
            for _ in self.dropped:
                next(results["free"])
            for item in self.items:
                item.settle(next(results[item.field]))
        except StopIteration:
            raise VersionMismatch("the daemon's answer has fewer results than the message had items") from None


class Outgoing:
    """A message on its way: settled when the reply comes, whichever thread reads it."""

    __slots__ = ("__weakref__", "deferred", "part", "repeated", "reply", "request")

    def __init__(self, request: Request, part: Part | None = None, deferred: bool = False) -> None:
        self.request = request
        self.part = part
        self.deferred = deferred
        """It comes from the outbox: its errors surface at the next call on their sequences."""
        self.repeated = False
        """It has been sent a second time."""
        self.reply: Reply | None = None

    def settle(self, reply: Reply) -> None:
        """Once: a second reply (of a repeat) changes nothing."""
        if self.reply is not None:
            return
        self.reply = reply
        for seq in self.certain():
            self._distrust(seq, reply)
        if self.part is not None:
            self.part.settle(reply)

    def doubtful(self) -> None:
        """No answer came in time: whether it was executed is not known."""
        for item in self.batch.items if self.batch is not None else ():
            if self not in item.seq.unsettled:
                item.seq.unsettled.append(self)

    def certain(self) -> list[SequenceState]:
        """It is in doubt no longer. For which sequences it was."""
        items = self.batch.items if self.batch is not None else ()
        doubted = list(dict.fromkeys(item.seq for item in items if self in item.seq.unsettled))
        for seq in doubted:
            seq.unsettled.remove(self)
        return doubted

    @property
    def batch(self) -> Batch | None:
        return self.part if isinstance(self.part, Batch) else None

    def _distrust(self, seq: SequenceState, reply: Reply) -> None:
        """A repeat that is refused as too old: what the sequence is in the daemon cannot be found out any more."""
        if self.repeated and isinstance(reply, Failure) and reply.code == BadRequest.code:
            seq.broken = StaleHandle("whether its last request was executed is not known any more", seq=seq.id)


def not_executed(reply: Reply) -> bool:
    """The message came too late; or it is a repeat that came too late to be told what the first one did."""
    return isinstance(reply, Failure) and reply.code in (Timeout.code, BadRequest.code)


def lost(reply: Reply) -> bool:
    return isinstance(reply, Failure) and reply.code == SessionLost.code


def natural(name: str, value: Any) -> int:
    """A whole number from 0. Errors: BadRequest."""
    if type(value) is int and 0 <= value < 2**63:
        return value
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        raise BadRequest(f"{name} is a whole number, not {value!r}") from None
    if not 0 <= number < 2**63:
        shown = {"value": number} if number.bit_length() <= BITS_SHOWN else {"bits": number.bit_length()}
        raise BadRequest(f"{name} is from 0 to 2^63 - 1", **shown)
    return int(number)
