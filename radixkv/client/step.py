"""``pool.step``: a batch of operations of many sequences in one round trip.

Order. All truncates are carried out before all commits, these before all extends, these before all shares. Frees go
first, so that what they give back is there for the rest; only the free of a sequence that also appears elsewhere goes
last, in a second message (freeing it first could not be meant). An item with an event that is not done, and one whose
sequence has others queued, is deferred: its result is None, its error surfaces at the sequence's next call. Only a
truncate whose sequence the same step extends or shares is waited for, as ``Sequence.extend`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from radixkv.client.asking import deliver, done, drain, ready, settle_truncates, whole
from radixkv.client.batch import CommitItem, ExtendItem, FreeItem, Item, ShareItem, TruncateItem, as_error
from radixkv.client.core import Core
from radixkv.client.effects import NeedSession, Synchronize, Verb
from radixkv.client.outbox import Event
from radixkv.client.sequence import SequenceState
from radixkv.client.session import Session
from radixkv.client.tokens import pack
from radixkv.commands import Failure
from radixkv.errors import BadRequest, RadixKVError

PAIR = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments of a step, as the caller gave them."""

    free: Iterable[Any] = ()
    truncate: Mapping[Any, Any] | None = None
    commit: Mapping[Any, Any] | None = None
    extend: Mapping[Any, Any] | None = None
    share: Mapping[Any, Any] | None = None
    copy: bool = True

    def sequences(self) -> list[SequenceState]:
        """Each sequence once, by id: the order in which a shell locks them."""
        named = [_pair(entry)[0] for entry in self.free]
        for mapping in (self.truncate, self.commit, self.extend, self.share):
            named += mapping or ()
        return sorted({seq for seq in named if isinstance(seq, SequenceState)}, key=lambda seq: seq.id)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Mirrors the arguments: None, the children of a share, or the exception object of an item that failed."""

    free: list[Any]
    truncate: dict[Any, Any]
    commit: dict[Any, Any]
    extend: dict[Any, Any]
    share: dict[Any, Any]

    def __getitem__(self, name: str) -> Any:
        if name not in {field.name for field in fields(self)}:
            raise KeyError(name)
        return getattr(self, name)

    @property
    def errors(self) -> list[RadixKVError]:
        """All exceptions among the results."""
        values = [*self.free, *self.truncate.values(), *self.commit.values(), *self.extend.values()]
        return [value for value in (*values, *self.share.values()) if isinstance(value, RadixKVError)]


@dataclass(slots=True)
class _Entry:
    """One item of the plan and its way into the result: an item to send, or the result it has already."""

    seq: SequenceState
    item: Item | None = None
    event: Event | None = None
    result: Any = None
    cut: _Entry | None = None
    """Of an extend or share: the truncate of the same step, if that has to wait. It comes first all the same."""

    def outcome(self) -> Any:
        if self.item is None or self.item.error is None:
            return self.result if self.item is None else self.item.value
        self.seq.hears(self.item.error)
        return self.item.error


def step(core: Core, plan: Plan) -> Verb[StepResult]:
    """Raises only when the whole message failed."""
    lists = {
        "free": _frees(plan.free),
        "truncate": _entries(plan.truncate, lambda seq, n: TruncateItem(seq, n, plan.copy)),
        "commit": _entries(plan.commit, CommitItem),
        "extend": [_entry(seq, None, _extend, given) for seq, given in (plan.extend or {}).items()],
        "share": [_entry(seq, None, _share(plan.copy), given) for seq, given in (plan.share or {}).items()],
    }
    session: Session = yield NeedSession()
    _behind_truncates(core, lists)
    verdicts: dict[SequenceState, RadixKVError | None] = {}
    for name, entries in lists.items():
        for entry in entries:
            if entry.item is not None and not _stands(core, session, entry, verdicts.get(entry.seq)):
                verdict = verdicts.get(entry.seq)
                verdicts[entry.seq] = yield from _examine(core, session, name, entry, verdict)
    items = _now(core, _in_order(lists))
    for item in items:
        if isinstance(item, ShareItem):
            item.first_child = core.sequence_ids(item.count)
        elif isinstance(item, FreeItem):
            item.seq.closed = True
    replies = (yield from deliver(session, items)) if items else []
    failures = [reply for reply in replies if isinstance(reply, Failure)]
    if failures and len(failures) == len(replies):
        error = as_error(failures[0])
        for item in items:
            item.seq.hears(error)
        raise error
    return StepResult(
        free=[entry.outcome() for entry in lists["free"]],
        **{name: {entry.seq: entry.outcome() for entry in lists[name]} for name in lists if name != "free"},
    )


def _behind_truncates(core: Core, lists: dict[str, list[_Entry]]) -> None:
    waiting = {
        entry.seq: entry
        for entry in lists["truncate"]
        if entry.item is not None and (core.outbox.behind(entry.seq) or not done(entry.event))
    }
    for entry in (*lists["extend"], *lists["share"]) if waiting else ():
        entry.cut = waiting.get(entry.seq)


def _stands(core: Core, session: Session, entry: _Entry, verdict: RadixKVError | None) -> bool:
    """The usual case, told without asking anybody: nothing is in the way of this item."""
    seq = entry.seq
    clear = seq.session is session and not (seq.closed or seq.unsettled or seq.broken or seq.deferred_error)
    held_back = isinstance(entry.item, ExtendItem | ShareItem) and (entry.cut or core.outbox.truncates(seq))
    if seq.arriving is not None and isinstance(entry.item, CommitItem | TruncateItem | ShareItem):
        return False
    return clear and verdict is None and not held_back


def _examine(
    core: Core, session: Session, name: str, entry: _Entry, verdict: RadixKVError | None
) -> Verb[RadixKVError | None]:
    """What stands against this item; it becomes the item's result. A sequence's free is carried out all the same."""
    seq = entry.seq
    if name == "free" and seq.closed:
        entry.item = None  # freed already: no-op
        return verdict
    error = verdict or (yield from _verdict(core, entry, name))
    if error is None:
        return None
    entry.result = error
    goes_on = name == "free" and seq.pool.core is core and seq.session is session and not seq.closed
    entry.item = _FreeAfter(seq, error) if goes_on else None
    return error


class _FreeAfter(FreeItem):
    """A free that is carried out although an earlier operation's error is its result."""

    __slots__ = ("earlier",)

    def __init__(self, seq: SequenceState, earlier: RadixKVError) -> None:
        super().__init__(seq)
        self.earlier = earlier

    def settle(self, result: Any) -> None:
        super().settle(result)
        self.error = self.error or self.earlier


def _verdict(core: Core, entry: _Entry, name: str) -> Verb[RadixKVError | None]:
    seq = entry.seq
    if seq.pool.core is not core:
        return BadRequest("the sequence belongs to another client", seq=seq.id)
    try:
        session = yield from (ready(seq) if name in ("free", "extend") else whole(core, seq))
        if name in ("extend", "share"):
            yield from settle_truncates(core, session, seq)
        if entry.cut is not None:
            yield from drain(core, session, seq)
            if entry.cut.event is not None:
                yield Synchronize(entry.cut.event)
    except RadixKVError as error:
        return error
    return None


def _in_order(lists: dict[str, list[_Entry]]) -> list[_Entry]:
    """Frees first, but last for sequences that other items name too."""
    others = [entry for name, entries in lists.items() if name != "free" for entry in entries]
    named = {entry.seq for entry in others}
    last = [entry for entry in lists["free"] if entry.seq in named]
    return [entry for entry in lists["free"] if entry.seq not in named] + others + last


def _now(core: Core, entries: list[_Entry]) -> list[Item]:
    """The items to send now; the others are put behind their events."""
    items = []
    waiting: set[SequenceState] = set()
    for entry in entries:
        item = entry.item
        if item is None:
            continue
        free_to_go = isinstance(item, ExtendItem | ShareItem)
        behind = entry.seq in waiting or core.outbox.behind(entry.seq)
        if free_to_go or not (behind or not done(entry.event)):
            items.append(item)
            continue
        waiting.add(entry.seq)
        if isinstance(item, FreeItem):
            entry.seq.closed = True
        core.outbox.defer(item, entry.event)
        entry.item = None
    return items


# -- reading the arguments ----------------------------------------------------------------------------------------


def _pair(given: Any) -> tuple[Any, Any]:
    """``x`` or ``(x, event)``."""
    if isinstance(given, tuple) and len(given) == PAIR:
        return given
    return given, None


def _frees(given: Iterable[Any]) -> list[_Entry]:
    """Freeing twice is a no-op, also within one step: the first of them counts."""
    entries = [_entry(*_pair(one), _free) for one in given]
    seen: set[SequenceState] = set()
    for entry in entries:
        if entry.seq in seen:
            entry.item = None
        seen.add(entry.seq)
    return entries


def _entries(given: Mapping[Any, Any] | None, make: Callable[[SequenceState, Any], Item]) -> list[_Entry]:
    entries = []
    for seq, argument in (given or {}).items():
        n, event = _pair(argument)
        entries.append(_entry(seq, event, make, n))
    return entries


def _entry(seq: Any, event: Event | None, make: Callable[..., Item], *arguments: Any) -> _Entry:
    """Arguments that can never be right fail their own item, not the others."""
    if not isinstance(seq, SequenceState):
        raise BadRequest(f"step takes sequences, not {type(seq).__name__}")
    try:
        return _Entry(seq, make(seq, *arguments), event)
    except RadixKVError as error:
        return _Entry(seq, result=error)


def _free(seq: SequenceState) -> Item:
    return FreeItem(seq)


def _extend(seq: SequenceState, given: Any) -> Item:
    """``tokens`` or ``(tokens, headroom)``; a tuple of two ints is tokens."""
    if isinstance(given, tuple) and len(given) == PAIR and not isinstance(given[0], int | np.integer):
        tokens, headroom = given
        return ExtendItem(seq, pack(tokens), headroom)
    return ExtendItem(seq, pack(given), 0)


def _share(copy: bool) -> Callable[[SequenceState, Any], Item]:
    def make(seq: SequenceState, given: Any) -> Item:
        if not isinstance(given, tuple) or len(given) != PAIR:
            raise BadRequest("share takes (at, count)")
        return ShareItem(seq, given[0], given[1], copy)

    return make
