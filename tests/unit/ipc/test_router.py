"""The ROUTER over real sockets: one answer for whatever comes, and no send that blocks."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import zmq

from radixkv.commands import Done, Failure, Granted, Reply, Request, Stats
from radixkv.config import Limits
from radixkv.ipc import router as routing
from radixkv.ipc import wire
from radixkv.ipc.endpoint import Endpoint, open_socket
from radixkv.ipc.router import Incoming, Router

LIMITS = Limits(message_bytes=4096, queued=3)
WAIT_MS = 5_000


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint(tmp_path / "r.sock")


@pytest.fixture
def router(endpoint: Endpoint):
    router = Router(endpoint, LIMITS, open_socket(endpoint.path, socket.SOCK_STREAM))
    yield router
    router.close()
    assert endpoint.path.exists(), "whoever made the file removes it"


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def dealer(context: zmq.Context, endpoint: Endpoint, router: Router):
    with connected(context, endpoint) as dealer:
        yield dealer


def connected(context: zmq.Context, endpoint: Endpoint, kind: int = zmq.DEALER) -> zmq.Socket:
    dealer = context.socket(kind)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    dealer.setsockopt(zmq.SNDTIMEO, WAIT_MS)
    dealer.connect(endpoint.address)
    return dealer


def request(identity: int, session: int = 5) -> bytes:
    return wire.encode_request(Request(session, 1, identity, 1.0, Stats()))


def take(router: Router) -> Incoming | None:
    assert router.socket.poll(WAIT_MS)
    return router.receive()


def answer(dealer: zmq.Socket) -> tuple[int, Reply]:
    (frame,) = dealer.recv_multipart()
    return wire.decode_reply(frame)


def test_a_request_and_its_way_back(router: Router, dealer: zmq.Socket, endpoint: Endpoint) -> None:
    assert endpoint.path.stat().st_mode & 0o777 == 0o600
    assert router.receive() is None
    dealer.send(request(7))
    incoming = take(router)
    assert incoming is not None
    assert (incoming[1].id, incoming[2]) == (7, len(request(7)))
    router.send(incoming[0], 7, Done())
    assert answer(dealer) == (7, Done())


@pytest.mark.parametrize("count", [2, 7, 1000])
def test_a_message_of_many_frames_is_answered_once(router: Router, dealer: zmq.Socket, count: int) -> None:
    dealer.send_multipart([request(1)] * count)
    dealer.send(request(2))
    assert take(router) is None
    assert router.malformed == 1
    identity, reply = answer(dealer)
    assert identity == 0
    assert isinstance(reply, Failure) and reply.code == "bad_request" and f"not {count}" in reply.message
    following = take(router)
    assert following is not None and following[1].id == 2


def test_an_empty_frame_and_a_requester_with_a_delimiter(router: Router, context, endpoint: Endpoint) -> None:
    with connected(context, endpoint) as dealer:
        dealer.send(b"")
        assert take(router) is None
        assert answer(dealer)[0] == 0
    with connected(context, endpoint, zmq.REQ) as requester:
        requester.send(request(3))
        assert take(router) is None
    assert router.malformed == 2


@pytest.mark.parametrize(
    ("frame", "identity", "code"),
    [
        (b"\xc1", 0, "bad_request"),
        (request(9)[:-1], 9, "bad_request"),
        (request(9) + bytes(5000), 9, "limit_exceeded"),
    ],
)
def test_garbage_is_answered(router: Router, dealer: zmq.Socket, frame: bytes, identity: int, code: str) -> None:
    dealer.send(frame)
    assert take(router) is None
    found, reply = answer(dealer)
    assert isinstance(reply, Failure)
    assert (found, reply.code) == (identity, code)
    assert "request" not in reply.details


def test_a_peer_that_is_gone_is_counted(router: Router, context, endpoint: Endpoint) -> None:
    with connected(context, endpoint) as dealer:
        dealer.send(request(1))
        incoming = take(router)
        assert incoming is not None
    while not router.dropped_replies:  # until libzmq has seen the end of the connection
        router.send(incoming[0], 1, Done())
    assert router.dropped_replies == 1
    router.send(b"nobody", 1, Done())
    assert router.dropped_replies == 2


def test_a_peer_that_does_not_read_delays_nobody(router: Router, context, endpoint: Endpoint, dealer) -> None:
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.LINGER, 0)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.connect(endpoint.address)
    deaf.send(request(1))
    incoming = take(router)
    assert incoming is not None
    reply = Failure("error", "x" * 4000)
    sent = 0
    while router.dropped_replies < 100:
        router.send(incoming[0], 1, reply)
        sent += 1
    assert routing.SEND_QUEUE < sent < 10_000
    dealer.send(request(2))
    other = take(router)
    assert other is not None
    begin = time.monotonic()
    router.send(other[0], 2, Done())
    assert answer(dealer) == (2, Done())
    assert time.monotonic() - begin < 1.0
    deaf.close()


def test_a_late_answer_goes_to_the_latest_place_that_asked(router: Router, context, endpoint: Endpoint) -> None:
    with connected(context, endpoint) as first, connected(context, endpoint) as second:
        for dealer in (first, second):
            dealer.send(request(4))
            incoming = take(router)
            assert incoming is not None
            router.remember(*incoming[:2])
        router.grant(Granted(5, 4, Done()))
        assert answer(second) == (4, Done())
        assert not first.poll(50)
    router.grant(Granted(5, 4, Done()))
    assert router.dropped_replies == 1, "given once"


def test_ways_back_are_bounded_and_forgotten_with_their_session(router: Router, dealer: zmq.Socket) -> None:
    for identity in (1, 2, 3, 4):
        dealer.send(request(identity, session=identity % 2))
        incoming = take(router)
        assert incoming is not None
        router.remember(*incoming[:2])
    router.grant(Granted(1, 1, Done()))
    assert router.dropped_replies == 1, "the oldest of four gave way: three may wait"
    router.forget(1)
    router.grant(Granted(1, 3, Done()))
    assert router.dropped_replies == 2
    router.grant(Granted(0, 2, Done()))
    router.grant(Granted(0, 4, Done()))
    assert [answer(dealer)[0] for _ in range(2)] == [2, 4]


def test_a_socket_that_somebody_keeps_outlives_the_router(endpoint: Endpoint, context: zmq.Context) -> None:
    """Who connects while there is no router is served by the next one."""
    with open_socket(endpoint.path, socket.SOCK_STREAM) as kept:
        Router(endpoint, LIMITS, kept.dup()).close()
        with connected(context, endpoint) as dealer:
            dealer.send(request(7))
            router = Router(endpoint, LIMITS, kept.dup())
            incoming = take(router)
            assert incoming is not None
            router.send(incoming[0], 7, Done())
            assert answer(dealer) == (7, Done())
            router.close()
