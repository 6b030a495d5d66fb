"""The publisher by itself: no daemon, real sockets. Time is told to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from radixkv.commands import Assign, NamespaceRecord, Publish, Stamp
from radixkv.config import EventsConfig, KVSpec, PoolConfig
from radixkv.ipc import event_feed, events
from radixkv.ipc.event_feed import BACKLOG_BYTES
from radixkv.ipc.event_ledger import Sizes
from radixkv.ipc.events import Events
from tests.integration.listener import Listener

PAGE_TOKENS = 4
POOL = PoolConfig(spec=KVSpec(layers=1, kv_heads=1, head_dim=1, page_size=PAGE_TOKENS), pages=8192)
EVENT_TOKENS = Sizes().tokens


def prompt(number: int, pages: int) -> list[Any]:
    """What the engine writes for a prompt that takes the first pages of the pool."""
    packed = b"".join(page.to_bytes(4, "little") for page in range(pages))
    tokens = b"".join((number + n).to_bytes(4, "little") for n in range(pages * PAGE_TOKENS))
    return [
        NamespaceRecord(POOL.name, 0, 1, b""),
        Assign(POOL.name, packed, 1, 0, 1),
        Publish(POOL.name, packed, False, tokens),
        Stamp(POOL.name, packed[-4:], number),
    ]


def places_in(directory: Path) -> tuple[str, str]:
    """Where to subscribe, and where to ask for a replay."""
    return f"ipc://{directory}/pub", f"ipc://{directory}/replay"


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Events of POOL, and a listener."""
    made: list[Any] = []

    def start(**keys: Any) -> tuple[Events, Listener]:
        told = Events(EventsConfig(*places_in(tmp_path), **keys), POOL, None)
        made.extend((Listener(*places_in(tmp_path)), told))
        return told, made[0]

    yield start
    for one in made:
        one.close()


def settle(told: Events, now: float = 0.0) -> int:
    """Work until there is nothing to do. Returns how many turns it took."""
    turns = 0
    while told.wait_s(now) == 0:
        told.work(now)
        turns += 1
    return turns


def replay(told: Events, listener: Listener, start: int) -> list[int]:
    """Both sides in one thread: the request arrives, is served, and the answer is read."""
    listener.ask(start)
    assert told.replay is not None and told.replay.poll(10_000)
    told.work(0.0)
    settle(told)
    return listener.hear_replay()


def test_nothing_is_told_before_there_is_time(publish: Any) -> None:
    told, listener = publish()
    settle(told)
    told.take(prompt(1, 4))
    assert told.wait_s(0.0) == 0
    assert [number - told.feed.first for number in replay(told, listener, 0)] == [0, 1]
    assert listener.tokens(list(range(1, 17)), PAGE_TOKENS) == (16, 0)
    assert told.wait_s(0.0) == float("inf")


def test_other_pools_and_other_writes_are_none_of_its_business(publish: Any) -> None:
    told, listener = publish()
    settle(told)
    told.take([Stamp(POOL.name, b"", 1), Assign("another", bytes(4), 1, 0, 1)])
    assert told.wait_s(0.0) == float("inf")
    assert len(replay(told, listener, 0)) == 1


def test_a_turn_tells_one_batch_and_a_batch_is_bounded(publish: Any) -> None:
    told, listener = publish()
    settle(told)
    told.take(prompt(1, 8192))
    assert settle(told) >= 8192 * PAGE_TOKENS // EVENT_TOKENS
    assert len(replay(told, listener, 0)) >= 1 + 8192 * PAGE_TOKENS // EVENT_TOKENS
    assert listener.tokens(list(range(1, 1 + 8192 * PAGE_TOKENS)), PAGE_TOKENS) == (8192 * PAGE_TOKENS, 0)


def test_everything_is_what_has_been_told_also_in_the_middle_of_a_write(publish: Any) -> None:
    """Not what the next batch tells again: the listener would see a block stored twice."""
    told, listener = publish(buffer_batches=2)
    for pages in (8, 16):
        told.take(prompt(7, pages))
        settle(told)
    told.take(prompt(1, 8192))
    came = replay(told, listener, 0)
    assert len(came) >= 2 and came == list(range(came[0], told.feed.next)), "everything, then the rest of the write"
    assert len(listener.blocks["GPU"]) == 8192


def test_what_waits_to_be_told_is_bounded(publish: Any) -> None:
    """A daemon that is never idle gives it a turn every 64 requests."""
    told, _ = publish()
    for number in range(300):
        told.take(prompt(number, 1024))
        if number % 64 == 63:
            told.work(0.0)
            assert told.feed.backlog_bytes <= BACKLOG_BYTES
    settle(told)
    assert told.feed.backlog_bytes == 0


def test_the_buffer_is_bounded_in_batches_and_bytes(publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told, _ = publish(buffer_batches=5)
    for number in range(20):
        told.take(prompt(number, 16))
        settle(told)
    assert len(told.feed._ring) == 5
    monkeypatch.setattr(event_feed, "BUFFER_BYTES", 2000)
    told.take(prompt(99, 16))
    settle(told)
    assert sum(map(len, told.feed._ring)) == told.feed.ring_bytes <= 2000


def test_who_takes_nothing_is_given_up_and_others_are_served(publish: Any, tmp_path: Path) -> None:
    told, listener = publish()
    for number in range(500):
        told.take(prompt(number * 1_000_000, 1024))
        settle(told)
    deaf = Listener(*places_in(tmp_path), queue=1)
    try:
        deaf.ask(0)
        assert told.replay is not None and told.replay.poll(10_000)
        for _ in range(200):
            told.work(0.0)
        assert len(told._replays) == 1 and 0 < told.wait_s(0.0) < 0.1, "its queue is full: tried again later"
        listener.ask(told.feed.first)
        clock = count()
        assert len(listener.hear_replay(lambda: told.work(next(clock) / 200))) == 501
        assert len(told._replays) == 1
        told.work(events.REPLAY_PATIENCE_S + next(clock) / 200)
        assert not told._replays
    finally:
        deaf.close()


def test_who_goes_away_during_a_replay_is_forgotten(publish: Any, tmp_path: Path) -> None:
    told, _ = publish()
    for number in range(200):
        told.take(prompt(number * 1_000_000, 1024))
        settle(told)
    gone = Listener(*places_in(tmp_path), queue=1)
    gone.ask(0)
    assert told.replay is not None and told.replay.poll(10_000)
    for _ in range(100):
        told.work(0.0)
    assert told.statistics()["replays_running"] == 1
    gone.close()
    for turn in range(1000):  # it is due again and again, and not given up for its patience
        told.work(turn * events.REPLAY_PATIENCE_S / 1000)
        if not told.statistics()["replays_running"]:
            break
        told.replay.poll(10)
    seen = told.statistics()
    assert (seen["replays"], seen["replays_running"], seen["replays_given_up"]) == (1, 0, 1)
    assert told.wait_s(0.0) == float("inf")


def test_no_more_replays_than_allowed(publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "REPLAYS", 16)
    told, listener = publish()
    many = [Listener(*places_in(tmp_path)) for _ in range(events.REPLAYS + 4)]
    try:
        for one in many:
            one.ask(0)
            assert told.replay is not None and told.replay.poll(10_000)
            told._take_replays(told.replay, 0.0)
        assert len(told._replays) == events.REPLAYS
        assert told.statistics()["replays_refused"] == 4
        settle(told)
        assert [len(one.hear_replay()) for one in many[: events.REPLAYS]] == [1] * events.REPLAYS
        assert len(replay(told, listener, 0)) == 1
    finally:
        for one in many:
            one.close()
