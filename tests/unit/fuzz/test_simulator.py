"""The simulator itself: it does the same again, things really go wrong in it, and it shrinks what it finds."""

import os
import random
import re
import subprocess
import sys
from itertools import count

import numpy as np
import pytest

from fuzz.registry import Failed, run, shrunk
from fuzz.simulator import bugs, shrink
from fuzz.simulator.contents import Arena, Paths
from fuzz.simulator.copier import Copier
from fuzz.simulator.cuts import kill_during
from fuzz.simulator.network import Socket
from fuzz.simulator.stage import Setup, make_stage
from fuzz.targets.catalogue import FUZZERS
from radixkv.commands import Assign, Copy, Publish
from radixkv.device.descriptors import CACHED, PRIVATE, Geometry, TableReader, check_of
from radixkv.device.writer import TableWriter

MET = (
    "worker dies", "fork", "stop", "wake", "peer gone", "reply dropped", "twice", "daemon dies", "torn", "warm start",
    "resumed", "kept", "read, right", "read, refused", "granted", "hit_tokens", "evicted_pages", "forks",
)  # fmt: skip


def test_ten_thousand_steps_find_nothing_and_everything_has_happened():
    report = run(FUZZERS["simulator"], seed=7, steps=10_000)
    assert report.events["wound down"] == 10
    assert not [name for name in MET if not report.events[name]]


def test_a_seed_does_the_same_in_every_process():
    def told(hash_seed):
        command = [sys.executable, "-m", "fuzz", "simulator", "--seed", "11", "--steps", "2000"]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        return re.sub(r"in [\d.]+ s", "", ran.stdout)

    assert told("1") == told("2") != ""


@pytest.mark.parametrize(("bug", "key"), [(bugs.nothing_is_loading, "early0"), (bugs.layers_too_soon, "early62")])
def test_a_read_of_what_has_not_been_loaded_yet_is_noticed(bug, key):
    """In worlds in which somebody is early; without the bug there is nothing to find in them."""
    assert shrink.run(Setup(key), 1000) is None
    with bug():
        found = shrink.run(Setup(key), 1000)
    assert found is not None and found.name == "I4" and "layers" in str(found.error)


def test_what_fails_is_shrunk_and_can_be_run_again():
    fuzzer = FUZZERS["simulator"]
    with bugs.fence_ignored():
        with pytest.raises(Failed) as failed:
            run(fuzzer, seed=0, steps=5_000)
        found = shrink.run(Setup("anything"), 1000)
        assert found is not None
        smallest = shrink.shrink(found)
        assert (smallest.setup.workers, smallest.name) == (1, found.name) and smallest.steps <= found.steps
        assert smallest.setup.off
        told = shrink.report(smallest)
        assert f"again: {shrink.command(smallest)}" in told and f"{smallest.name} broken" in told
        again = subprocess.run(
            [sys.executable, *shrink.command(smallest).split()[1:]],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (again.returncode, "nothing found" in again.stdout) == (0, True)  # there, without the bug
        assert "again: python -m fuzz.simulator" in shrunk(fuzzer, failed.value)


# -- its parts ----------------------------------------------------------------------------------------------------


def test_a_path_is_equal_only_where_namespace_version_and_all_tokens_are():
    paths = Paths()
    first, second = paths.of(("a", b"n", 0), [1, 2, 3]), paths.of(("a", b"n", 0), [1, 2, 4])
    assert first[:2] == second[:2] and first[2] != second[2]
    for scope in (("a", b"n", 1), ("a", b"m", 0), ("b", b"n", 0)):
        assert not set(first) & set(paths.of(scope, [1, 2, 3]))


def test_an_arena_says_which_row_is_wrong_and_who_wrote_it():
    arena, paths = Arena(4, 2), [11, 12, 13]
    table = np.array([3, 1])
    for at, path in enumerate(paths):
        arena.write(int(table[at // 2]), at % 2, path, "me")
    assert arena.wrong(table, paths) == ""
    arena.write(1, 0, 99, "somebody")
    assert "token 2 (page 1, row 0) holds path 99 by somebody" in arena.wrong(table, paths)
    arena.copy_rows([(3, 0, 1)], "me")
    assert arena.rows[0].tolist() == [11, 0]


def table():
    writer = TableWriter(Geometry(pool="a", cache_id="c", pages=8, page_size=1, namespaces=1, sessions=1))
    return writer, TableReader(os.dup(writer.fd))


def test_a_kill_leaves_a_state_on_the_way_and_in_the_end_everything_has_been_seen():
    pages = np.arange(4, dtype="<i4").tobytes()
    seen, torn = set(), 0
    for seed in range(150):
        writer, reader = table()
        writer.apply(Assign("a", pages, 9, 0, 1))
        write = Publish("a", pages, False, b"\5\0\0\0" * 4)
        where = kill_during(random.Random(seed), {"a": writer}, lambda w=writer, p=write: w.apply(p))
        states = reader.records["state"][:4].tolist()
        assert set(states) <= {PRIVATE, CACHED} and states == sorted(states, reverse=True)
        cached = reader.records[reader.records["state"] == CACHED]
        assert (cached["check"] == check_of(cached)).all() and (cached["tokens"] == 5).all()
        seen.add(states.count(CACHED))
        torn += "words" in where
        reader.close()
        writer.close()
    assert seen == {0, 1, 2, 3, 4} and torn


def test_a_dead_daemon_takes_its_unread_requests_along_or_leaves_them_to_the_next():
    kept = set()
    for seed in range(40):
        for keeps in (False, True):
            socket = Socket(b"r", "w", "boot")
            socket.requests.extend([b"1", b"2", b"3"])
            socket.replies.extend([b"a", b"b"])
            left = socket.daemon_died(random.Random(seed), keeps)
            assert left == len(socket.requests) and (keeps or not left)
            assert list(socket.requests) == [b"1", b"2", b"3"][3 - left :]  # the last of them, in order
            assert list(socket.replies) == [b"a", b"b"][: len(socket.replies)]
            kept.add(left)
    assert kept == {0, 1, 2, 3}


def two_tiers(copies, seed=0):
    """A host tier, and a copier with so many copies to do: device page i goes to host page i."""
    stages = (make_stage(Setup(f"{seed} {number}")) for number in count())
    stage = next(stage for stage in stages if stage.config.pools[0].host_pages > 3)
    stage.store.arenas["a"].rows[:] = 7
    copier = Copier(stage)
    for number in range(copies):
        copier.take(Copy(number, "a", *[np.arange(3, dtype="<i4").tobytes()] * 2, True))
    return stage.store.host_arenas["a"].rows[:3], copier


def test_a_copier_ends_copies_in_any_order_well_badly_or_all_at_once():
    _, copier = two_tiers(60)
    ends = []
    while len(ends) < 40:
        ends += copier.go_on()
    assert len({end.copy for end in ends}) == len(ends) and ends != sorted(ends, key=lambda end: end.copy)
    assert {end.ok for end in ends} == {True, False}
    rest = copier.die()
    assert len(rest) + len(ends) == 60 and not any(end.ok for end in rest) and not copier
    assert {copier.unknown_end().copy for _ in range(50)} & {end.copy for end in [*ends, *rest]}


def test_only_what_is_copied_well_is_in_the_target():
    seen = set()
    for seed in range(40):
        rows, copier = two_tiers(1, seed)
        assert not rows.any()
        ends = []
        while copier:
            ends += copier.go_on()
        assert (rows == 7).all() or not ends[0].ok
        seen.add((ends[0].ok, int((rows == 7).sum())))
    assert len(seen) > 2  # also some, but not all, of what failed
