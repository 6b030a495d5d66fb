"""The attach socket, both sides, over real sockets."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import tempfile
import threading
from pathlib import Path

import pytest

from radixkv.commands import Failure, Hello, MapPool, PoolMap, Welcome
from radixkv.errors import BadRequest, OutOfPages, PermissionDenied, Unavailable, VersionMismatch
from radixkv.ipc import attach, wire
from radixkv.ipc.attach import Attachment, Listener
from radixkv.ipc.endpoint import Endpoint, open_socket

WELCOME = Welcome(1, 2**62 - 1, 1, 3, b"t" * 16, "boot", "cache", ["default"], 5.0, 60.0)
POOL = PoolMap("default", 8, 4096, 4096, {"layers": 1}, {"order": ["page"]})


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint(tmp_path / "r.sock")


@pytest.fixture
def listener(endpoint: Endpoint):
    listener = Listener(open_socket(endpoint.attach_path, socket.SOCK_SEQPACKET))
    yield listener
    listener.close()


def wait_readable(item) -> None:
    assert select.select([item], [], [], 5.0)[0]


def answering(listener: Listener, *answers) -> threading.Thread:
    """A daemon that gives these answers (record, descriptors) to one peer and then closes."""

    def run() -> None:
        wait_readable(listener)
        peer = listener.accept()
        assert peer is not None
        for record, fds in answers:
            wait_readable(peer)
            assert peer.receive()
            assert peer.send(record, fds)
        peer.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_kernel_says_who_is_there(endpoint: Endpoint, listener: Listener) -> None:
    assert listener.accept() is None
    assert endpoint.attach_path.stat().st_mode & 0o777 == 0o600
    worker = Attachment(endpoint, 1.0)
    peer = listener.accept()
    assert peer is not None
    assert (peer.pid, peer.uid, peer.is_alive()) == (os.getpid(), os.getuid(), True)
    assert not os.get_inheritable(peer.pidfd)
    assert peer.receive() is None
    worker.close()
    assert peer.receive() == b""
    assert not peer.send(WELCOME)
    peer.close()


def test_hello_and_memory_with_descriptors(endpoint: Endpoint, listener: Listener, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("arena")
    (tmp_path / "t").write_text("table")
    files = [os.open(tmp_path / name, os.O_RDONLY) for name in "at"]
    thread = answering(listener, (WELCOME, ()), (POOL, files))
    worker = Attachment(endpoint, 5.0)
    assert worker.hello("w") == WELCOME
    mapping = worker.map_pool("default")
    assert mapping.pool == POOL
    assert (os.read(mapping.arena_fd, 9), os.read(mapping.table_fd, 9)) == (b"arena", b"table")
    assert not os.get_inheritable(mapping.arena_fd)
    thread.join()
    with pytest.raises(Unavailable):
        worker.map_pool("default")
    for fd in (*files, mapping.arena_fd, mapping.table_fd):
        os.close(fd)


@pytest.mark.parametrize(
    ("answer", "fds", "kind"),
    [
        (Failure("version_mismatch", "no", {"daemon": 2}), [0, 1], VersionMismatch),
        (Failure("out_of_pages", "no", {"need": 1}), [], OutOfPages),
        (POOL, [0, 1], VersionMismatch),
    ],
)
def test_another_answer_than_welcome_leaves_no_descriptor(endpoint, listener, answer, fds, kind) -> None:
    thread = answering(listener, (answer, fds))
    worker = Attachment(endpoint, 5.0)
    before = open_fds()
    with pytest.raises(kind):
        worker.hello()
    thread.join()
    worker.close()
    assert open_fds() <= before


def test_memory_without_both_descriptors_is_refused(endpoint: Endpoint, listener: Listener) -> None:
    for fds in ([], [0]):
        thread = answering(listener, (POOL, fds))
        worker = Attachment(endpoint, 5.0)
        with pytest.raises(VersionMismatch):
            worker.map_pool("default")
        thread.join()
        worker.close()


def test_nobody_there(endpoint: Endpoint, listener: Listener) -> None:
    with pytest.raises(Unavailable):
        Attachment(Endpoint(endpoint.directory / "none" / "r.sock"), 1.0)
    listener.close()
    with pytest.raises(Unavailable):
        Attachment(endpoint, 1.0)


def test_no_answer_in_time_ends_the_attachment(endpoint: Endpoint, listener: Listener) -> None:
    worker = Attachment(endpoint, 0.05)
    with pytest.raises(Unavailable):
        worker.hello()
    assert worker.fileno() == -1
    peer = listener.accept()
    assert peer is not None
    assert wire.decode_attach_request(peer.receive()) == Hello(1, "")
    assert peer.receive() == b"", "an answer that comes too late finds nobody who could take it for another one"
    peer.close()


def test_the_directory_is_checked_before_connecting(endpoint: Endpoint, listener: Listener) -> None:
    endpoint.directory.chmod(0o777)
    with pytest.raises(PermissionDenied):
        Attachment(endpoint, 1.0)
    endpoint.directory.chmod(0o700)


def test_a_peer_that_never_reads_blocks_nobody(endpoint: Endpoint, listener: Listener) -> None:
    worker = Attachment(endpoint, 1.0)
    peer = listener.accept()
    assert peer is not None
    sent = 0
    while peer.send(WELCOME):
        sent += 1
    assert 0 < sent < 100_000
    worker.close()
    peer.close()


def test_packets_that_are_too_long_and_descriptors_from_peers(endpoint: Endpoint, listener: Listener) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(str(endpoint.attach_path))
        peer = listener.accept()
        assert peer is not None
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        raw.send(bytes(attach.PACKET_MAX + 1))
        with pytest.raises(BadRequest, match="at most"):
            peer.receive()
        before = open_fds()
        for _ in range(10):
            raw.sendmsg(
                [wire.encode_attach(MapPool("x"))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))]
            )
            assert wire.decode_attach_request(peer.receive()) == MapPool("x")
        assert open_fds() == before
        peer.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_answered_and_closed() -> None:
    """Even where the files would let him in."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = Endpoint(Path(folder, "r.sock"))
        listener = Listener(open_socket(endpoint.attach_path, socket.SOCK_SEQPACKET))
        endpoint.directory.chmod(0o711)
        endpoint.attach_path.chmod(0o666)
        _let_another_user_try(endpoint, listener)
        listener.close()


def _let_another_user_try(endpoint: Endpoint, listener: Listener) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setresgid(12345, 12345, 12345)
        os.setresuid(12345, 12345, 12345)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(str(endpoint.attach_path))
            raw.settimeout(5.0)
            os.write(writer, struct.pack("<I", len(packet := raw.recv(9999))) + packet)
            os._exit(0 if raw.recv(1) == b"" else 1)
    wait_readable(listener)
    assert listener.accept() is None
    size, packet = struct.unpack("<I", os.read(reader, 4))[0], os.read(reader, 9999)
    assert len(packet) == size
    answer = wire.decode_attach_reply(packet)
    assert isinstance(answer, Failure) and answer.code == "permission_denied"
    assert "12345" in answer.message
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reader)
    os.close(writer)
