"""What ends of connections and processes mean, with real processes on real sockets.

Only the core is played: ``Log`` writes down what it would have been told.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from radixkv.commands import EndSession, Failure, Hello, Join, MappingGone, MapPool, PoolMap, Welcome
from radixkv.errors import SessionLost, Unavailable
from radixkv.ipc import members as membership
from radixkv.ipc import wire
from radixkv.ipc.attach import Attachment, Listener
from radixkv.ipc.endpoint import Endpoint, open_socket
from radixkv.ipc.members import Members

POOL = PoolMap("default", 8, 4096, 4096, {}, {})
LIMIT = 2
TOKEN = b"t" * 16

WORKER = """
import os, sys
from pathlib import Path
from radixkv.ipc.attach import Attachment
from radixkv.ipc.endpoint import Endpoint
worker = Attachment(Endpoint(Path(sys.argv[1])), 10.0)
worker.hello("child")
if "fork" in sys.argv:
    child = os.fork()  # it inherits the connection
    if child == 0:
        os.read(0, 1)
        os._exit(0)
    print(child, flush=True)
else:
    print("hello", flush=True)
if os.read(0, 1) == b"c":
    worker.close()
    print("closed", flush=True)
    os.read(0, 1)
"""

JOINER = """
import sys
from pathlib import Path
from radixkv.ipc.attach import Attachment
from radixkv.ipc.endpoint import Endpoint
member = Attachment(Endpoint(Path(sys.argv[1])), 10.0)
member.join(int(sys.argv[2]), b"t" * 16, 1)
sys.stdin.read()
"""


class Log:
    def __init__(self) -> None:
        self.reports: list[EndSession | MappingGone] = []
        self.opened: list[str] = []
        self.joined: list[int] = []
        self.mapped_by: list[int] = []
        self.session = 0
        self.died: set[int] = set()
        """Processes whose mappings the last report said are gone with them."""
        self.refusal: Failure | None = None
        self.quarantines = True
        """Whether sessions leave pages that their processes could still write to."""

    def open_session(self, session: int, name: str) -> Welcome | Failure:
        if self.refusal:
            return self.refusal
        self.opened.append(name)
        self.session = session
        return Welcome(1, session, 1, 0, TOKEN, "b", "c", ["default"], 5.0, 60.0)

    def join_session(self, session: int, token: bytes, rank: int) -> Welcome | Failure:
        if token != TOKEN:
            return Failure("session_lost", "another token")
        self.joined.append(rank)
        return Welcome(1, session, 1, 0, token, "b", "c", ["default"], 5.0, 60.0)

    def map_pool(self, name: str, rank: int) -> tuple[PoolMap, tuple[int, int]] | Failure:
        self.mapped_by.append(rank)
        return (POOL, (0, 1)) if name == "default" else Failure("bad_request", f"no pool {name}")

    def report(self, command: EndSession | MappingGone, pids: Collection[int] = ()) -> bool:
        self.reports.append(command)
        self.died = set(pids)
        return self.quarantines and isinstance(command, EndSession) and command.mapped


class Door:
    """A listening socket, its epoll, its members."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.log = Log()
        self.listener = Listener(open_socket(endpoint.attach_path, socket.SOCK_SEQPACKET))
        self.epoll = select.epoll()
        self.members = Members(self.listener, self.epoll, self.log, LIMIT, None)

    def serve(self, wait_s: float = 5.0, now: float = 0.0) -> None:
        """One round: wait for something to happen and react."""
        events = self.epoll.poll(wait_s)
        assert events, "nothing happened"
        for fd, _ in events:
            self.members.handle(fd, now)

    def settle(self, now: float = 0.0) -> None:
        while events := self.epoll.poll(0.05):
            for fd, _ in events:
                self.members.handle(fd, now)

    def ask(self, raw: socket.socket, record: Hello | MapPool | bytes):
        raw.send(record if isinstance(record, bytes) else wire.encode_attach(record))
        self.settle()
        raw.settimeout(5.0)
        packet = raw.recv(70_000)
        return wire.decode_attach_reply(packet) if packet else None

    def close(self) -> None:
        self.members.close()
        self.epoll.close()
        self.listener.close()


@pytest.fixture
def door(tmp_path: Path):
    door = Door(Endpoint(tmp_path / "r.sock"))
    yield door
    door.close()


@pytest.fixture
def raw(door: Door):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(str(door.endpoint.attach_path))
        yield raw


def worker(door: Door, *how: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WORKER, str(door.endpoint.path), *how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    while not door.log.opened:
        door.serve()
    return process


def finish(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait()


def until(door: Door, count: int) -> list[EndSession | MappingGone]:
    while len(door.log.reports) < count:
        door.serve()
    return door.log.reports


def kinds(reports: list[EndSession | MappingGone]) -> list[tuple[str, bool | None]]:
    return [(type(report).__name__, getattr(report, "mapped", None)) for report in reports]


def test_a_killed_process_ends_its_session_once(door: Door) -> None:
    process = worker(door)
    assert len(door.members) == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    door.settle()
    assert kinds(door.log.reports) in ([("EndSession", False)], [("EndSession", True), ("MappingGone", None)])
    assert len(door.members) == 0
    finish(process)


def test_a_closed_connection_quarantines_until_the_process_ends(door: Door) -> None:
    process = worker(door)
    assert process.stdin is not None
    process.stdin.write(b"c")
    process.stdin.flush()
    assert kinds(until(door, 1)) == [("EndSession", True)]
    door.settle()
    assert len(door.members) == 1, "its process could still write"
    finish(process)
    assert kinds(until(door, 2)) == [("EndSession", True), ("MappingGone", None)]
    assert len(door.members) == 0


def test_a_session_that_left_no_pages_is_forgotten_with_its_connection(door: Door) -> None:
    """One living process may open and drop as many as it likes: nobody else is kept out by that."""
    door.log.quarantines = False
    for _ in range(2 * LIMIT + 1):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(str(door.endpoint.attach_path))
            assert isinstance(door.ask(raw, Hello(1, "w")), Welcome)
        door.settle()
        assert len(door.members) == 0
    assert kinds(door.log.reports) == [("EndSession", True)] * (2 * LIMIT + 1)


def test_a_child_that_inherited_the_connection_holds_the_mapping_open(door: Door) -> None:
    process = worker(door, "fork")
    assert process.stdout is not None and process.stdin is not None
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert kinds(until(door, 1)) == [("EndSession", True)]
    door.settle()
    assert len(door.log.reports) == 1
    os.kill(child, signal.SIGKILL)
    assert kinds(until(door, 2)) == [("EndSession", True), ("MappingGone", None)]
    finish(process)


def test_bye_says_that_nothing_is_mapped_any_more(door: Door) -> None:
    process = worker(door)
    door.members.ended(door.log.session, mapped=False)
    assert process.stdin is not None
    process.stdin.write(b"c")
    process.stdin.flush()
    while len(door.members):
        door.serve()
    finish(process)
    door.settle()
    assert door.log.reports == []


def test_a_revoked_session_may_still_write_until_both_ends_were_seen(door: Door) -> None:
    process = worker(door)
    door.members.ended(door.log.session, mapped=True)
    finish(process)
    assert kinds(until(door, 1)) == [("MappingGone", None)]
    door.settle()
    assert len(door.log.reports) == 1 and len(door.members) == 0


def test_what_a_connection_may_ask(door: Door, raw: socket.socket) -> None:
    before_hello = door.ask(raw, MapPool("default"))
    assert isinstance(before_hello, Failure) and before_hello.code == "bad_request"
    wrong = door.ask(raw, Hello(99, "w"))
    assert isinstance(wrong, Failure)
    assert (wrong.code, wrong.details) == ("version_mismatch", {"daemon": 1, "client": 99})
    for garbage in (b"\xc1", b"\x91" * 60_000, b"\x91\xa7goodbye", b"\x93\xa5hello\xa11"):
        answer = door.ask(raw, garbage)
        assert isinstance(answer, Failure) and answer.code == "bad_request"
    assert isinstance(door.ask(raw, Hello(1, "w")), Welcome)
    again = door.ask(raw, Hello(1, "w"))
    assert isinstance(again, Failure) and "already" in again.message
    nowhere = door.ask(raw, MapPool("nowhere"))
    assert isinstance(nowhere, Failure) and nowhere.code == "bad_request"
    assert door.ask(raw, MapPool("default")) == POOL
    door.members.ended(door.log.session, mapped=True)
    over = door.ask(raw, MapPool("default"))
    assert isinstance(over, Failure) and over.code == SessionLost.code
    assert door.log.opened == ["w"]


def test_the_cores_refusal_is_passed_on_and_another_hello_is_possible(door: Door, raw: socket.socket) -> None:
    door.log.refusal = Failure("draining", "no")
    assert door.ask(raw, Hello(1, "w")) == door.log.refusal
    door.log.refusal = None
    assert isinstance(door.ask(raw, Hello(1, "w")), Welcome)


def test_who_never_says_hello_is_closed(door: Door, raw: socket.socket) -> None:
    assert door.members.settled
    door.settle(now=100.0)
    door.members.sweep(100.0 + membership.HELLO_WITHIN_S)
    assert door.epoll.poll(0.0) == []
    assert not door.members.settled, "there is somebody to be swept away"
    door.members.sweep(100.1 + membership.HELLO_WITHIN_S)
    assert door.members.settled
    raw.settimeout(5.0)
    assert raw.recv(10) == b""
    assert door.log.reports == []


def test_strangers_are_bounded(door: Door) -> None:
    crowd = []
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(70):
        crowd.append(Attachment(door.endpoint, 5.0))
        door.settle()
    with pytest.raises(Unavailable):
        crowd[0].hello()
    for each in crowd:
        each.close()
    door.settle()
    assert len(os.listdir("/proc/self/fd")) == before


def test_sessions_whose_processes_live_on_are_bounded(door: Door) -> None:
    """Otherwise one process could take a pidfd here with every session that it opens and drops."""
    for count in range(2 * LIMIT):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(str(door.endpoint.attach_path))
            assert isinstance(door.ask(raw, Hello(1, "w")), Welcome)
        door.settle()
        assert len(door.members) == count + 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(str(door.endpoint.attach_path))
        refused = door.ask(raw, Hello(1, "w"))
        assert isinstance(refused, Failure) and refused.code == "limit_exceeded"


def test_no_descriptors_left_is_survived(door: Door) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(str(door.endpoint.attach_path))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            door.serve()
            assert door.epoll.poll(0.0) == [], "it does not spin"
            assert not door.members.settled, "and does not forget that somebody is at the door"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        door.members.sweep(0.0)
        assert isinstance(door.ask(raw, Hello(1, "w")), Welcome)


def test_an_event_of_a_former_owner_of_a_number_harms_nobody(door: Door, raw: socket.socket) -> None:
    assert isinstance(door.ask(raw, Hello(1, "w")), Welcome)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        door.members.handle(fd, 0.0)
    assert door.log.reports == []
    assert door.ask(raw, MapPool("default")) == POOL


# -- sessions of several processes ------------------------------------------------------------------------------------


@pytest.fixture
def crowd(door: Door):
    sockets = []

    def connect() -> socket.socket:
        sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sockets[-1].connect(str(door.endpoint.attach_path))
        return sockets[-1]

    yield connect
    for each in sockets:
        each.close()


def test_further_processes_join_with_the_sessions_token(door: Door, raw: socket.socket, crowd) -> None:
    assert isinstance(door.ask(raw, Hello(1, "first")), Welcome)
    session = door.log.session
    for join, code in (
        (Join(9, session, TOKEN, 1), "version_mismatch"),
        (Join(1, session + 1, TOKEN, 1), "session_lost"),
        (Join(1, session, b"x" * 16, 1), "session_lost"),
        (Join(1, session, TOKEN, 0), "bad_request"),
    ):
        refused = door.ask(crowd(), join)
        assert isinstance(refused, Failure) and refused.code == code
    second, third = crowd(), crowd()
    assert isinstance(door.ask(second, Join(1, session, TOKEN, 1)), Welcome)
    taken = door.ask(third, Join(1, session, TOKEN, 1))
    assert isinstance(taken, Failure) and taken.code == "bad_request"
    assert isinstance(door.ask(third, Join(1, session, TOKEN, 2)), Welcome)
    again = door.ask(third, Join(1, session, TOKEN, 3))
    assert isinstance(again, Failure) and "already" in again.message
    assert door.ask(second, MapPool("default")) == door.ask(third, MapPool("default")) == POOL
    assert door.log.mapped_by == [1, 2]
    assert len(door.members) == 1


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_the_end_of_one_connection_ends_the_session_and_all_are_told(door: Door, crowd, ends: int) -> None:
    ranks = [crowd() for _ in range(3)]
    door.ask(ranks[0], Hello(1, "first"))
    for rank in (1, 2):
        door.ask(ranks[rank], Join(1, door.log.session, TOKEN, rank))
    ranks.pop(ends).close()
    assert kinds(until(door, 1)) == [("EndSession", True)]
    for each in ranks:
        assert each.recv(10) == b"", "the daemon has hung up"
        each.close()
    door.settle()
    assert kinds(door.log.reports) == [("EndSession", True)], "this process lives, and has the memory"
    assert len(door.members) == 1


def test_the_memory_stays_out_of_use_while_one_process_lives(door: Door, crowd) -> None:
    """Rank 0 is a process of its own; rank 1 is this one, which lives on."""
    process = worker(door)
    second = crowd()
    door.ask(second, Join(1, door.log.session, TOKEN, 1))
    finish(process)
    assert kinds(until(door, 1)) == [("EndSession", True)]
    second.close()
    door.settle()
    assert kinds(door.log.reports) == [("EndSession", True)]


def test_after_a_bye_the_others_are_waited_for_and_rank_0_is_not(door: Door, raw: socket.socket) -> None:
    """Rank 1 is a process of its own, rank 0 this one."""
    assert isinstance(door.ask(raw, Hello(1, "first")), Welcome)
    command = [sys.executable, "-c", JOINER, str(door.endpoint.path), str(door.log.session)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    while len(door.log.joined) < 1:
        door.serve()
    door.members.ended(door.log.session, mapped=True, bye=True)
    finish(process)
    assert kinds(until(door, 1)) == [("MappingGone", None)]
    assert door.log.died == {process.pid}, "rank 0 lives, and by its own word touches nothing"
    assert len(door.members) == 0
