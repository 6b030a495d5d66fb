"""Packing keeps each sequence's order within the fixed order of a Step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.client.batch import (
    Batch,
    CommitItem,
    CopiedItem,
    ExtendItem,
    FreeItem,
    HandoffItem,
    Item,
    Outgoing,
    ShareItem,
    TruncateItem,
)
from radixkv.client.packing import pack
from radixkv.commands import Commit, Done, Failure, Free, Handoff, Request, Step, Stepped
from radixkv.errors import BadRequest, StaleHandle, VersionMismatch


class Nobody:
    """Stands for a sequence that is only named."""

    def __init__(self, identity: int) -> None:
        self.id = identity
        self.unsettled: list[Any] = []
        self.broken = None
        self.lost = None
        self.committed = 0
        self.gone = False

    def committed_to(self, n: int) -> None:
        self.committed = n

    def given_up(self) -> None:
        self.gone = True


def make(kind: str, seq: Any) -> Item:
    kinds: dict[str, Any] = {
        "copied": lambda: CopiedItem(seq),
        "free": lambda: FreeItem(seq),
        "truncate": lambda: TruncateItem(seq, 1),
        "commit": lambda: CommitItem(seq, 1),
        "extend": lambda: ExtendItem(seq, b"", 0),
        "share": lambda: ShareItem(seq, None, 0),
        "handoff": lambda: HandoffItem(seq, b"t" * 16, 1.0),
    }
    return kinds[kind]()


KINDS = ("copied", "free", "truncate", "commit", "extend", "share", "handoff")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(KINDS)), max_size=20), st.integers(1, 5))
def test_each_sequence_keeps_its_order(asked: list[tuple[int, str]], limit: int) -> None:
    seqs = [Nobody(i) for i in range(4)]
    items = [make(kind, seqs[number]) for number, kind in asked]
    batches = pack(items, limit)
    carried_out = [item for batch in batches for item in sorted(batch.items, key=lambda item: item.rank)]
    assert len(carried_out) == len(items)
    for seq in seqs:
        assert [i for i in carried_out if i.seq is seq] == [i for i in items if i.seq is seq]
    for batch in batches:
        assert 0 < len(batch.items) <= limit
        assert len(batch.items) == 1 or all(item.field for item in batch.items)


def test_what_fits_goes_in_one_message() -> None:
    a, b = Nobody(1), Nobody(2)
    items = [make("commit", a), make("truncate", b), make("extend", a), make("share", b), make("free", Nobody(3))]
    (batch,) = pack(items)
    assert batch.items == items


def test_a_step_has_its_items_in_the_lists_they_belong_to() -> None:
    batch = Batch(dropped=[77])
    batch.items = [make("commit", Nobody(1)), make("free", Nobody(2)), make("copied", Nobody(3))]
    assert batch.body() == Step(free=[Free(77), Free(2)], commit=[Commit(1, 1)], copied=[3])


def test_a_message_of_its_own() -> None:
    (batch,) = pack([make("handoff", Nobody(5))])
    assert batch.body() == Handoff(5, b"t" * 16, 1.0)


def test_results_reach_their_items() -> None:
    good, bad, freed = CommitItem(Nobody(1), 3), CommitItem(Nobody(2), 4), FreeItem(Nobody(3))  # type: ignore[arg-type]
    batch = Batch(dropped=[77])
    batch.items = [good, bad, freed]
    batch.settle(Stepped(free=[Failure("stale_handle", "unknown"), None], commit=[None, Failure("bad_request", "no")]))
    assert (good.error, good.seq.committed) == (None, 3)  # type: ignore[attr-defined]
    assert isinstance(bad.error, BadRequest)
    assert bad.seq.committed == 0  # type: ignore[attr-defined]
    assert freed.error is None


def test_a_refused_message_is_every_items_error() -> None:
    items = [make("commit", Nobody(1)), make("extend", Nobody(2))]
    (batch,) = pack(items)
    batch.settle(Failure("bad_request", "all wrong"))
    assert all(isinstance(item.error, BadRequest) for item in items)
    assert items[0].error is not items[1].error


def test_a_result_too_few_is_noticed() -> None:
    (batch,) = pack([make("commit", Nobody(1)), make("commit", Nobody(2))])
    with pytest.raises(VersionMismatch):
        batch.settle(Stepped(commit=[None]))


def test_a_second_reply_changes_nothing() -> None:
    item = CommitItem(Nobody(1), 3)  # type: ignore[arg-type]
    out = Outgoing(Request(1, 1, 1, 0.0, Done()), pack([item])[0])  # type: ignore[arg-type]
    out.settle(Stepped(commit=[None]))
    item.seq.committed = 99  # type: ignore[attr-defined]
    out.settle(Stepped(commit=[Failure("bad_request", "late")]))
    assert (item.error, item.seq.committed) == (None, 99)  # type: ignore[attr-defined]


def test_a_repeat_refused_as_too_old_breaks_the_sequence() -> None:
    item = CommitItem(Nobody(1), 3)  # type: ignore[arg-type]
    out = Outgoing(Request(1, 1, 1, 0.0, Done()), pack([item])[0])  # type: ignore[arg-type]
    item.seq.unsettled.append(out)
    out.repeated = True
    out.settle(Failure("bad_request", "too old"))
    assert item.seq.unsettled == []
    assert isinstance(item.seq.broken, StaleHandle)


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, "1", None, [1]])
def test_numbers_are_natural(value: Any) -> None:
    with pytest.raises(BadRequest):
        CommitItem(Nobody(1), value)  # type: ignore[arg-type]
