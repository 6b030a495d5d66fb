"""Requests to a real daemon over raw sockets: order of effects, repeats, waiting, garbage-free service."""

from __future__ import annotations

import struct
import time

import numpy as np
import pytest
import zmq

from radixkv.commands import (
    Bye,
    Commit,
    Done,
    Failure,
    Free,
    Heartbeat,
    Invalidate,
    Request,
    Reserve,
    Reserved,
    Stats,
    Step,
    Stepped,
)
from radixkv.daemon.agenda import TICK_S
from radixkv.device.descriptors import CACHED, FREE, PRIVATE, check_of
from radixkv.ipc import wire
from radixkv.version import VERSION
from tests.integration.raw import tokens

PAGE_BYTES = 4 * 4


@pytest.fixture(scope="module")
def daemon(daemon_factory):
    return daemon_factory(limits={"queued": 2}, heartbeat_s=0.05, lease_s=60.0)


@pytest.fixture
def worker(daemon, raw_worker):
    worker = raw_worker(daemon.endpoint)
    yield worker
    worker.ask(Bye())


def table_of(reply: Reserved) -> list[int]:
    return np.frombuffer(reply.page_table, "<i4").tolist()


def test_what_a_reply_tells_of_is_in_the_descriptor_table_when_it_arrives(worker) -> None:
    table = worker.table()
    prompt = tokens(10, first=1000)
    before = table.records["generation"].copy()
    pages = table_of(worker.reserve(1, prompt))
    record = table.records[pages]
    assert (record["state"] == PRIVATE).all()
    assert (record["owner"] == worker.welcome.session).all()
    assert (record["generation"] == before[pages] + 1).all()

    assert worker.ask(Step(commit=[Commit(1, 10)])) == Stepped(commit=[None])
    record = table.records[pages]
    assert record["state"].tolist() == [CACHED, CACHED, PRIVATE]
    assert record["tokens"][:2].astype("<u4").tobytes() == prompt[:32]
    assert record["serial"][:2].tolist() == [1, 2] and record["parent_serial"][:2].tolist() == [0, 1]
    assert (record["check"] == check_of(record)).all()
    assert [entry.canonical for entry in table.namespaces()] == [b"ns"]
    assert table.session(worker.welcome.slot) == (worker.welcome.session, worker.welcome.epoch, worker.welcome.token)

    worker.free(1)
    record = table.records[pages]
    assert record["state"].tolist() == [CACHED, CACHED, FREE]
    assert record["stamp"][1]  # the end of the run that fell idle
    table.close()


def test_a_repeat_gets_the_same_answer_from_any_socket(worker) -> None:
    first = worker.reserve(2, tokens(6))
    other = worker.socket()
    other.send(worker.frame(Reserve("default", 2, b"ns", tokens(6)), identity=worker.request))
    assert worker.receive(other) == (worker.request, first)
    assert worker.stats()["pools"]["default"]["sequences"] == 1
    other.close()


def test_a_late_request_is_not_executed(worker) -> None:
    late = worker.ask(Reserve("default", 3, b"ns", tokens(6)), deadline_s=-0.001)
    assert isinstance(late, Failure) and late.code == "timeout"
    assert worker.stats()["pools"]["default"]["sequences"] == 0


def test_an_unknown_session_executes_nothing(worker) -> None:
    for session, epoch in ((worker.welcome.session, worker.welcome.epoch + 1), (worker.welcome.session ^ 1, 1), (0, 0)):
        frame = wire.encode_request(Request(session, epoch, 5, time.monotonic() + 9, Heartbeat()))
        worker.dealer.send(frame)
        identity, reply = worker.receive()
        assert identity == 5 and isinstance(reply, Failure) and reply.code == "session_lost"


def test_a_reserve_that_waited_is_answered_where_it_was_asked_last(worker) -> None:
    assert isinstance(worker.reserve(1, b"", headroom=64), Reserved)
    waiting = worker.send(Reserve("default", 2, b"ns", b"", 8, "copy", 10.0))
    second = worker.socket()
    second.send(worker.frame(Reserve("default", 2, b"ns", b"", 8, "copy", 10.0), identity=waiting))
    second.send(worker.frame(Stats()))
    assert worker.receive(second)[1].snapshot["queued"] == 1, "the repeat has been read when this comes"
    third = worker.socket()
    third.send(worker.frame(Step(free=[Free(1)])))
    assert worker.receive(third)[1] == Stepped(free=[None])
    identity, reply = worker.receive(second)
    assert identity == waiting and isinstance(reply, Reserved)
    assert not worker.dealer.poll(50)
    for dealer in (second, third):
        dealer.close()


def test_waiting_ends_when_it_was_to_end(worker) -> None:
    worker.reserve(1, b"", headroom=64)
    begin = time.monotonic()
    reply = worker.reserve(2, b"", headroom=8, wait_s=0.2)
    took = time.monotonic() - begin
    assert isinstance(reply, Failure) and reply.code == "out_of_pages"
    assert reply.details["need"] == 2 and reply.details["available"] == 0
    assert 0.2 <= reply.details["waited_s"] <= took < 0.9, "not only at the next tick of a second"


def test_waiting_requests_are_bounded(worker) -> None:
    worker.reserve(1, b"", headroom=64)
    for seq in (2, 3, 4):
        worker.send(Reserve("default", seq, b"ns", b"", 8, "copy", 10.0))
    identity, reply = worker.receive()
    assert identity == worker.request and isinstance(reply, Failure) and reply.code == "limit_exceeded"
    worker.send(Step(free=[Free(1)]))
    assert {worker.receive()[0] for _ in range(3)} == {worker.request - 3, worker.request - 2, worker.request}


def test_stats_say_who_answers(daemon, worker) -> None:
    stats = worker.stats()
    assert stats["version"] == VERSION
    assert (stats["boot_id"], stats["cache_id"]) == (daemon.ready["boot_id"], daemon.ready["cache_id"])
    assert stats["uptime_s"] > 0
    assert stats["sessions"] == 1 and stats["queued"] == 0
    pool = stats["pools"]["default"]
    assert pool["total_pages"] == 16 == sum(pool["pages"].values())
    for counter in ("requests", "asked_tokens", "hit_tokens", "evicted_pages", "malformed_requests", "dropped_replies"):
        assert stats["counters"][counter] >= 0


def test_a_burst_is_answered_in_full(worker) -> None:
    for count in (1, 2, 63, 64, 65, 200):
        sent = [worker.send(Heartbeat()) for _ in range(count)]
        got = [worker.receive() for _ in range(count)]
        assert got == [(identity, Done()) for identity in sent]
        assert not worker.dealer.poll(0)


def test_two_workers_share_what_one_has_committed(daemon, worker, raw_worker) -> None:
    prompt = tokens(8, first=5000)
    mine = table_of(worker.reserve(1, prompt))
    worker.ask(Step(commit=[Commit(1, 8)]))
    other = raw_worker(daemon.endpoint)
    assert other.welcome.session != worker.welcome.session
    reply = other.reserve(1, prompt + struct.pack("<I", 1))
    assert table_of(reply)[:2] == mine
    assert reply.cached_tokens == 8
    assert other.ask(Bye()) == Done()


def test_after_bye_the_session_is_unknown(daemon, raw_worker) -> None:
    worker = raw_worker(daemon.endpoint)
    table = worker.table()
    worker.reserve(1, tokens(5, first=9000))
    assert worker.ask(Bye()) == Done()
    assert table.session(worker.welcome.slot).epoch == 0
    assert worker.ask(Heartbeat()).code == "session_lost"
    assert "private" not in worker.pages() and "quarantined" not in worker.pages()
    table.close()


def test_a_second_peer_with_the_same_routing_id_disturbs_nobody(daemon, worker) -> None:
    first, second = (zmq.Context.instance().socket(zmq.DEALER) for _ in range(2))
    for dealer in (first, second):
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, b"same")
        dealer.connect(daemon.endpoint)
    first.send(worker.frame(Stats()))
    assert first.poll(5000)
    second.send(worker.frame(Stats()))
    assert worker.ask(Heartbeat()) == Done()
    for dealer in (first, second):
        dealer.close()


def test_work_left_over_by_a_step_is_done_without_delay(worker, wait_until) -> None:
    """Pages of an invalidated namespace come back when their last holder lets go, not with the next regular tick."""
    started = time.monotonic()
    for turn in range(4):
        worker.reserve(100 + turn, tokens(8))
        worker.ask(Step(commit=[Commit(100 + turn, 8)]))
        worker.ask(Invalidate("default", b"ns"))
        worker.free(100 + turn)
        wait_until(lambda: "cached" not in worker.pages(), what="the return of the pages")
    assert time.monotonic() - started < 2 * TICK_S
