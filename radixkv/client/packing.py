"""Operations packed into messages so that each sequence sees them in the order they were asked for.

A Step carries its lists out in a fixed order: copied, free, truncate, commit, extend, share. ``pack`` puts an item
into the first message in which that order is right for its sequence::

    asked for (a, b: sequences)                  messages
    commit a, truncate b, extend a               step{truncate b; commit a; extend a}
    extend a, commit a, free a                   step{extend a}, step{commit a}, step{free a}
    commit a, handoff a                          step{commit a}, handoff a
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixkv.client.batch import Batch, HandoffItem, Item
from radixkv.client.sequence import SequenceState


def pack(items: Sequence[Item], limit: int = 4096) -> list[Batch]:
    """Few messages of at most ``limit`` items in which each sequence's items keep their order. Those that may share one
    do, so that one answer is for all of them, unless a sequence has more than ``limit``."""
    if len(items) <= limit:
        return _pack(items)
    return [batch for part in _parts(items, limit) for batch in _pack(part)]


def _parts(items: Sequence[Item], limit: int) -> list[list[Item]]:
    """Each of at most ``limit``, with all items of its sequences if they are not more."""
    owned: dict[SequenceState, list[Item]] = {}
    for item in items:
        owned.setdefault(item.seq, []).append(item)
    parts: list[list[Item]] = [[]]
    for own in owned.values():
        for begin in range(0, len(own), limit):
            some = own[begin : begin + limit]
            if len(parts[-1]) + len(some) > limit:
                parts.append([])
            parts[-1] += some
    return parts


def _pack(items: Iterable[Item]) -> list[Batch]:
    batches: list[Batch] = []
    places: dict[SequenceState, tuple[int, int]] = {}
    for item in items:
        at, rank = places.get(item.seq, (0, -1))
        if item.rank < rank or rank == HandoffItem.rank:
            at += 1
        while at < len(batches) and not (item.field and batches[at].items[0].field):
            at += 1
        if at == len(batches):
            batches.append(Batch())
        batches[at].items.append(item)
        places[item.seq] = (at, item.rank)
    return batches
