"""Garbage, floods and deaf peers against a real daemon while a healthy worker goes on working."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time

import pytest
import zmq

from radixkv.commands import (
    Bye,
    Extend,
    Failure,
    Free,
    Heartbeat,
    Hello,
    Lookup,
    MapPool,
    Reserved,
    Share,
    Stats,
    Step,
    Welcome,
)
from radixkv.errors import LimitExceeded, Unavailable, VersionMismatch
from radixkv.ipc import wire
from radixkv.ipc.attach import Attachment
from radixkv.ipc.endpoint import resolve
from tests.integration.raw import RawWorker, tokens

HEAD = b"\x95\x01\x01\x07\xcb" + struct.pack(">d", 1e9)
SLOW_S = 0.15
"""Nobody else's garbage may cost a healthy worker more: three times 50 ms, for a loaded machine."""


@pytest.fixture(scope="module")
def daemon(daemon_factory):
    return daemon_factory(limits={"message_bytes": 2**20, "batch_items": 64}, paranoid=False, heartbeat_s=0.05)


class Healthy:
    """A worker that reserves, looks up and frees all the time, and keeps the time it took."""

    def __init__(self, endpoint: str) -> None:
        self.took: list[float] = []
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._endpoint = endpoint
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            worker = RawWorker(self._endpoint)
            seq = 0
            while not self._stop.is_set():
                seq += 1
                begin = time.monotonic()
                assert isinstance(worker.reserve(seq, tokens(6)), Reserved)
                assert worker.ask(Lookup("default", b"ns", [tokens(6)])).device_tokens == [0]
                assert worker.free(seq).free == [None]
                self.took.append((time.monotonic() - begin) / 3)
                self._stop.wait(0.002)
            worker.ask(Bye())
            worker.close()
        except BaseException as error:  # noqa: BLE001 (reported by the main thread)
            self.errors.append(error)

    def check(self, wait_until) -> None:
        wait_until(lambda: len(self.took) > 20 or self.errors)
        self._stop.set()
        self._thread.join()
        assert not self.errors, self.errors
        slowest = sorted(self.took)[int(len(self.took) * 0.99) - 1]
        assert slowest < SLOW_S, f"p99 {slowest:.3f} s"


@pytest.fixture
def healthy(daemon, wait_until):
    healthy = Healthy(daemon.endpoint)
    wait_until(lambda: healthy.took or healthy.errors)
    before = rss_kb(daemon.pid)
    yield healthy
    healthy.check(wait_until)
    assert rss_kb(daemon.pid) - before < 20 * 1024
    worker = RawWorker(daemon.endpoint)
    assert worker.welcome.boot_id == daemon.ready["boot_id"]
    worker.ask(Bye())
    worker.close()


@pytest.fixture
def worker(daemon, raw_worker):
    worker = raw_worker(daemon.endpoint)
    yield worker
    worker.ask(Bye())


def rss_kb(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def refused(worker: RawWorker, *frames: bytes) -> tuple[int, str]:
    """Id and code of the one answer."""
    worker.dealer.send_multipart(frames)
    identity, reply = worker.receive()
    assert isinstance(reply, Failure)
    return identity, reply.code


def test_every_kind_of_garbage_gets_one_answer(worker, healthy) -> None:
    valid = worker.frame(Step(free=[Free(1)], extend=[Extend(2, tokens(3), 4)], share=[Share(3, None, 1, 9)]))
    for count in (2, 7, 1000):
        assert refused(worker, *[valid] * count) == (0, "bad_request")
    for frame in (
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        assert refused(worker, frame) == (0, "bad_request")
    bodies = (
        b"\x91\xa5hello",
        b"\x93\xa4step\xdd\xff\xff\xff\xff",
        b"\x81\x91\x01\x02",
        b"\x81\xc0\x01",
        b"\xd6\xff\xff\xff\xff\xff",
        b"\x92\xa7compact\xff",
        b"\x92\xa7compact\xa11",
        b"\x91\xa5\xff\xfe\xfd\xfc\xfb",
        b"\x92\xa4step" + b"\x91" * 100_000,
        b"cposix\nsystem\n(S'touch /tmp/canary'\ntR.",
    )
    for body in bodies:
        assert refused(worker, HEAD + body) == (7, "bad_request")
    for length in range(len(valid)):
        assert refused(worker, valid[:length])[1] == "bad_request"
    assert refused(worker, worker.frame(Step(free=[Free(1)] * 65))) == (worker.request, "limit_exceeded")
    assert refused(worker, worker.frame(Step(extend=[Extend(1, b"abc")]))) == (worker.request, "bad_request")
    assert refused(worker, HEAD + b"\x91\xa5stats" + bytes(2**20)) == (7, "limit_exceeded")
    assert not worker.dealer.poll(50)
    assert worker.stats()["counters"]["malformed_requests"] > len(valid)


def test_flipped_bytes_and_random_messages_get_one_answer_each(worker, healthy) -> None:
    random.seed(1)
    valid = worker.frame(Step(free=[Free(1)], extend=[Extend(2, tokens(3), 4)], copied=[4]))
    for at in range(len(valid)):
        for bit in (0x01, 0x80, 0xFF):
            frame = bytearray(valid)
            frame[at] ^= bit
            worker.dealer.send(bytes(frame))
            worker.receive()
    for _ in range(2_000):
        worker.dealer.send(random.randbytes(random.randrange(4096)))
        identity, reply = worker.receive()
        assert isinstance(reply, Failure)
        assert identity >= 0


def test_announcements_of_gigabytes(worker, healthy) -> None:
    for header in (b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        for _ in range(500):
            assert refused(worker, HEAD + header) == (7, "bad_request")
            assert refused(worker, HEAD + b"\x9f" + header * 15) == (7, "bad_request")


def test_a_message_of_twice_the_limit_costs_its_sender_the_connection(daemon, worker, healthy, wait_until) -> None:
    liar = worker.socket()
    monitor = liar.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    liar.send(worker.frame(Stats()))
    assert worker.receive(liar)
    liar.send(bytes(2 * 2**20 + 1))
    assert monitor.poll(10_000), "disconnected"
    assert not liar.poll(0)
    liar.disable_monitor()
    monitor.close()
    liar.close()


def test_noise_below_zeromq(daemon, worker, healthy) -> None:
    """Other protocols, random bytes, silence and half-open connections on the stream socket."""
    path = daemon.endpoint.removeprefix("ipc://")
    half_open = []
    for _ in range(100):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        half_open.append(connection)
    for noise in (
        os.urandom(10 * 2**20),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"\xff" + bytes(8) + b"\x7f",
        b"\xff" + b"\x7f" * 63 + b"\x02" + b"\xff" * 8,
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(5.0)
            connection.connect(path)
            try:
                connection.sendall(noise)
            except OSError:
                continue
    assert worker.stats()["sessions"] >= 1
    for connection in half_open:
        connection.close()


def test_garbage_on_the_attach_socket(daemon, worker, healthy) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(10.0)
        raw.connect(daemon.ready["attach"])
        for packet in (
            b"\xc1",
            b"\x91" * 60_000,
            b"\xdd\xff\xff\xff\xff",
            b"\x91\xa3map",
            b"\x92\xa3map\x07",
            os.urandom(999),
        ):
            raw.send(packet)
            answer = wire.decode_attach_reply(raw.recv(70_000))
            assert isinstance(answer, Failure) and answer.code == "bad_request"
        raw.send(wire.encode_attach(MapPool("default")))
        assert wire.decode_attach_reply(raw.recv(70_000)).code == "bad_request", "no memory before hello"
        raw.send(wire.encode_attach(Hello(2, "future")))
        refusal = wire.decode_attach_reply(raw.recv(70_000))
        assert (refusal.code, refusal.details) == ("version_mismatch", {"daemon": 1, "client": 2})
        raw.send(wire.encode_attach(Hello(1, "x" * 30_000)))
        assert isinstance(wire.decode_attach_reply(raw.recv(70_000)), Welcome)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wrong_kind, pytest.raises(OSError):
        wrong_kind.connect(daemon.ready["attach"])


def test_a_client_of_another_version_is_told(daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.ipc.attach.PROTOCOL_VERSION", 99)
    attachment = Attachment(resolve(daemon.endpoint), 10.0)
    with pytest.raises(VersionMismatch) as caught:
        attachment.hello()
    assert caught.value.details == {"daemon": 1, "client": 99}
    attachment.close()


def test_peers_that_never_read_take_bounded_memory_and_nobodys_time(daemon, worker, healthy) -> None:
    deaf = []
    for _ in range(20):
        dealer = worker.socket()
        dealer.setsockopt(zmq.SNDTIMEO, 0)
        deaf.append(dealer)
    frame = worker.frame(Lookup("default", b"ns", [b""] * 64))
    for dealer in deaf:
        for _ in range(500):
            try:
                dealer.send(frame)
            except zmq.Again:
                break
    assert worker.stats()["counters"]["requests"] > 0
    for dealer in deaf:
        dealer.close()


def test_deadlines_are_kept_under_a_flood(daemon, worker, raw_worker, wait_until) -> None:
    """Requests without end do not keep the clock from being looked at."""
    flooder = raw_worker(daemon.endpoint)
    stop = threading.Event()

    def flood() -> None:
        poller = zmq.Poller()
        poller.register(flooder.dealer, zmq.POLLIN)
        while not stop.is_set():
            for _ in range(30):
                flooder.send(Heartbeat())
            while poller.poll(0):
                flooder.dealer.recv()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        wait_until(lambda: worker.stats()["counters"]["requests"] > 5_000)
        full = worker.reserve(1, b"", headroom=4 * 16)
        assert isinstance(full, Reserved)
        late = worker.reserve(2, b"", headroom=4, wait_s=0.2)
    finally:
        stop.set()
        thread.join()
    assert isinstance(late, Failure) and late.code == "out_of_pages"
    assert 0.2 <= late.details["waited_s"] < 1.0
    flooder.dealer.close()
    flooder.dealer = flooder.socket()
    assert flooder.ask(Bye())


def test_sessions_are_bounded(daemon_factory, raw_worker) -> None:
    small = daemon_factory(limits={"sessions": 3}, heartbeat_s=0.05)
    workers = [raw_worker(small.endpoint) for _ in range(3)]
    attachment = Attachment(workers[0].endpoint, 10.0)
    with pytest.raises(LimitExceeded):
        attachment.hello()
    workers[0].ask(Bye())
    attachment.hello()
    attachment.close()
    for _ in range(7):  # dropped without bye by a process that lives on, and holding nothing
        raw_worker(small.endpoint).close()
    for worker in workers[1:]:
        worker.ask(Bye())
    assert small.stop() == 0
    with pytest.raises(Unavailable):
        Attachment(workers[0].endpoint, 1.0)
