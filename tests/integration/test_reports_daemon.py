"""Failures that comparable systems have had when memory ran short, on a real daemon."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import radixkv
from radixkv.commands import Commit, Failure, Lookup, Reserve, Reserved, Stats, Step, Stepped
from tests.integration.raw import tokens

SLOW_S = 0.25
"""No answer of a daemon that has time takes so long, also on a machine that has none."""


def test_rk_034_a_full_pool_says_no_in_time_and_answers_everybody_else(daemon_factory, raw_worker) -> None:
    daemon = daemon_factory(pools=[{"name": "default", "pages": 4}])
    holder, waiting, asking = (raw_worker(daemon.endpoint) for _ in range(3))
    holder.reserve(1, tokens(16))
    began = time.monotonic()
    waiting.send(Reserve("default", 1, b"ns", tokens(4, 100), 0, "copy", 0.5))
    took = []
    for _ in range(200):
        asked = time.monotonic()
        asking.ask(Lookup("default", b"ns", [tokens(16)]))
        took.append(time.monotonic() - asked)
    _, reply = waiting.receive()
    assert time.monotonic() - began >= 0.5
    assert isinstance(reply, Failure) and reply.code == "out_of_pages"
    assert (reply.details["need"], reply.details["available"]) == (1, 0) and reply.details["waited_s"] < 0.7
    assert sorted(took)[197] < SLOW_S
    assert len(daemon.stderr().splitlines()) < 5


def test_rk_036_those_who_never_read_cost_no_pages_and_little_memory(daemon_factory, raw_worker) -> None:
    """Replies pile up for them until they are dropped. What is evicted follows from what is asked for alone."""
    daemon = daemon_factory(pools=[{"name": "default", "pages": 1000}], paranoid=False)
    worker = raw_worker(daemon.endpoint)
    for seq in range(10):
        worker.reserve(seq, tokens(400, 1000 * seq))
        assert worker.ask(Step(commit=[Commit(seq, 400)])) == Stepped(commit=[None])
        worker.free(seq)
    assert worker.pages() == {"cached": 1000}
    before = _resident_bytes(daemon.pid)
    deaf = [raw_worker(daemon.endpoint) for _ in range(10)]
    for peer in deaf:
        for _ in range(2000):
            peer.send(Stats())
    for seq in range(100, 201):
        assert isinstance(worker.reserve(seq, tokens(1, 10**6 + seq)), Reserved)
    assert worker.stats()["counters"]["evicted_pages"] == 101
    assert worker.pages() == {"cached": 899, "private": 101}
    assert _resident_bytes(daemon.pid) - before < 20 * 2**20


def _resident_bytes(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


BREAKS_ONCE = """
import os, sys
from radixkv.config import Config, KVSpec, PoolConfig, ServerConfig
from radixkv.daemon import serve
from radixkv.engine.pool import Pool

once = sys.argv[2]
evict = Pool._evict_for

def break_once(self, count):
    if not os.path.exists(once):
        open(once, "w").close()
        raise RuntimeError("planted in an eviction")
    return evict(self, count)

Pool._evict_for = break_once
pool = PoolConfig("default", KVSpec(1, 1, 8, "float32", 4), 8)
sys.exit(serve(Config(ServerConfig(endpoint="ipc://" + sys.argv[1], resume_timeout_s=0.0), pools=(pool,))))
"""
KEEP = """
import sys
from radixkv.ipc.endpoint import resolve
from radixkv.keeper import keep
sys.exit(keep(resolve("ipc://" + sys.argv[1]), [sys.executable, "-c", sys.argv[2], sys.argv[1], sys.argv[3]]))
"""


def test_rk_038_an_eviction_that_breaks_ends_the_daemon_for_all_to_see(tmp_path: Path) -> None:
    """Nothing goes on without its evictor: the process ends, says why, and the next one, begun cold, can evict."""
    endpoint, log = tmp_path / "r.sock", tmp_path / "stderr"
    command = [sys.executable, "-c", KEEP, str(endpoint), BREAKS_ONCE, str(tmp_path / "once")]
    with log.open("wb") as stderr:
        keeper = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        with radixkv.connect(endpoint, timeout=30.0) as client:
            pool = client.pool()
            boot = client.stats().boot_id
            for turn in range(2):
                _cache(pool, turn)
            with pool.reserve(range(500, 508)) as seq:  # the daemon dies of it; the library asks the next one
                assert seq.cached_tokens == 0
            assert client.stats().boot_id != boot
            for turn in range(4):
                _cache(pool, turn)
            assert client.stats().counters.evicted_pages > 0
    finally:
        keeper.terminate()
        assert keeper.wait(30.0) == 0
    assert "planted in an eviction" in log.read_text() and "this is a bug" in log.read_text()


def _cache(pool: radixkv.Pool, turn: int) -> None:
    with pool.reserve(range(1000 * turn, 1000 * turn + 16)) as seq:
        seq.commit(16)


def test_who_waits_for_pages_does_not_keep_others_from_the_host_tier(daemon_factory) -> None:
    """A reserve that waits in vain beside one that waits for copies: each gets what it can get."""
    daemon = daemon_factory(pools=[{"name": "default", "pages": 8, "host_pages": 16}])
    with radixkv.connect(daemon.endpoint, timeout=30.0) as client:
        pool = client.pool()
        for number in range(2):
            with pool.reserve(range(100 * number, 100 * number + 16)) as seq:
                seq.commit(16)
        pinned = pool.reserve(range(900, 916))
        refused: list[radixkv.RadixKVError] = []

        def wait_in_vain() -> None:
            try:
                pool.reserve(range(500, 528), timeout=1.0)
            except radixkv.OutOfPages as error:
                refused.append(error)

        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        with pool.reserve(range(16), last_page="keep") as seq:
            assert seq.cached_tokens == 15
        waiting.join()
        assert refused[0].need == 7 and refused[0].available <= 4
        pinned.free()
