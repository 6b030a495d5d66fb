"""A pool with a host tier, for real: daemon, copier, client and workers. What left the device comes back to the byte.

Every daemon here recounts its invariants after each step.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv.commands import COPY_WAIT_S, Done, Shutdown
from radixkv.device.copier import STUCK_S
from tests.conftest import process_state
from tests.integration.tiered import NAMESPACE, answer, check, document, further_rank, work, write

END_S = 60.0
RESUME_TIMEOUT_S = 1.0


def copiers(daemon_pid: int) -> list[int]:
    """Copier processes of a daemon that are there (dead and not reaped ones too)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == daemon_pid and (
                process_state(int(entry.name)) == "Z" or b"radixkv.device.copying" in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def copier_of(daemon: Any) -> int:
    (pid,) = copiers(daemon.pid)
    return pid


def stop_process(pid: int, wait_until: Any) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: process_state(pid) == "T", what="the copier's stop")


@pytest.fixture
def tiered(daemon_factory: Any) -> Any:
    """Starts a daemon with one pool, 16 pages of 4 tokens unless told otherwise; gives it with a client's pool."""
    clients: list[radixkv.Client] = []

    def start(*, supervised: bool = False, timeout: float = 30.0, **pool: Any) -> tuple[Any, Any]:
        daemon = daemon_factory(
            pools=[{"name": "default", **pool}], supervised=supervised, resume_timeout_s=RESUME_TIMEOUT_S
        )
        clients.append(radixkv.connect(daemon.endpoint, timeout=timeout))
        return daemon, clients[-1].pool()

    yield start
    for client in clients:
        client.close()


def figures(pool: Any) -> Any:
    return pool.client.stats().pools["default"]


def counters(pool: Any) -> Any:
    return pool.client.stats().counters


# -- content --------------------------------------------------------------------------------------------------------


def test_what_left_the_device_comes_back_to_the_byte(tiered: Any) -> None:
    _, pool = tiered(pages=16, host_pages=64)
    for turn in range(6):  # six documents of 8 pages: two of them fit on the device
        assert answer(pool, [*document(turn, 32), 7]) == 0
    assert figures(pool).host_only_pages >= 24
    for turn in (*range(6), 3, 0, 5):
        assert answer(pool, [*document(turn, 32), 7]) == 32
    seen = counters(pool)
    assert seen.loaded_pages >= 32 and seen.saved_pages >= 32 and seen.failed_copies == 0


def test_lookup_tells_the_tiers_apart_and_prefetch_brings_a_prefix_to_the_device(tiered: Any) -> None:
    _, pool = tiered(pages=16, host_pages=32)
    for number in range(4):
        answer(pool, document(number, 32))
    found = pool.lookup([document(0, 32), document(3, 32), document(9, 32)], namespace=NAMESPACE)
    assert [(one.device_tokens, one.host_tokens) for one in found] == [(0, 32), (32, 0), (0, 0)]
    loaded = counters(pool).loaded_pages
    warm = pool.prefetch(document(0, 30), namespace=NAMESPACE)
    assert (warm.device_tokens, warm.host_tokens) == (28, 0), "what is not a whole page is not cached"
    assert pool.lookup(document(0, 32), namespace=NAMESPACE).device_tokens == 28
    assert pool.prefetch(document(9, 32), namespace=NAMESPACE, timeout=20.0) == found[2]
    with pool.reserve(document(0, 32), namespace=NAMESPACE, last_page="keep") as seq:
        assert seq.cached_tokens == 31 and seq.loading == ()
        check(seq)
    assert counters(pool).loaded_pages == loaded + 8, "seven by the prefetch and one by the reserve"


@pytest.mark.parametrize(
    ("host_pages", "staging"),
    [(1, 0), (3, 0), (8, 4)],
    ids=["one page", "smaller than a prompt", "smaller than a burst"],
)
def test_a_host_tier_of_any_size_is_right(tiered: Any, host_pages: int, staging: int) -> None:
    """Prompts of up to 7 pages; a burst pushes all 16 pages out at once."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    daemon, pool = tiered(pages=16, host_pages=host_pages, host_staging_pages=staging)
    work(pool, seed, 60)
    for number in (20, 21):
        assert answer(pool, document(number, 64)) == 0
    assert figures(pool).host_only_pages <= host_pages
    assert counters(pool).saved_pages > 0
    work(pool, seed + 1, 20)
    assert sum(figures(pool).host_pages.values()) == host_pages + staging
    assert daemon.process.poll() is None


def test_two_workers_push_each_others_pages_out(tiered: Any) -> None:
    """Each a process of its own, with the same documents in another order."""
    daemon, pool = tiered(pages=16, host_pages=24)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    command = [sys.executable, "-m", "tests.integration.tiered", daemon.endpoint]
    workers = [
        subprocess.Popen([*command, str(seed + n), "120"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    cached = []
    for worker in workers:
        out, err = worker.communicate(timeout=END_S)
        assert worker.returncode == 0, err
        cached.append(int(out))
    assert min(cached) > 0
    seen = counters(pool)
    assert seen.loaded_pages > 20 and seen.saved_pages > 20 and seen.unknown_copies == 0


def test_every_rank_has_its_own_part_in_the_host_tier(tiered: Any) -> None:
    daemon, pool = tiered(pages=16, host_pages=48, ranks=2)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    other = context.Process(target=further_rank, args=(daemon.endpoint, pool.client.group_token, theirs))
    other.start()
    try:
        assert pipe.poll(END_S) and pipe.recv()
        for number in (*range(4), *range(4), 2, 0):
            tokens = [*document(number, 32), 7]
            with pool.reserve(tokens, namespace=NAMESPACE) as seq:
                check(seq)
                pipe.send((seq.page_table.tolist(), tokens, seq.cached_tokens))
                assert pipe.poll(END_S) and pipe.recv(), "rank 1 has what it wrote"
                write(seq)
        assert seq.cached_tokens == 32
        assert counters(pool).loaded_pages >= 16
    finally:
        other.kill()
        other.join()


def test_a_configured_host_tier_is_shown_by_stat(tmp_path: Path) -> None:
    """The keys of a file, to the memory: 16 pages of 256 bytes in all."""
    endpoint, config = f"ipc://{tmp_path}/r.sock", tmp_path / "radixkv.toml"
    config.write_text(
        "[[pool]]\nlayers = 1\nkv_heads = 1\nhead_dim = 8\npage_size = 4\npages = 4\n"
        'host_bytes = "2KiB"\nhost_staging_pages = 4\nreclaim_pages = 2\n'
    )
    radixkv_command = [sys.executable, "-m", "radixkv"]
    daemon = subprocess.Popen(
        [*radixkv_command, "serve", "--config", config, "--endpoint", endpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert daemon.stdout is not None
    try:
        assert daemon.stdout.readline()
        assert len(copiers(daemon.pid)) == 1
        shown = subprocess.check_output([*radixkv_command, "stat", "--endpoint", endpoint], text=True)
    finally:
        daemon.terminate()
        assert daemon.wait(END_S) == 0
        daemon.stdout.close()
    assert "pool default: 4 pages, 1 KiB" in shown
    assert "its host tier: 12 pages, 3 KiB" in shown


# -- the copier -----------------------------------------------------------------------------------------------------


def test_only_a_host_tier_needs_a_copier_and_nothing_of_it_is_left(tiered: Any, daemon_factory: Any) -> None:
    without = daemon_factory()
    assert copiers(without.pid) == []
    daemon, pool = tiered(host_pages=4)
    pid = copier_of(daemon)
    pool.client.close()
    os.kill(pid, signal.SIGTERM)  # of those who drain a machine's processes
    assert daemon.stop() == 0
    assert process_state(pid) == ""


def test_copiers_that_are_killed_lose_nothing(tiered: Any) -> None:
    """Again and again, wherever it is just then. What was cached may have to be computed again, no byte is wrong."""
    daemon, pool = tiered(pages=16, host_pages=24)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    over = threading.Event()

    def kill() -> None:
        rng = random.Random(seed)
        while not over.wait(rng.uniform(0.02, 0.1)):
            for pid in copiers(daemon.pid):
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while counters(pool).copier_deaths < 5:
            work(pool, seed, 30)
    finally:
        over.set()
        killer.join()
    loaded = counters(pool).loaded_pages
    while counters(pool).loaded_pages == loaded:  # a copier that dies again and again has to wait
        work(pool, seed, 30)


def test_a_copier_that_dies_in_the_middle_of_loading(tiered: Any, wait_until: Any) -> None:
    """Stopped while it is asked, then killed: the reserve goes on without, and what was saved stays where it was."""
    daemon, pool = tiered(pages=16, host_pages=32)
    for number in range(4):
        answer(pool, document(number, 32))
    pid = copier_of(daemon)
    stop_process(pid, wait_until)
    given: list[int] = []
    reserving = threading.Thread(target=lambda: given.append(answer(pool, document(0, 32))))
    reserving.start()
    with radixkv.connect(daemon.endpoint) as other:
        wait_until(lambda: other.stats().pools["default"].copies > 0, what="a copy")
        os.kill(pid, signal.SIGKILL)
        reserving.join(END_S)
        assert given == [0], "computed again"
        seen = other.stats().counters
        assert (seen.copier_deaths, seen.copies_timed_out) == (1, 0) and seen.failed_copies >= 1
        wait_until(lambda: other.stats().pools["default"].copies == 0, what="the end of all copies")
    # After a failed copy the daemon leaves the copier alone for a second.
    wait_until(lambda: pool.prefetch(document(1, 32), namespace=NAMESPACE).device_tokens == 32, what="another copier")
    assert answer(pool, document(1, 32)) == 31
    assert copier_of(daemon) != pid


def test_rk_055_a_copy_whose_end_never_comes_is_over_at_its_limit(tiered: Any, wait_until: Any) -> None:
    """The copier stands still. Who waits goes on after a while; the copier is killed at the limit, and only then its
    pages are used again; one that has begun anew works. The client is patient for as long as copies may take."""
    daemon, pool = tiered(pages=8, host_pages=8, timeout=2.0)
    for number in range(2):
        answer(pool, document(number, 32))
    assert pool.lookup(document(0, 32), namespace=NAMESPACE).host_tokens == 32
    pid = copier_of(daemon)
    stop_process(pid, wait_until)
    began = time.monotonic()
    with pytest.raises(radixkv.OutOfPages):  # all other pages are part of the copy
        pool.reserve(document(0, 32), namespace=NAMESPACE, timeout=0.5)
    assert time.monotonic() - began <= COPY_WAIT_S + 5.0
    wait_until(lambda: counters(pool).copies_timed_out == 1, timeout=STUCK_S + 5.0, what="the copy's limit")
    wait_until(lambda: figures(pool).copies == 0, what="the end of the copy")
    assert process_state(pid) == "", "killed and reaped"
    found = figures(pool)
    assert found.pages.loading == found.pages.saving == found.host_pages.loading == found.host_pages.saving == 0
    wait_until(lambda: pool.prefetch(document(0, 32), namespace=NAMESPACE).device_tokens == 32, what="another copier")
    with pool.reserve(document(0, 32), namespace=NAMESPACE, last_page="keep") as seq:
        assert seq.cached_tokens == 31
        check(seq)
    assert counters(pool).copies_timed_out == 1


# -- the daemon's death ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_host", [True, False], ids=["saving", "loading"])
def test_the_daemon_dies_while_pages_are_copied(tiered: Any, wait_until: Any, to_host: bool) -> None:
    """Killed with its copier, which stands still in the middle. The next one serves what is complete, and no other."""
    daemon, pool = tiered(supervised=True, pages=16, host_pages=16)
    for number in range(2 if to_host else 4):
        answer(pool, document(number, 32))
    held = pool.reserve(document(1 if to_host else 3, 20), namespace=NAMESPACE)
    pid = copier_of(daemon)
    stop_process(pid, wait_until)
    wanted = document(7 if to_host else 0, 32)
    ended: list[int] = []
    reserving = threading.Thread(target=lambda: ended.append(answer(pool, wanted)))
    reserving.start()
    with radixkv.connect(daemon.endpoint) as other:
        wait_until(lambda: other.stats().pools["default"].copies > 0, what="a copy")
    daemon.kill_daemon()
    daemon.wait_ready()
    assert process_state(pid) in ("", "Z"), "dead, though it stood still"
    reserving.join(END_S)
    assert len(ended) == 1
    check(held)  # the sequence has gone on with its pages
    held.free()
    for number in (0, 1, 2, 3, 7):
        answer(pool, document(number, 32))
    work(pool, 1, 40)
    assert counters(pool).saved_pages > 0


@pytest.mark.parametrize("end", ["killed", "asked to"])
def test_a_warm_start_has_the_same_memory_of_both_tiers(tiered: Any, raw_worker: Any, end: str) -> None:
    daemon, pool = tiered(supervised=True, pages=16, host_pages=32)
    for number in range(4):
        answer(pool, document(number, 32))
    before, copier = arenas(daemon.pid), copier_of(daemon)
    found = pool.lookup([document(number, 32) for number in range(4)], namespace=NAMESPACE)
    assert [(one.device_tokens, one.host_tokens) for one in found] == [(0, 32), (0, 32), (32, 0), (32, 0)]
    if end == "killed":
        daemon.kill_daemon()
    else:  # as `radixkv drain` does
        assert raw_worker(daemon.endpoint).ask(Shutdown()) == Done()
    daemon.wait_ready()
    assert process_state(copier) in ("", "Z")
    assert arenas(daemon.pid) == before and {name for name, _ in before} == {"arena", "host"}
    assert pool.lookup([document(number, 32) for number in range(4)], namespace=NAMESPACE) == found
    assert answer(pool, document(3, 32), timeout=20.0) == 31
    for number in (0, 1, 2, 3):
        assert answer(pool, document(number, 32)) == 31, "from either tier, to the byte"
    work(pool, 3, 40)


def arenas(pid: int) -> set[tuple[str, int]]:
    """Name and inode of each arena that a process has open."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # others come and go
            name = os.readlink(entry).removeprefix("/memfd:radixkv-").partition(" ")[0]
            if name in ("arena", "host"):
                found.add((name, entry.stat().st_ino))
    return found


@pytest.mark.long
@pytest.mark.parametrize("run", range(8))
def test_whatever_dies_no_byte_is_wrong(daemon_factory: Any, run: int) -> None:
    """Any sizes, two workers; copiers are killed, and under a keeper the daemon is. The workers look at every byte."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pages, supervised = rng.choice((10, 16, 24)), run % 2 == 0
    pool = {
        "pages": pages,
        "host_pages": rng.choice((1, 4, 16, 40)),
        "host_staging_pages": rng.choice((0, 4, 16)),
        "reclaim_pages": rng.choice((-1, 0, pages // 2)),
        "host_write": rng.choice(("back", "through")),
    }
    daemon = daemon_factory(pools=[pool], supervised=supervised, resume_timeout_s=0.5)
    command = [sys.executable, "-m", "tests.integration.tiered", daemon.endpoint]
    workers = [
        subprocess.Popen([*command, str(seed + n), "150"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    while any(worker.poll() is None for worker in workers):
        time.sleep(rng.uniform(0.05, 0.5))
        if rng.random() < 0.3:
            for pid in copiers(daemon.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif supervised and rng.random() < 0.15:
            daemon.kill_daemon()
            daemon.wait_ready()
    for worker in workers:
        assert worker.communicate()[1] == "" and worker.returncode == 0
    assert daemon.stop() == 0
