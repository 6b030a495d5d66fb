"""After fork() the child has nothing of its parent's client, and the parent notices nothing."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import radixkv

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(check: Callable[[], None]) -> None:
    """Run a check in a forked child; fails with the child's traceback."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            check()
            status = 0
        except BaseException as error:  # noqa: BLE001 - it is reported by the parent
            import traceback

            os.write(write, "".join(traceback.format_exception(error)).encode())
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, said


def test_any_use_in_the_child_raises_forked(client: Any, pool: Any, ns: Any) -> None:
    with pool.reserve(range(10), namespace=ns) as seq:
        seq.commit(4)

        def check() -> None:
            for use in (
                client.stats,
                lambda: client.pool("default"),
                lambda: client.pool("half"),
                lambda: pool.reserve([1]),
                lambda: pool.lookup([1]),
                lambda: pool.keys(0),
                lambda: pool.step(free=[seq]),
                lambda: seq.commit(5),
                lambda: seq.extend([1]),
                seq.free,
                seq.valid,
                seq.share,
            ):
                with pytest.raises(radixkv.Forked):
                    use()
            client.close()
            with seq:
                pass

        in_child(check)
        assert seq.valid()
        seq.extend([1])
        assert client.stats().sessions == 1


def test_clients_that_were_closed_before_are_no_obstacle(client: Any, connect: Any, pool: Any) -> None:
    closed = [connect(), connect()]
    for one in closed:
        one.pool("default")
        one.close()

    def check() -> None:
        with pytest.raises(radixkv.Forked):
            client.stats()
        for one in closed:
            with pytest.raises(radixkv.RadixKVError):
                one.stats()

    in_child(check)
    assert client.stats().sessions == 1


def test_the_childs_end_is_not_the_parents(client: Any, pool: Any, ns: Any) -> None:
    with pool.reserve(range(10), namespace=ns) as seq:
        script_ends = in_child
        script_ends(lambda: None)
        seq.commit(10)
        assert seq.valid()
        assert client.stats().pools["default"].sequences == 1


def test_a_child_can_open_its_own_client(client: Any, pool: Any, daemon: Any, ns: Any) -> None:
    def check() -> None:
        with radixkv.connect(daemon.endpoint) as own:
            mine = own.pool("default")
            with mine.reserve(range(10), namespace=ns) as seq:
                assert (seq.cached_tokens, seq.valid()) == (8, True)
                mine.keys(0)[int(seq.page_table[2]), 0] = 5.0
            assert own.stats().sessions == 2

    with pool.reserve(range(10), namespace=ns) as seq:
        seq.commit(10)
        in_child(check)
        in_child(check)
        assert pool.lookup(range(10), namespace=ns).device_tokens == 8


def test_the_child_has_no_connection_and_no_mapping(client: Any, pool: Any, daemon: Any, ns: Any) -> None:
    pool.lookup([1], namespace=ns)
    path = daemon.endpoint.removeprefix("ipc://")

    def connections() -> int:
        """Unix connections of this process to the daemon, by the inodes of its descriptors."""
        from radixkv.client.forks import _peer

        found = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                peer = _peer(int(name))
            except OSError:
                continue
            found += peer in (path.encode(), f"{path}.attach".encode())
        return found

    def check() -> None:
        assert connections() == 0
        maps = Path("/proc/self/maps").read_text()
        assert "memfd:radixkv" not in maps

    assert connections() >= 2
    assert "memfd:radixkv" in Path("/proc/self/maps").read_text()
    in_child(check)


def test_an_idle_child_does_not_keep_the_parents_session_alive(daemon: Any, client: Any, wait_until: Any) -> None:
    """The parent dies; its child lives on, forked while the client was open."""
    script = """
import os, sys, radixkv
client = radixkv.connect(sys.argv[1])
seq = client.pool("half").reserve(range(8))
if os.fork() == 0:
    os.close(1)
    os.close(2)
    sys.stdin.read()
    os._exit(0)
os.kill(os.getpid(), 9)
"""
    sessions = client.stats().sessions
    parent = subprocess.Popen([sys.executable, "-c", script, daemon.endpoint], stdin=subprocess.PIPE)
    parent.wait(60)
    try:
        wait_until(lambda: client.stats().sessions == sessions, what="the end of the dead worker's session")
        wait_until(lambda: client.stats().pools["half"].pages.free == 8, what="its pages")
    finally:
        assert parent.stdin is not None
        parent.stdin.close()


FORKS = {
    "by Python": os.fork,
    "by a library": ctypes.PyDLL(None).fork,  # no handler of Python's runs in the child
}


@pytest.mark.parametrize("how", FORKS)
def test_a_child_that_touches_the_mapping_faults(client: Any, pool: Any, ns: Any, how: str) -> None:
    """So that a dead worker's pages need not wait for children that have forgotten it."""
    with pool.reserve(range(4), namespace=ns) as seq:
        view = pool.keys(0)
        page = int(seq.page_table[0])
        view[page] = 1.0
        child = FORKS[how]()
        if child == 0:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            view[page] = 2.0
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
        assert (view[page] == 1.0).all()
        assert seq.valid()


def test_a_child_that_holds_the_connection_holds_the_pages_back(
    daemon: Any, client: Any, wait_until: Any, ns: Any
) -> None:
    """Forked by a library, so that nobody could close it there. Pins are back at once, pages with the child's end."""
    script = """
import ctypes, os, signal, sys, radixkv
client = radixkv.connect(sys.argv[1])
pool = client.pool("half")
shared = pool.reserve(range(9), namespace=radixkv.Namespace(sys.argv[2]))
shared.commit(9)
child = ctypes.PyDLL(None).fork()
if child == 0:
    signal.alarm(60)
    signal.pause()
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

    def pages() -> tuple[int, int, int]:
        pool = client.stats().pools["half"]
        return pool.evictable_pages, pool.pages.quarantined, pool.pages.free

    evictable, _, free = pages()
    sessions = client.stats().sessions
    command = [sys.executable, "-c", script, daemon.endpoint, ns.model]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.wait(60)
            wait_until(lambda: client.stats().sessions == sessions, what="the end of the dead worker's session")
            assert pages() == (evictable + 2, 1, free - 3)
        finally:
            os.kill(child, signal.SIGKILL)
    wait_until(lambda: pages() == (evictable + 2, 0, free - 2), what="the return of the private page")


def test_multiprocessing_with_fork_exits_cleanly(daemon: Any) -> None:
    script = """
import multiprocessing, sys, radixkv
def child(pool):
    try:
        pool.reserve([1])
    except radixkv.Forked:
        with radixkv.connect(sys.argv[1]) as own:
            own.pool("default").reserve([1]).free()
        sys.exit(7)
client = radixkv.connect(sys.argv[1])
pool = client.pool("default")
view = pool.keys(0)
seq = pool.reserve(range(4))
process = multiprocessing.get_context("fork").Process(target=child, args=(pool,))
process.start()
process.join()
seq.free()
sys.exit(process.exitcode - 7)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, daemon.endpoint], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
