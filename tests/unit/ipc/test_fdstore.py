"""The sd_notify protocol, the daemon's side, over real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from radixkv.errors import Unavailable
from radixkv.ipc.fdstore import SEND_MS, Store, find_store, take_stored


@pytest.fixture(params=["path", "abstract"])
def ends(request: pytest.FixtureRequest, tmp_path: Path):
    """The store's socket and the daemon's end of it."""
    address = str(tmp_path / "notify") if request.param == "path" else f"@radixkv-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.setblocking(False)
        there.bind(address.replace("@", "\0"))
        here = find_store({"NOTIFY_SOCKET": address, "FDSTORE": "10"})
        assert here is not None
        yield there, here
        here.close()


def said(there: socket.socket) -> list[tuple[str, int]]:
    """All messages so far, and how many descriptors came with each."""
    found = []
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(there, 4096, 10)
        except BlockingIOError:
            return found
        for fd in fds:
            os.close(fd)
        found.append((message.decode(), len(fds)))


def test_what_is_said(ends) -> None:
    there, store = ends
    store.keep("table-0", 0, 1)
    store.drop("table-0")
    store.ready()
    assert said(there) == [
        ("FDSTORE=1\nFDNAME=table-0\nFDPOLL=0", 2),
        ("FDSTOREREMOVE=1\nFDNAME=table-0", 0),
        ("READY=1", 0),
    ]


def test_a_store_that_does_not_read(ends) -> None:
    there, store = ends
    store.ready()
    begin = time.monotonic()
    with pytest.raises(Unavailable):
        for count in range(10_000):
            store.keep(f"member-{count}", 0)
    assert time.monotonic() - begin > SEND_MS / 2000
    begin = time.monotonic()
    for count in range(100):
        store.drop(f"member-{count}")
        with pytest.raises(Unavailable):
            store.keep("one more", 0)
    assert time.monotonic() - begin < 100 * SEND_MS / 2000, "it was waited for once"
    said(there)
    later: list[str] = []
    while "member-99" not in str(later):
        store.flush()
        later += [message for message, _ in said(there)]
    assert later == [f"FDSTOREREMOVE=1\nFDNAME=member-{count}" for count in range(100)], "nothing is forgotten"
    store.keep("one more", 0)
    assert len(said(there)) == 1


def test_a_daemon_that_starts_is_patient(ends) -> None:
    """A machine that is busy may let its keeper wait: nobody is served yet, so the daemon may as well."""
    there, store = ends

    def read() -> None:
        time.sleep(3 * SEND_MS / 1000)  # longer than a daemon that serves would wait
        said(there)

    reader = threading.Thread(target=read)
    reader.start()
    for count in range(20):
        store.keep(f"arena-{count}", 0)
    reader.join()


def test_a_cold_start_drops_many_and_a_store_that_reads_gets_all_and_the_last_word(ends) -> None:
    """What is kept and that the daemon is ready comes behind more messages than the socket holds."""
    there, store = ends
    found: list[str] = []

    def read() -> None:
        there.settimeout(10.0)
        while not found or found[-1] != "READY=1":
            message, fds, _, _ = socket.recv_fds(there, 4096, 10)
            found.append(message.decode().partition("\n")[0])
            for fd in fds:
                os.close(fd)

    for count in range(500):
        store.drop(f"member-{count}")
    reader = threading.Thread(target=read)
    reader.start()
    store.keep("arena-0-0", 0)
    for count in range(50):
        store.drop(f"member-{count}")
    store.ready()
    reader.join()
    assert found == ["FDSTOREREMOVE=1"] * 500 + ["FDSTORE=1"] + ["FDSTOREREMOVE=1"] * 50 + ["READY=1"]


def test_a_store_that_is_gone(ends) -> None:
    there, store = ends
    there.close()
    with pytest.raises(Unavailable):
        store.keep("table-0", 0)
    store.drop("table-0")
    store.ready()


@pytest.mark.parametrize(
    "environ",
    [{}, {"NOTIFY_SOCKET": "/nowhere"}, {"NOTIFY_SOCKET": "/nowhere", "FDSTORE": "0"}, {"FDSTORE": "9"}],
)
def test_a_supervisor_that_keeps_nothing_is_no_store(environ: dict[str, str]) -> None:
    assert find_store(environ) is None
    assert environ == {}


def test_a_store_that_cannot_be_reached() -> None:
    with pytest.raises(Unavailable, match="/nowhere"):
        Store("/nowhere")


@pytest.mark.parametrize(
    "environ",
    [
        {"LISTEN_PID": "1", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"},
        {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "x", "LISTEN_FDNAMES": "a"},
    ],
)
def test_descriptors_for_somebody_else_are_not_taken(environ: dict[str, str]) -> None:
    assert take_stored(environ) == {}
    assert environ == {}


def test_descriptors_come_by_name_and_go_to_nobody_else() -> None:
    program = """
import os
from radixkv.ipc.fdstore import take_stored
for place in (3, 4, 5):
    os.dup2(0, place, inheritable=True)
environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "3", "LISTEN_FDNAMES": "a:b:a"}
assert take_stored(environ) == {"a": [3, 5], "b": [4]}
assert not any(os.get_inheritable(place) for place in (3, 4, 5))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
