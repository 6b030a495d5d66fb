"""The work of the event stream is bounded, whatever the size of the pool and of what happens: counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from radixkv.commands import Assign, Copied, NamespaceRecord, Publish, Retire, Write
from radixkv.config import EventsConfig, KVSpec, PoolConfig
from radixkv.ipc import event_feed
from radixkv.ipc.event_feed import END, TURN_LOOKS, Feed, Replay
from radixkv.ipc.event_ledger import Cleared, Ledger, Removed, Sizes

PAGES, NAMESPACES, PAGE_TOKENS = 40_000, 40, 1
POOL = PoolConfig(spec=KVSpec(layers=1, kv_heads=1, head_dim=1, page_size=PAGE_TOKENS), pages=PAGES)
SIZES = Sizes(tokens=64, hashes=50, swept=900, sorted=300)
ONE_BATCH = TURN_LOOKS + SIZES.swept + max(SIZES.tokens // PAGE_TOKENS, SIZES.hashes, SIZES.sorted)
"""What a turn may look at: so much, or a batch, the last slice of it beyond that; and a slice of a sweep."""


def pack(numbers: Any) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def prompt(namespace: int, first: int, pages: int) -> list[Write]:
    """A prompt of namespace ``namespace`` in epoch 1 is cached in the pages from ``first`` on."""
    packed, tokens = pack(range(first, first + pages)), pack(range(first, first + pages * PAGE_TOKENS))
    return [
        Assign(POOL.name, packed, 1, namespace, 1),
        Publish(POOL.name, packed, False, tokens),
    ]


class Router:
    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def hear(self, batch: bytes | bytearray) -> None:
        for event in msgpack.unpackb(batch)[1]:
            if event[0] == "AllBlocksCleared":
                self.blocks.clear()
            elif event[0] == "BlockStored":
                assert not self.blocks & set(event[1])
                self.blocks |= set(event[1])
            else:
                assert self.blocks >= set(event[1])
                self.blocks -= set(event[1])


class Told:
    """A full pool: each namespace has as many pages."""

    def __init__(self) -> None:
        self.ledger, self.router = Ledger(POOL, SIZES), Router()
        each = PAGES // NAMESPACES
        for namespace in range(NAMESPACES):
            writes = [NamespaceRecord(POOL.name, namespace, 1, b""), *prompt(namespace, namespace * each, each)]
            for write in writes:
                assert all(len(events) <= 1 for events in self.ledger.fold(write))
        config = EventsConfig(endpoint="tcp://127.0.0.1:1", buffer_batches=4)
        self.feed = Feed(config, POOL, self.ledger, first=7 << 22, sizes=SIZES)

    def turns(self) -> Iterator[int]:
        """How many places and writes each turn looks at, until all is told."""
        while not self.feed.is_idle:
            yield self.turn()

    def turn(self) -> int:
        before = self.ledger.looked
        for _, batch in self.feed.turn(0.0):
            self.router.hear(batch)
        return self.ledger.looked - before


@pytest.fixture
def told() -> Told:
    return Told()


def test_what_was_found_at_the_start_is_told_a_batch_at_a_time(told: Told) -> None:
    looked = list(told.turns())
    assert max(looked) <= ONE_BATCH
    assert len(looked) > PAGES * PAGE_TOKENS / (2 * SIZES.tokens)
    assert len(told.router.blocks) == PAGES


def test_the_end_of_all_epochs_is_told_a_slice_at_a_time_and_does_not_hold_up_the_rest(told: Told) -> None:
    list(told.turns())
    told.feed.take(NamespaceRecord(POOL.name, namespace, 2, b"") for namespace in range(NAMESPACES - 1))
    told.turn()
    assert PAGES - SIZES.hashes <= len(told.router.blocks) < PAGES, "a slice has gone"
    told.feed.take(prompt(NAMESPACES - 1, PAGES - 1, 1))
    before = told.router.blocks.copy()
    looked = [told.turn()]
    assert len(told.router.blocks - before) == 1, "told at once"
    looked += told.turns()
    assert max(looked) <= ONE_BATCH
    assert len(told.router.blocks) == PAGES // NAMESPACES
    # 39 namespaces, and yet the table was gone through once, in as many slices as that has to tell.
    assert sum(looked) < PAGES + 2 * len(looked)
    assert len(looked) < PAGES / SIZES.hashes + 2 * PAGES / SIZES.swept


def test_a_namespace_that_ends_during_a_sweep_is_swept_as_well(told: Told) -> None:
    """Also what lies before the place where the sweep is."""
    list(told.turns())
    told.feed.take([NamespaceRecord(POOL.name, NAMESPACES - 1, 2, b"")])
    for _ in range(PAGES // SIZES.swept // 2):
        told.turn()
    assert len(told.router.blocks) == PAGES
    told.feed.take([NamespaceRecord(POOL.name, 0, 2, b"")])
    list(told.turns())
    assert len(told.router.blocks) == PAGES - 2 * PAGES // NAMESPACES


def test_what_is_over_is_not_told_again_by_a_copy_nor_by_a_snapshot() -> None:
    """The sweep has not been there yet."""
    pool = PoolConfig(spec=POOL.spec, pages=8, host_pages=8)
    ledger = Ledger(pool, SIZES)
    for write in [NamespaceRecord(POOL.name, 0, 1, b""), *prompt(0, 0, 4), NamespaceRecord(POOL.name, 0, 2, b"")]:
        list(ledger.fold(write))
    assert ledger.sweeping
    assert [*ledger.fold(Copied(pool.name, pack([0, 1]), pack([8, 9])))] == [[]]
    assert [event for events in ledger.everything() for event in events] == [Cleared()]
    (removed,) = ledger.sweep()
    assert isinstance(removed, Removed) and len(removed.hashes) == 4 * 16
    assert not ledger.sweeping


def test_a_snapshot_has_what_leaves_before_its_turn_and_not_what_comes_instead() -> None:
    ledger = Ledger(POOL, SIZES)
    for space in range(2):
        list(ledger.fold(NamespaceRecord(POOL.name, space, 1, bytes([space]))))
    for write in prompt(0, 0, 4):
        (told,) = ledger.fold(write)
    telling = ledger.everything()
    assert next(telling) == [Cleared()]
    for write in [Retire(POOL.name, pack(range(4))), *prompt(1, 0, 4)]:
        list(ledger.fold(write))
    assert [event for events in telling for event in events] == told


def test_a_snapshot_is_not_begun_while_a_path_is_half_gone(told: Told) -> None:
    list(told.turns())
    told.feed.take([Retire(POOL.name, pack(range(PAGES // NAMESPACES)))])
    told.turn()
    assert PAGES - PAGES // NAMESPACES < len(told.router.blocks) < PAGES
    replay, router = Replay(told.feed, 0), Router()
    while (message := replay.message()) is None:
        told.turn()
    router.hear(message[1])
    assert len(router.blocks) == PAGES - PAGES // NAMESPACES


def test_everything_for_a_replay_is_made_a_slice_at_a_time_and_once_for_all(told: Told) -> None:
    list(told.turns())
    askers = [(Replay(told.feed, 0), Router()) for _ in range(3)]
    assert askers[0][0].message() is None, "it is begun with the next turn"
    told.turn()
    steps, before = 0, told.ledger.looked
    while askers[steps % 3][0].message() is None:
        assert told.ledger.looked - before <= SIZES.sorted
        steps, before = steps + 1, told.ledger.looked
    assert steps > PAGES / SIZES.tokens
    assert told.feed.wholes == 1
    for replay, router in askers:
        while (message := replay.message()) != END:
            assert message is not None
            router.hear(message[1])
            replay.sent()
        assert router.blocks == told.router.blocks


def test_a_snapshot_that_nobody_takes_is_dropped(told: Told) -> None:
    """It would have the ledger keep aside whatever leaves, for good."""
    list(told.turns())
    replay = Replay(told.feed, 0)
    assert replay.message() is None
    told.turn()
    del replay
    assert len(told.ledger._tellings) == 1
    for page in range(6):
        told.feed.take([Retire(POOL.name, pack([page]))])
        told.turn()
    assert not told.ledger._tellings


def test_a_snapshot_is_not_given_to_others_when_what_follows_it_is_gone(told: Told) -> None:
    """Whoever came first is still being sent it."""
    list(told.turns())
    first, second = Replay(told.feed, 0), Replay(told.feed, 0)
    assert first.message() is None
    told.turn()
    assert first.message() is None, "it has it, and it is not whole yet"
    for page in range(6):  # the ring has room for four batches
        told.feed.take([Retire(POOL.name, pack([page]))])
        told.turn()
    assert second.message() is None
    told.turn()
    while (message := second.message()) is None:
        pass
    assert isinstance(message, tuple)
    assert message[0] + 1 >= told.feed.oldest
    assert told.feed.wholes == 2


def test_a_write_larger_than_a_batch_is_told_in_several(told: Told) -> None:
    list(told.turns())
    told.feed.take([Retire(POOL.name, pack(range(PAGES)))])
    told.feed._debt = 0  # as if it had come a turn ago
    looked = list(told.turns())
    assert max(looked) <= ONE_BATCH and len(looked) >= PAGES / TURN_LOOKS
    assert not told.router.blocks


@pytest.mark.parametrize("pages", [1, 40, 300])
def test_of_too_much_a_turn_does_what_requests_have_brought_twice_and_no_more(
    told: Told, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while what was found at the start is still being told: what waits then is bounded by that."""
    monkeypatch.setattr(event_feed, "BACKLOG_BYTES", 10_000)
    most = 0
    while told.ledger._tellings or told.feed.backlog_bytes > 10_000:
        for namespace in range(20):
            told.feed.take(prompt(namespace, namespace * 1000, pages))
        assert told.turn() <= 2 * 20 * 2 * (1 + pages) + ONE_BATCH
        most = max(most, told.feed.backlog_bytes)
    assert most < 10_000 + PAGES * 100
    list(told.turns())
    assert len(told.router.blocks) == PAGES
