"""The daemon dies, is drained, is refused, and its keeper goes on: real processes, workers by hand."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import radixkv
from radixkv.commands import (
    Bye,
    Claim,
    Commit,
    Done,
    Failure,
    Heartbeat,
    Kept,
    Reserved,
    Resume,
    Resumed,
    Step,
    Stepped,
    Welcome,
)
from tests.conftest import process_state
from tests.integration.raw import RawWorker, tokens

END_S = 30.0


@pytest.fixture
def supervised(daemon_factory):
    """A daemon with a keeper, which ends in good order when the test is done and leaves nothing behind."""
    started = []

    def start(**settings):
        started.append(daemon_factory(supervised=True, **settings))
        return started[-1]

    yield start
    for daemon in started:
        if daemon.process.poll() is None:
            assert daemon.stop() == 0
        assert process_state(daemon.pid) == ""
        assert files(daemon) in ([], ["stderr"])


def files(daemon) -> list[str]:
    return sorted(os.listdir(daemon.directory)) if daemon.directory.exists() else []


def claim(worker: RawWorker, seq: int, prompt: bytes, committed: int, reserved: Reserved) -> Claim:
    table = worker.table()
    pages = np.frombuffer(reserved.page_table, "<i4")
    generations = table.generations(pages).astype("<u8").tobytes()
    table.close()
    return Claim("default", seq, b"ns", prompt, reserved.page_table, generations, committed, reserved.cached_tokens)


def test_what_was_cached_is_found_after_kill_9(supervised, raw_worker) -> None:
    daemon = supervised()
    first = raw_worker(daemon.endpoint)
    first.reserve(1, tokens(12))
    assert first.ask(Step(commit=[Commit(1, 8)])) == Stepped(commit=[None])
    before = daemon.ready
    for _ in range(3):
        daemon.kill_daemon()
        ready = daemon.wait_ready()
        assert ready["pid"] != before["pid"] and ready["boot_id"] != before["boot_id"]
        assert {key: ready[key] for key in ("endpoint", "attach", "cache_id", "pools")} == {
            key: before[key] for key in ("endpoint", "attach", "cache_id", "pools")
        }
        next_one = raw_worker(daemon.endpoint)
        assert next_one.reserve(1, tokens(9)).cached_tokens == 8
        assert next_one.ask(Bye()) == Done()
    assert len(set(daemon.boot_ids)) == 4


def test_a_worker_comes_back_and_its_sequence_goes_on(supervised, raw_worker) -> None:
    daemon = supervised(resume_timeout_s=60.0)
    worker = raw_worker(daemon.endpoint, resumes=True)
    assert worker.welcome.resumes and len(worker.attachment.lifelines) == 1
    reserved = worker.reserve(1, tokens(10), headroom=6)
    assert worker.ask(Step(commit=[Commit(1, 8)])) == Stepped(commit=[None])
    held = claim(worker, 1, tokens(10), 8, reserved)
    epoch = worker.welcome.epoch
    for _ in range(2):  # twice: nothing of what the store has may be used up by the first
        daemon.kill_daemon()
        daemon.wait_ready()
        worker.dealer.send(worker.frame(Heartbeat()))
        old = worker.receive()[1]
        assert isinstance(old, Failure) and old.code == "session_lost", "sent under the old epoch"
        assert isinstance(worker.rejoin(), Welcome)
        assert worker.welcome.epoch > epoch
        epoch = worker.welcome.epoch
        assert worker.ask(Resume([held])) == Resumed([Kept(8, 8)])
    assert worker.ask(Step(commit=[Commit(1, 10)])) == Stepped(commit=[None])
    assert worker.free(1) == Stepped(free=[None])
    assert worker.pages() == {"free": 14, "cached": 2}
    assert worker.ask(Bye()) == Done()


def test_another_process_or_another_token_is_no_way_back(supervised, raw_worker) -> None:
    daemon = supervised()
    worker = raw_worker(daemon.endpoint, resumes=True)
    daemon.kill_daemon()
    daemon.wait_ready()
    child = os.fork()
    if child == 0:
        refused = worker.rejoin()
        os._exit(0 if isinstance(refused, Failure) and refused.code == "session_lost" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    true_welcome = worker.welcome
    for session, token in ((true_welcome.session, b"x" * 16), (true_welcome.session + 1, true_welcome.token)):
        worker.welcome = Welcome(1, session, 1, 0, token, "", "", [], 1.0, 1.0)
        assert worker.rejoin().code == "session_lost"
    worker.welcome = true_welcome
    assert isinstance(worker.rejoin(), Welcome)
    assert worker.rejoin().code == "session_lost", "the daemon lives: a connection's end is the session's end"


def test_a_lifeline_alone_ends_nothing(supervised, raw_worker) -> None:
    """While there is a connection, that one counts."""
    worker = raw_worker(supervised().endpoint, resumes=True)
    worker.reserve(1, tokens(8))
    os.close(worker.attachment.lifelines.pop())
    for _ in range(3):
        assert worker.ask(Heartbeat()) == Done()
    assert worker.pages() == {"free": 14, "private": 2}
    assert worker.ask(Bye()) == Done()


HOLDER = """
import os, sys
from tests.integration.raw import RawWorker, tokens
from radixkv.commands import Commit, Step
worker = RawWorker(sys.argv[1], resumes=True)
worker.reserve(1, tokens(8))
worker.ask(Step(commit=[Commit(1, 8)]))
worker.reserve(2, tokens(8), headroom=8)
if "fork" in sys.argv:
    child = os.fork()  # it inherits connection and lifeline
    if child == 0:
        os.read(0, 1)
        os._exit(0)
    print(child, flush=True)
else:
    print("holding", flush=True)
if os.read(0, 1) == b"c":
    worker.close()
    print("closed", flush=True)
    os.read(0, 1)
"""
HELD = {"cached": 2, "private": 3}
QUARANTINED = {"cached": 2, "quarantined": 3}
GIVEN_BACK = {"cached": 2}


@pytest.fixture
def holder():
    holders: list[subprocess.Popen[bytes]] = []

    def start(endpoint: str, *how: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", HOLDER, endpoint, *how]
        holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return holders[-1]

    yield start
    for each in holders:
        each.kill()
        each.communicate()


def pages(worker: RawWorker) -> dict[str, int]:
    found = worker.pages()
    del found["free"]
    return found


def kill_while_nobody_serves(daemon, *pids: int) -> None:
    """The keeper stands still, so that no daemon runs from the death of the one to that of the others."""
    os.kill(daemon.keeper_pid, signal.SIGSTOP)
    daemon.kill_daemon()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    os.kill(daemon.keeper_pid, signal.SIGCONT)
    daemon.wait_ready()


def test_a_worker_that_died_while_no_daemon_ran_is_noticed(supervised, raw_worker, holder, wait_until) -> None:
    daemon = supervised(resume_timeout_s=600.0)
    dead = holder(daemon.endpoint)
    assert dead.stdout.readline() == b"holding\n"
    kill_while_nobody_serves(daemon, dead.pid)
    dead.wait()
    other = raw_worker(daemon.endpoint)
    wait_until(lambda: pages(other) == GIVEN_BACK)
    assert other.stats()["sessions"] == 1
    everything = other.reserve(1, b"", headroom=4 * 16)
    assert isinstance(everything, Reserved), "all known sessions are over: nothing is waited for"
    assert other.ask(Bye()) == Done()


def test_a_worker_that_dies_before_it_is_back(supervised, raw_worker, holder, wait_until) -> None:
    daemon = supervised(resume_timeout_s=600.0)
    late = holder(daemon.endpoint)
    assert late.stdout.readline() == b"holding\n"
    daemon.kill_daemon()
    daemon.wait_ready()
    other = raw_worker(daemon.endpoint)
    assert pages(other) == QUARANTINED
    late.kill()
    wait_until(lambda: pages(other) == GIVEN_BACK)
    assert other.ask(Bye()) == Done()


def test_a_forked_child_delays_the_return_across_restarts(supervised, raw_worker, holder, wait_until) -> None:
    daemon = supervised(resume_timeout_s=600.0)
    parent = holder(daemon.endpoint, "fork")
    child = int(parent.stdout.readline())
    kill_while_nobody_serves(daemon, parent.pid)
    parent.wait()
    other = raw_worker(daemon.endpoint)
    wait_until(lambda: other.stats()["sessions"] == 1)
    assert pages(other) == QUARANTINED
    daemon.kill_daemon()
    daemon.wait_ready()
    other = raw_worker(daemon.endpoint)
    for _ in range(20):
        assert pages(other) == QUARANTINED, "its child could still write"
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: pages(other) == GIVEN_BACK)
    assert other.ask(Bye()) == Done()


def test_a_worker_that_let_go_while_no_daemon_ran_is_not_waited_for(supervised, raw_worker, holder, wait_until) -> None:
    daemon = supervised(resume_timeout_s=600.0)
    closing = holder(daemon.endpoint)
    assert closing.stdout.readline() == b"holding\n"
    os.kill(daemon.keeper_pid, signal.SIGSTOP)
    daemon.kill_daemon()
    closing.stdin.write(b"c")
    closing.stdin.flush()
    assert closing.stdout.readline() == b"closed\n"
    os.kill(daemon.keeper_pid, signal.SIGCONT)
    daemon.wait_ready()
    other = raw_worker(daemon.endpoint)
    wait_until(lambda: other.stats()["sessions"] == 1)
    assert pages(other) == QUARANTINED, "its process lives"
    closing.kill()
    wait_until(lambda: pages(other) == GIVEN_BACK)
    assert other.ask(Bye()) == Done()


def test_restarts_and_deaths_leave_no_descriptors(supervised, raw_worker, wait_until) -> None:
    daemon = supervised()
    counts = []
    for _ in range(4):
        worker = raw_worker(daemon.endpoint, resumes=True)
        worker.reserve(1, tokens(8))
        daemon.kill_daemon()
        daemon.wait_ready()
        assert isinstance(worker.rejoin(), Welcome)
        assert worker.ask(Resume([])) == Resumed([])
        assert worker.ask(Bye()) == Done()
        worker.close()
        wait_until(lambda: raw_count(daemon, raw_worker) == {"free": 16})
        counts.append((fds(daemon.keeper_pid), fds(daemon.pid)))
    wait_until(lambda: (fds(daemon.keeper_pid), fds(daemon.pid)) <= counts[0])


def raw_count(daemon, raw_worker) -> dict[str, int]:
    worker = raw_worker(daemon.endpoint)
    found = worker.pages()
    assert worker.ask(Bye()) == Done()
    worker.close()
    return found


def fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_kills_while_it_starts(supervised, raw_worker, wait_until) -> None:
    """At any moment between exec and ready: what was in the store before is there afterwards, and nothing else."""
    daemon = supervised()
    worker = raw_worker(daemon.endpoint, resumes=True)
    worker.reserve(1, tokens(8))
    assert worker.ask(Step(commit=[Commit(1, 8)])) == Stepped(commit=[None])
    cache_id, kept = daemon.ready["cache_id"], fds(daemon.keeper_pid)
    for _ in range(2):
        daemon.kill_daemon()
        for moment in MOMENTS:
            wait_until(lambda seen=moment: seen(child_of(daemon.keeper_pid)))
            os.kill(child_of(daemon.keeper_pid), signal.SIGKILL)
        daemon.wait_ready()
        assert daemon.ready["cache_id"] == cache_id
        assert isinstance(worker.rejoin(), Welcome)
    assert worker.ask(Resume([])) == Resumed([])
    assert worker.reserve(1, tokens(9)).cached_tokens == 8
    assert fds(daemon.keeper_pid) == kept
    assert worker.ask(Bye()) == Done()


MOMENTS = (
    lambda pid: process_state(pid) not in ("", "Z"),
    lambda pid: "libzmq" in maps(pid),
    lambda pid: "memfd:radixkv-table" in maps(pid),
)
"""Ways to see how far a daemon is that starts: not at all, loading what it needs, with its memory open."""


def maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def child_of(pid: int) -> int:
    """0: there is none at the moment."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else 0


# -- the keeper's own life --------------------------------------------------------------------------------------------


KEEP = """
import sys
from radixkv.ipc.endpoint import resolve
from radixkv.keeper import keep
sys.exit(keep(resolve(sys.argv[1]), sys.argv[2:]))
"""


@pytest.fixture
def keep(tmp_path: Path):
    """A keeper of any command; ended when the test is."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, first: str = "") -> subprocess.Popen[str]:
        keeper = [sys.executable, "-c", first + KEEP, f"{tmp_path}/r.sock", *command]
        started.append(subprocess.Popen(keeper, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def ended(keeper: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, log = keeper.communicate(timeout=END_S)
    return keeper.returncode, out, log


def ready(keeper: subprocess.Popen[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(keeper.stdout.readline())
    return found


def test_a_stop_is_passed_on_and_lets_what_runs_come_to_its_end(supervised, raw_worker) -> None:
    daemon = supervised(drain_s=600.0)
    worker = raw_worker(daemon.endpoint)
    worker.reserve(1, tokens(8))
    daemon.process.send_signal(signal.SIGINT)
    while not isinstance(reply := worker.reserve(2, tokens(1)), Failure):
        worker.free(2)
    assert reply.code == "draining"
    assert worker.ask(Step(commit=[Commit(1, 8)])) == Stepped(commit=[None])
    assert worker.free(1) == Stepped(free=[None])
    assert daemon.process.wait(END_S) == 0


def test_a_second_stop_ends_even_a_daemon_that_hangs(supervised) -> None:
    daemon = supervised(drain_s=600.0)
    daemon.pause()
    daemon.process.terminate()
    os.kill(daemon.keeper_pid, 0)
    while "stopping" not in daemon.stderr():
        assert daemon.process.poll() is None
    daemon.process.terminate()
    assert daemon.process.wait(END_S) == 0


def test_a_killed_keeper_takes_its_daemon_along(daemon_factory, raw_worker, wait_until) -> None:
    """In good order: who works has drain_s to come to an end. Then the endpoint is free for another one."""
    daemon = daemon_factory(supervised=True, drain_s=600.0)
    worker = raw_worker(daemon.endpoint)
    worker.reserve(1, tokens(8))
    daemon.process.kill()
    daemon.process.wait()
    wait_until(lambda: isinstance(worker.reserve(2, tokens(1)), Failure) or not worker.free(2), what="draining")
    assert worker.free(1) == Stepped(free=[None])
    wait_until(lambda: process_state(daemon.pid) in ("", "Z"), what="the daemon's end")
    other = daemon_factory(supervised=True, endpoint=daemon.endpoint)
    assert other.ready["cache_id"] != daemon.ready["cache_id"]
    assert other.stop() == 0


def test_an_endpoint_has_one_keeper(supervised, keep, tmp_path: Path, daemon_factory) -> None:
    daemon = supervised(endpoint=f"ipc://{tmp_path}/r.sock")
    code, out, log = ended(keep("/bin/true"))
    assert (code, out) == (3, "")
    assert "another daemon serves" in log
    with pytest.raises(AssertionError, match="exit 3"):
        daemon_factory(endpoint=daemon.endpoint)


@pytest.mark.parametrize("code", [2, 3, 4])
def test_what_a_restart_cannot_mend_ends_the_keeper(keep, tmp_path: Path, code: int) -> None:
    assert ended(keep(sys.executable, "-c", f"raise SystemExit({code})"))[0] == code
    assert os.listdir(tmp_path) == []


FILLER = """
import os, sys
from radixkv.errors import Unavailable
from radixkv.ipc.fdstore import STORE_MAX, Store, take_stored
stored = take_stored(os.environ)
members = [name for name in stored if name.startswith("member")]
if not members:
    store = Store(os.environ["NOTIFY_SOCKET"])
    for count in range(STORE_MAX // 2 + 10):
        name = f"member-{2**62 + count:x}-0"
        while True:
            try:
                store.keep(name, 0, 1)
                break
            except Unavailable:
                pass
    os._exit(9)
assert len(members) == STORE_MAX // 2 and all(len(stored[name]) == 2 for name in members), len(members)
assert {len(fds) for fds in stored.values()} == {2}
sys.exit(3)
"""


def test_a_full_store_is_handed_over(keep) -> None:
    """All names fit into one variable; what is too much is not kept, and nobody dies of it."""
    code, _, log = ended(keep(sys.executable, "-c", FILLER))
    assert code == 3, log


def test_after_a_bug_memory_is_waited_for(keep, tmp_path: Path) -> None:
    """Old workers still map the old memory; as the first answer, 4 is final."""
    counted = (
        "import os, sys; from pathlib import Path; count = Path(sys.argv[1]); n = len(count.read_text());"
        "count.write_text('x' * (n + 1)); sys.exit([70, 4, 4, 2][n])"
    )
    count = tmp_path / "count"
    count.touch()
    assert ended(keep(sys.executable, "-c", counted, str(count)))[0] == 2
    assert os.listdir(tmp_path) == ["count"]


SERVES_ONCE = """
import os, socket, sys
from pathlib import Path
count = Path(sys.argv[1])
n = len(count.read_text())
count.write_text("x" * (n + 1))
if n == 0:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as store:
        store.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
    os.abort()
sys.exit([3, 2, 3, 4][n - 1])
"""


def test_memory_that_a_killed_daemon_still_has_is_waited_for(keep, tmp_path: Path) -> None:
    """Its copier holds the lock until the kernel is done with it. As the first answer, 3 is final, and so is 2."""
    count = tmp_path / "count"
    count.touch()
    assert ended(keep(sys.executable, "-c", SERVES_ONCE, str(count)))[0] == 4
    assert len(count.read_text()) == 5


NO_ROOM_TWICE = """
import os
fork, refusals = os.fork, iter("ab")

def refuse():
    if next(refusals, None):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = refuse
"""


def test_a_machine_without_room_for_a_process_is_waited_for(keep) -> None:
    """Such as one whose memory has run out, which may be what ended the daemon."""
    code, _, log = ended(keep(sys.executable, "-c", "raise SystemExit(2)", first=NO_ROOM_TWICE))
    assert code == 2
    assert log.count("no daemon can be started at the moment") == 2


def test_a_crash_loop_costs_nothing(keep, tmp_path: Path) -> None:
    """Pauses of 0, 0.1, 0.2, 0.4 ... seconds; a stop ends the pause."""
    keeper = keep("/bin/false")
    log = ""
    while "crashes=4" not in log:
        log += keeper.stderr.readline()
    keeper.terminate()
    code, _, rest = ended(keeper)
    assert code == 0
    assert "pause_s=0.1" in log and "pause_s=0.2" in log and "pause_s=0.4" in log
    assert (log + rest).count("the daemon ended") <= 5
    assert os.listdir(tmp_path) == []


def test_strangers_cannot_put_anything_into_the_store(supervised) -> None:
    daemon = supervised()
    before, cache_id = fds(daemon.keeper_pid), daemon.ready["cache_id"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(f"{daemon.directory}/radixkv.sock.notify")
        for message in (b"FDSTORE=1\nFDNAME=table-0", b"FDSTOREREMOVE=1\nFDNAME=table-0", b"\xff\x00", b""):
            socket.send_fds(stranger, [message], [0, 1])
    daemon.kill_daemon()
    daemon.wait_ready()
    assert daemon.ready["cache_id"] == cache_id
    assert fds(daemon.keeper_pid) == before


BROKEN = """
import os, sys
from radixkv.config import Config, KVSpec, PoolConfig, ServerConfig
from radixkv.engine.engine import Engine
from radixkv.daemon import serve
real_step = Engine.step

def step(self, command, now):
    if "seq=77" in repr(command):
        raise KeyError("planted")
    if "seq=78" in repr(command):
        os.abort()
    return real_step(self, command, now)

Engine.step = step
pool = PoolConfig("default", KVSpec(1, 1, 8, "float32", 4), 16)
sys.exit(serve(Config(ServerConfig(endpoint="ipc://" + sys.argv[1]), pools=(pool,))))
"""


@pytest.mark.parametrize(("seq", "same_cache"), [(77, False), (78, True)])
def test_a_bug_makes_the_next_start_cold_and_a_crash_does_not(
    keep, tmp_path: Path, raw_worker, seq: int, same_cache: bool
) -> None:
    keeper = keep(sys.executable, "-c", BROKEN, f"{tmp_path}/r.sock")
    first = ready(keeper)
    worker = raw_worker(str(first["endpoint"]))
    worker.reserve(1, tokens(8))
    worker.ask(Step(commit=[Commit(1, 8)]))
    worker.dealer.send(worker.frame(Step(commit=[Commit(seq, 1)])))
    second = ready(keeper)
    assert (second["cache_id"] == first["cache_id"]) == same_cache
    other = raw_worker(str(second["endpoint"]))
    assert other.reserve(1, tokens(9)).cached_tokens == (8 if same_cache else 0)
    assert other.ask(Bye()) == Done()
    keeper.terminate()
    assert ended(keeper)[0] == 0
    assert os.listdir(tmp_path) == []


# -- drain ------------------------------------------------------------------------------------------------------------


def test_nobody_has_to_read_what_daemons_say(keep, tmp_path: Path, serve_command) -> None:
    """Each says on stdout that it is ready; whoever started the keeper may have stopped reading long ago."""
    pools = [f"name={letter * 60},layers=1,kv_heads=1,head_dim=8,pages=4" for letter in "abcdefghijkl"]
    keeper = keep(*serve_command(tmp_path, *(word for pool in pools for word in ("--pool", pool))))
    endpoint = str(ready(keeper)["endpoint"])
    assert keeper.stdout is not None
    fcntl.fcntl(keeper.stdout.fileno(), fcntl.F_SETPIPE_SZ, 4096)  # room for three lines
    with radixkv.connect(endpoint, timeout=END_S) as client:
        seen = {client.stats()["boot_id"]}
        for _ in range(6):
            daemon = child_of(keeper.pid)
            assert daemon
            os.kill(daemon, signal.SIGKILL)
            seen.add(client.stats()["boot_id"])
    assert len(seen) == 7
    keeper.terminate()
    assert ended(keeper)[0] == 0


DIES_WHILE_A_RANK_JOINS = """
import os, sys
from radixkv.config import Config, KVSpec, PoolConfig, ServerConfig
from radixkv.daemon import serve
from radixkv.ipc.members import Members
real_keep, flag = Members._keep, sys.argv[2]

def keep(self, member, session, rank):
    kept = real_keep(self, member, session, rank)
    if rank and os.path.exists(flag):
        os.unlink(flag)
        os.abort()
    return kept

Members._keep = keep
pool = PoolConfig("default", KVSpec(1, 1, 8, "float32", 4), 16, ranks=2)
sys.exit(serve(Config(ServerConfig(endpoint="ipc://" + sys.argv[1]), pools=(pool,))))
"""


def test_a_daemon_that_dies_while_a_rank_joins_ends_nothing(keep, tmp_path: Path) -> None:
    """The store has the rank, the rank has no answer: it asks the next daemon, and the group's sequences go on."""
    flag = tmp_path / "flag"
    flag.touch()
    keeper = keep(sys.executable, "-c", DIES_WHILE_A_RANK_JOINS, f"{tmp_path}/r.sock", str(flag))
    endpoint = str(ready(keeper)["endpoint"])
    with radixkv.connect(endpoint) as client:
        seq = client.pool("default").reserve(range(9), namespace=radixkv.Namespace("m"))
        with radixkv.attach(endpoint, client.group_token, 1) as member:
            assert not flag.exists(), "a daemon has died over this"
            seq.commit(9)
            assert seq.valid() and member.valid()
    keeper.terminate()
    assert ended(keeper)[0] == 0


def drain(endpoint: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "radixkv", "drain", "--endpoint", endpoint, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_drain_under_a_keeper_changes_the_daemon_and_nothing_else(supervised, raw_worker) -> None:
    daemon = supervised(drain_s=600.0)
    worker = raw_worker(daemon.endpoint, resumes=True)
    reserved = worker.reserve(1, tokens(8), headroom=4)
    held = claim(worker, 1, tokens(8), 0, reserved)
    old = daemon.ready
    done = drain(daemon.endpoint, "--json")
    assert done.returncode == 0, done.stderr
    new = daemon.wait_ready()
    found = json.loads(done.stdout)
    assert 0 < found.pop("seconds") < 60
    assert found == {"old_boot_id": old["boot_id"], "boot_id": new["boot_id"], "same_cache": True}
    assert isinstance(worker.rejoin(), Welcome)
    assert worker.ask(Resume([held])) == Resumed([Kept(0, 0)])
    assert worker.ask(Step(commit=[Commit(1, 8)])) == Stepped(commit=[None])
    assert worker.ask(Bye()) == Done()
    assert "crashed" not in daemon.stderr()


def test_drain_without_a_keeper_is_the_end(daemon_factory, raw_worker) -> None:
    daemon = daemon_factory()
    worker = raw_worker(daemon.endpoint)
    done = drain(daemon.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert "has ended" in done.stdout
    assert daemon.process.wait(END_S) == 0
    again = drain(daemon.endpoint)
    assert again.returncode == 1
    assert "no daemon" in again.stderr and "radixkv serve" in again.stderr
    worker.close()


POOL = "layers = 1\nkv_heads = 1\nhead_dim = 8\npage_size = 4\n"
TYPO, OTHER_PAGES = f"[[pool]\npages = 16\n{POOL}", f"[[pool]]\npages = 17\n{POOL}"


@pytest.mark.parametrize(
    ("wrong", "words"), [(TYPO, "is not TOML"), (OTHER_PAGES, "does not fit the memory")], ids=["typo", "other pages"]
)
def test_a_configuration_that_is_wrong_by_now_is_waited_for(
    keep, tmp_path: Path, serve_command, raw_worker, wrong: str, words: str
) -> None:
    """The pages outlive it. It is said once, each time that it is another error, and drain does not say that all is
    well."""
    file, right = tmp_path / "c.toml", f"[[pool]]\npages = 16\n{POOL}"

    def write(text: str) -> None:
        """At once: nobody reads half of it."""
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    def log_until_refused(times: int) -> str:
        while log.getvalue().count("no daemon serves until") < times:
            log.write(keeper.stderr.readline())
        return log.getvalue()

    log = io.StringIO()
    write(right)
    keeper = keep(*serve_command(tmp_path, "--config", str(file)))
    first = ready(keeper)
    endpoint = str(first["endpoint"])
    worker = raw_worker(endpoint)
    worker.reserve(1, tokens(8))
    assert worker.ask(Step(commit=[Commit(1, 8)])) == Stepped(commit=[None])
    write(wrong)
    done = drain(endpoint, "--timeout", "1.5")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "no next one serves yet: its keeper's log says why" in done.stderr
    write(right + "\n[servers]\n")
    assert log_until_refused(2).count(words) == 1, "of several tries"
    write(right)
    second = ready(keeper)
    assert second["cache_id"] == first["cache_id"]
    other = raw_worker(endpoint)
    assert other.reserve(1, tokens(9)).cached_tokens == 8
    assert other.ask(Bye()) == Done()
    write(right + "\n[servers]\n")
    os.kill(int(str(second["pid"])), signal.SIGKILL)
    assert log_until_refused(3).count("'servers' (from") == 2, "once more after one has served"
    keeper.terminate()
    assert ended(keeper)[0] == 0


ENDS_AFTER_DRAIN = """
import os, sys
from radixkv.config import Config, KVSpec, PoolConfig, ServerConfig
from radixkv.daemon import serve
if any(name.startswith("table") for name in os.environ["LISTEN_FDNAMES"].split(":")):
    sys.exit(4)
pool = PoolConfig("default", KVSpec(1, 1, 8, "float32", 4), 16)
sys.exit(serve(Config(ServerConfig(endpoint="ipc://" + sys.argv[1]), pools=(pool,))))
"""


def test_drain_fails_when_no_daemon_goes_on(keep, tmp_path: Path) -> None:
    keeper = keep(sys.executable, "-c", ENDS_AFTER_DRAIN, f"{tmp_path}/r.sock")
    done = drain(str(ready(keeper)["endpoint"]))
    assert (done.returncode, done.stdout) == (1, "")
    assert "no next one goes on" in done.stderr and "its keeper" in done.stderr
    assert ended(keeper)[0] == 4


def test_drain_waits_for_what_runs_and_says_so_when_time_is_up(daemon_factory, raw_worker) -> None:
    daemon = daemon_factory(drain_s=600.0)
    worker = raw_worker(daemon.endpoint)
    worker.reserve(1, tokens(8))
    done = drain(daemon.endpoint, "--timeout", "0.5")
    assert done.returncode == 1
    assert "not done yet" in done.stderr
    assert worker.reserve(2, tokens(1)).code == "draining"
    assert worker.free(1) == Stepped(free=[None])
    assert daemon.process.wait(END_S) == 0


def test_serve_supervised_passes_its_flags_on(tmp_path: Path, serve_command) -> None:
    pool = "name=small,layers=1,kv_heads=1,head_dim=8,dtype=float32,page_size=4,pages=8"
    command = serve_command(tmp_path, "--pool", pool, "--pool", pool.replace("small", "large"), "--lease-s", "7")
    keeper = subprocess.Popen(
        [*command, "--limits.tokens=99", "--supervised", "--cold"], stdout=subprocess.PIPE, text=True
    )
    try:
        first = ready(keeper)
        assert first["pools"] == ["small", "large"]
        worker = RawWorker(str(first["endpoint"]))
        assert worker.welcome.lease_s == 7.0
        too_long = worker.reserve(1, tokens(100))
        assert isinstance(too_long, Failure) and too_long.code == "limit_exceeded"
        worker.close()
        os.kill(int(str(first["pid"])), signal.SIGKILL)
        second = ready(keeper)
        assert second["cache_id"] == first["cache_id"], "--cold is for the first start alone"
        keeper.terminate()
        assert ended(keeper)[:2] == (0, "")
    finally:
        keeper.kill()
        keeper.communicate()
    assert os.listdir(tmp_path) == []
