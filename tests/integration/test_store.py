"""The daemon and a store that is nobody's keeper (as systemd's): what is kept, taken over, refused, thrown away."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from radixkv.commands import Bye, Commit, Done, Failure, Heartbeat, Shutdown, Step, Stepped, Welcome
from radixkv.device.descriptors import TAINTED_AT
from radixkv.errors import Unavailable
from radixkv.ipc.attach import Attachment
from radixkv.ipc.endpoint import resolve
from radixkv.ipc.fdstore import SEND_MS
from radixkv.ipc.question import ask
from tests.integration.raw import tokens
from tests.integration.store_by_hand import StoreByHand

POOL = "name=default,layers=1,kv_heads=1,head_dim=8,dtype=float32,page_size=4,pages=8"
MEMORY = ["arena-0-0", "manifest", "table-0"]
DOORS = ["doors"] * 3
FILES = ["r.sock", "r.sock.attach", "r.sock.lock"]


@pytest.fixture
def store(tmp_path: Path):
    (tmp_path / "store").mkdir()
    made = StoreByHand(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture
def serve(store: StoreByHand, tmp_path: Path, serve_command):
    """``serve("--cold", pool=..., without=("doors",))``: a daemon with what is in the store, its ready line read."""
    started = []

    def start(*flags: str, pool: str = POOL, without: tuple[str, ...] = (), directory: Path | None = None):
        directory = directory or tmp_path / "run"
        started.append(store.start(serve_command(directory, "--pool", pool, *flags), without))
        store.collect()
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.end(signal.SIGKILL)


@pytest.fixture
def cached(serve, raw_worker):
    """A daemon that has 8 tokens cached, and was killed."""
    daemon = serve()
    worker = raw_worker(daemon.ready["endpoint"])
    worker.reserve(1, tokens(8))
    assert worker.ask(Step(commit=[Commit(1, 8)])) == Stepped(commit=[None])
    assert worker.ask(Bye()) == Done()
    assert daemon.end(signal.SIGKILL)[0] == -signal.SIGKILL
    return daemon


def hits(worker) -> int:
    found = worker.reserve(100, tokens(9)).cached_tokens
    assert worker.free(100) == Stepped(free=[None])
    return found


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run").iterdir())


def refused(serve, *flags: str, **how) -> tuple[int, str]:
    daemon = serve(*flags, **how)
    assert daemon.ready is None
    return daemon.end()


def test_what_is_kept_and_when(store: StoreByHand, serve, raw_worker, wait_until) -> None:
    daemon = serve()
    assert store.collect() == sorted(MEMORY + DOORS)
    assert store.said == ["READY=1"]
    worker = raw_worker(daemon.ready["endpoint"], resumes=True)
    member = f"member-{worker.welcome.session:x}-0"
    assert store.collect() == sorted([*MEMORY, *DOORS, member, member]), "before the welcome is here"
    assert worker.ask(Bye()) == Done()
    worker.close()
    wait_until(lambda: store.collect() == sorted(MEMORY + DOORS))


def test_a_stop_takes_the_sockets_along_and_leaves_the_memory(
    store: StoreByHand, serve, cached, raw_worker, tmp_path: Path
) -> None:
    """As ``systemctl restart`` does it."""
    assert serve().end(signal.SIGTERM)[0] == 0
    assert [name for name in store.collect() if not name.startswith("member-")] == MEMORY
    assert files(tmp_path) == []
    daemon = serve()
    assert hits(raw_worker(daemon.ready["endpoint"])) == 8
    assert daemon.ready["cache_id"] == cached.ready["cache_id"]
    assert files(tmp_path) == FILES


def test_a_shutdown_leaves_everything_to_the_next(store: StoreByHand, serve, cached, raw_worker, tmp_path) -> None:
    daemon = serve()
    worker = raw_worker(daemon.ready["endpoint"], resumes=True)
    holds = worker.reserve(1, tokens(4, first=50))
    assert holds.page_table
    assert ask(resolve(daemon.ready["endpoint"]), Shutdown(), 5.0) == Done()
    code, log = daemon.end()
    assert code == 0 and "leaving everything" in log
    assert files(tmp_path) == FILES
    waiting = resolve(daemon.ready["endpoint"])
    newcomer = Attachment(waiting, 20.0)  # connects while nobody serves
    following = serve()
    assert isinstance(newcomer.hello(), Welcome)
    newcomer.close()
    assert following.ready["boot_id"] != daemon.ready["boot_id"]
    assert isinstance(worker.rejoin(), Welcome)
    assert hits(worker) == 8


def test_a_shutdown_that_comes_too_late_is_not_executed(serve, raw_worker) -> None:
    worker = raw_worker(serve().ready["endpoint"])
    late = worker.ask(Shutdown(), deadline_s=-1.0)
    assert isinstance(late, Failure) and late.code == "timeout"
    assert worker.ask(Heartbeat()) == Done()


def test_memory_of_other_sizes_is_refused(serve, cached) -> None:
    for flags, pool, part in (
        ([], POOL.replace("pages=8", "pages=16"), "pages of pool 'default' was 8 and is 16"),
        ([], POOL.replace("head_dim=8", "head_dim=16"), "head_dim of pool 'default' was 8 and is 16"),
        ([], POOL.replace("32", "16"), "dtype of pool 'default' was 'float32' and is 'float16'"),
        ([], POOL.replace("default", "other"), "pool 'default' is not configured any more"),
        (["--limits.sessions", "100"], POOL, "limits.sessions was 256 and is 100"),
    ):
        code, log = refused(serve, *flags, pool=pool)
        assert code == 2
        assert part in log and "--cold" in log
    assert serve().ready["cache_id"] == cached.ready["cache_id"], "a refusal harms nothing"


def test_rules_of_a_pool_may_change(serve, cached, raw_worker) -> None:
    daemon = serve("--lease-s", "30", pool=f"{POOL},session_cap_pages=4,decode_reserve_pages=1")
    assert hits(raw_worker(daemon.ready["endpoint"])) == 8


def test_more_pools_in_another_order(store: StoreByHand, serve, raw_worker) -> None:
    two = ["--pool", POOL.replace("default", "second")]
    first = serve(*two)
    assert first.end(signal.SIGKILL)[0] == -signal.SIGKILL
    code, log = refused(serve, *two, "--pool", POOL.replace("default", "third"))
    assert code == 2 and "pool 'third' is new" in log
    daemon = serve("--pool", POOL, pool=POOL.replace("default", "second"))
    assert daemon.ready["cache_id"] == first.ready["cache_id"]


def test_another_version_is_refused_and_cold_begins_anew(store: StoreByHand, serve, cached, raw_worker) -> None:
    manifest = json.loads(os.pread(store.fd("manifest"), 65536, 0))
    store.replace("manifest", json.dumps({**manifest, "table_version": 99}).encode())
    code, log = refused(serve)
    assert code == 2
    assert "the descriptor table has version 99" in log and "--cold" in log
    daemon = serve("--cold")
    assert daemon.ready["cache_id"] != cached.ready["cache_id"]
    assert store.collect() == sorted(MEMORY + DOORS), "the old memory is let go"
    assert hits(raw_worker(daemon.ready["endpoint"])) == 0


def test_a_table_that_is_none_is_refused(store: StoreByHand, serve, cached) -> None:
    os.pwrite(store.fd("table-0"), b"\xff", 8)
    code, log = refused(serve)
    assert code == 2
    assert "version" in log and "--cold" in log


def test_a_marked_table_is_not_trusted(store: StoreByHand, serve, cached, raw_worker) -> None:
    """Nor kept, by anybody: else its memory would be taken twice."""
    os.pwrite(store.fd("table-0"), b"\x01", TAINTED_AT)
    marked = {os.fstat(store.fd(name)).st_ino for name in MEMORY}
    daemon = serve()
    assert daemon.ready["cache_id"] != cached.ready["cache_id"]
    assert store.collect() == sorted(MEMORY + DOORS)
    assert not marked & {path.stat().st_ino for path in Path(f"/proc/{daemon.ready['pid']}/fd").iterdir()}
    assert hits(raw_worker(daemon.ready["endpoint"])) == 0
    code, log = daemon.end(signal.SIGTERM)
    assert code == 0 and "not to be trusted" in log


def test_a_first_start_that_was_killed_is_no_start(store: StoreByHand, serve, cached) -> None:
    store.forget("manifest")
    daemon = serve()
    assert daemon.ready["cache_id"] != cached.ready["cache_id"]
    assert store.collect() == sorted(MEMORY + DOORS)


def test_a_session_that_nothing_can_watch_is_over(store: StoreByHand, serve, raw_worker) -> None:
    """The store had no room for it, say. Nothing will tell when its process is gone: its pages stay out of use."""
    daemon = serve()
    worker = raw_worker(daemon.ready["endpoint"], resumes=True)
    worker.reserve(1, tokens(8))
    daemon.end(signal.SIGKILL)
    store.collect()
    store.forget(f"member-{worker.welcome.session:x}-0")
    daemon = serve()
    assert worker.rejoin().code == "session_lost"
    other = raw_worker(daemon.ready["endpoint"])
    assert other.pages() == {"free": 6, "quarantined": 2}
    _, log = daemon.end(signal.SIGKILL)
    assert "out of use for good" in log


BROKEN_RECOVERY = """
import sys
from radixkv.daemon import starting
from radixkv.cli.app import main

def recover(*what):
    raise KeyError("planted")

starting.recover = recover
sys.exit(main(sys.argv[1:]))
"""


def test_recovery_that_fails_makes_the_next_start_cold(
    store: StoreByHand, serve, cached, serve_command, tmp_path: Path
) -> None:
    """Instead of failing in the same way for ever."""
    command = serve_command(tmp_path / "run", "--pool", POOL)
    broken = [sys.executable, "-c", BROKEN_RECOVERY, *command[command.index("serve") :]]
    daemon = store.start(broken)
    assert daemon.ready is None
    code, log = daemon.end()
    assert code == 70
    assert "planted" in log and "the next start is cold" in log
    daemon = store.start(broken)
    assert daemon.ready is not None and daemon.ready["cache_id"] != cached.ready["cache_id"]
    assert daemon.end(signal.SIGTERM)[0] == 0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == []


def test_two_daemons_never_write_to_one_memory(store: StoreByHand, serve, cached, tmp_path: Path, raw_worker) -> None:
    first = serve()
    code, log = refused(serve, without=("doors",), directory=tmp_path / "elsewhere")
    assert code == 3
    assert "another daemon still serves from this memory" in log
    worker = raw_worker(first.ready["endpoint"])
    assert hits(worker) == 8
    assert first.end(signal.SIGKILL)[0] == -signal.SIGKILL
    table = worker.attachment  # what workers still hold of the memory keeps nobody out
    assert serve().ready is not None
    table.close()


HELD_AT_FIRST = """
import os, sys
from radixkv.cli.app import main
from radixkv.device import arena

table = 3 + os.environ["LISTEN_FDNAMES"].split(":").index("table-0")
held = arena.lock(table)
arena.time.sleep = lambda _: os.close(held)
sys.exit(main(sys.argv[1:]))
"""


def test_what_an_earlier_daemon_leaves_running_for_a_moment_is_waited_for(
    store: StoreByHand, cached, serve_command, tmp_path: Path, raw_worker
) -> None:
    """Its copier holds the lock too. Here somebody has it when the next daemon asks, and lets go as that one waits."""
    command = serve_command(tmp_path / "run", "--pool", POOL)
    daemon = store.start([sys.executable, "-c", HELD_AT_FIRST, *command[command.index("serve") :]])
    assert daemon.ready is not None and daemon.ready["cache_id"] == cached.ready["cache_id"]
    assert hits(raw_worker(daemon.ready["endpoint"])) == 8
    code, log = daemon.end(signal.SIGTERM)
    assert code == 0, log


def test_sockets_of_another_endpoint_are_refused(serve, cached, tmp_path: Path) -> None:
    code, log = refused(serve, directory=tmp_path / "elsewhere")
    assert code == 2
    assert "server.endpoint" in log and str(tmp_path / "run" / "r.sock") in log


def test_sockets_whose_files_are_gone_are_made_anew(
    store: StoreByHand, serve, cached, raw_worker, tmp_path: Path
) -> None:
    """systemd, say, has removed the directory, or the message that they are not needed any more was lost."""
    for name in FILES:
        (tmp_path / "run" / name).unlink()
    daemon = serve()
    assert files(tmp_path) == FILES
    assert hits(raw_worker(daemon.ready["endpoint"])) == 8
    assert [name for name in store.collect() if name == "doors"] == DOORS


def test_more_sessions_than_a_store_can_keep_are_refused(serve) -> None:
    code, log = refused(serve, "--limits.sessions", "1001")
    assert code == 2
    assert "limits.sessions = 1001 is not allowed; allowed: at most 1000" in log


def test_a_store_that_does_not_read_keeps_newcomers_out_and_nobody_else(store: StoreByHand, serve, raw_worker) -> None:
    worker = raw_worker(serve().ready["endpoint"])
    crowd = []
    with pytest.raises(Unavailable, match="store"):
        while len(crowd) < 100:
            crowd.append(Attachment(worker.endpoint, 20.0))
            crowd[-1].hello()
    begin = time.monotonic()
    for _ in range(20):
        with pytest.raises(Unavailable, match="store"):
            crowd[-1].hello()
    assert worker.ask(Heartbeat()) == Done()
    assert time.monotonic() - begin < 20 * SEND_MS / 1000, "it is waited for once"
    store.collect()
    assert isinstance(crowd[-1].hello(), Welcome)
    for each in crowd:
        each.close()


def test_a_store_that_is_announced_and_not_there(serve, store: StoreByHand, tmp_path: Path) -> None:
    (tmp_path / "store" / "notify").unlink()
    code, log = refused(serve)
    assert code == 1
    assert "cannot be reached" in log
