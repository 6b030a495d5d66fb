"""Groups of K processes that are one worker: joining, one word for all, one end for all."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import radixkv
from tests.contract.ranked import live

ANSWER_S = 30.0
POOLS = [{"name": "ranked", "ranks": 4}, {"name": "single"}]
PROMPT = list(range(40, 50))
"""Two full pages of 4 tokens and a part of a third."""

of_two_and_four = pytest.mark.parametrize("ranks", [2, 4])


class Group:
    """Rank 0 and those that have joined it, each in a process of its own."""

    def __init__(self, context: Any, endpoint: str) -> None:
        self._context = context
        self._endpoint = endpoint
        self.processes: list[Any] = []
        self._pipes: list[Any] = []
        self._start(None)
        self.token = self.ask(0, "token")

    def join(self, upto: int) -> None:
        """Ranks up to here, the last not included."""
        for _ in range(len(self.processes), upto):
            self._start(self.token)

    def _start(self, token: bytes | None) -> None:
        pipe, theirs = self._context.Pipe()
        process = self._context.Process(target=live, args=(self._endpoint, token, len(self.processes), theirs))
        process.start()
        theirs.close()
        self.processes.append(process)
        self._pipes.append(pipe)
        self.ask(-1, "read", 0)

    def ask(self, rank: int, *command: Any) -> Any:
        self._pipes[rank].send(command)
        assert self._pipes[rank].poll(ANSWER_S)
        return self._pipes[rank].recv()

    def ask_all(self, *command: Any) -> list[Any]:
        return [self.ask(rank, *command) for rank in range(len(self.processes)) if self.processes[rank].is_alive()]

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join(ANSWER_S)

    def end(self) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.kill()
            process.join(ANSWER_S)
            pipe.close()


@pytest.fixture(scope="module")
def forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.contract.ranked", "radixkv.client.sync", "radixkv.client.ranks", "torch"])
    return context


@pytest.fixture(scope="module")
def daemons(daemon_factory: Any) -> dict[int, Any]:
    return {ranks: daemon_factory(pools=[{**POOLS[0], "ranks": ranks}, POOLS[1]]) for ranks in (2, 4)}


@pytest.fixture
def watcher(daemons: dict[int, Any], ranks: int) -> Iterator[radixkv.Client]:
    with radixkv.connect(daemons[ranks].endpoint) as client:
        yield client


@pytest.fixture
def group(
    forks: Any, daemons: dict[int, Any], ranks: int, watcher: Any, wait_until: Any
) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def start() -> Group:
        groups.append(Group(forks, daemons[ranks].endpoint))
        return groups[-1]

    yield start
    for each in groups:
        each.end()
    wait_until(lambda: watcher.stats().sessions == 1, what="the end of the groups")
    wait_until(lambda: busy(watcher) == 0, what="the return of their pages")


def busy(client: radixkv.Client) -> int:
    pages = client.stats().pools["ranked"].pages
    return pages.private + pages.shadow + pages.quarantined


@of_two_and_four
def test_each_rank_has_an_arena_of_its_own_and_page_ids_mean_the_same(ranks: int, group: Any, ns: Any) -> None:
    """Another group finds what this one has committed, each rank its own part of it."""
    one = group()
    table = one.ask(0, "reserve", PROMPT, ns)
    one.join(ranks)
    for rank in range(ranks):
        for page in table:
            one.ask(rank, "write", page, 100.0 * page + rank)
    assert one.ask(0, "commit", 10) is None
    two = group()
    two.join(ranks)
    again = two.ask(0, "reserve", PROMPT, ns)
    assert two.ask(0, "cached") == 8 and again[:2] == table[:2] and again[2] != table[2]
    for rank in range(ranks):
        assert [two.ask(rank, "read", page) for page in table[:2]] == [[100.0 * page + rank] for page in table[:2]]
        assert two.ask(rank, "read", again[2]) != [100.0 * table[2] + rank]
    assert one.ask_all("valid") == two.ask_all("valid") == [True] * ranks


@of_two_and_four
def test_a_commit_speaks_for_all_and_is_refused_until_all_are_there(
    ranks: int, group: Any, ns: Any, watcher: Any
) -> None:
    one = group()
    one.ask(0, "reserve", PROMPT, ns)
    for joined in range(1, ranks):
        one.join(joined)
        assert one.ask(0, "commit", 10) == "bad_request"
        assert watcher.pool("ranked").lookup(PROMPT, namespace=ns).device_tokens == 0
    one.join(ranks)
    assert one.ask(0, "commit", 10) is None
    assert watcher.pool("ranked").lookup(PROMPT, namespace=ns).device_tokens == 8


@of_two_and_four
def test_rows_are_copied_by_each_rank(ranks: int, group: Any, ns: Any) -> None:
    """The library cannot reach the other arenas: it leaves copy_rows to the caller."""
    one = group()
    one.join(ranks)
    table = one.ask(0, "reserve", PROMPT[:8], ns)
    for rank in range(ranks):
        one.ask(rank, "write", table[1], 5.0 + rank)
    one.ask(0, "commit", 8)
    again = one.ask(0, "reserve", PROMPT[:8], ns)
    assert one.ask(0, "rows") == [(table[1], again[1], 3)]
    for rank in range(ranks):
        one.ask(rank, "write", again[1], 0.0)
        one.ask(rank, "copy_rows", [(table[1], again[1], 3)])
        assert one.ask(rank, "read", again[1]) == [0.0, 5.0 + rank]


@of_two_and_four
@pytest.mark.parametrize("dies", [0, 1, -1], ids=["rank 0", "rank 1", "the last rank"])
def test_the_end_of_one_is_the_end_of_all(
    ranks: int, dies: int, group: Any, ns: Any, watcher: Any, wait_until: Any
) -> None:
    one = group()
    one.join(ranks)
    one.ask(0, "reserve", PROMPT, ns)
    one.ask(0, "commit", 8)
    dies %= ranks
    one.kill(dies)
    wait_until(lambda: not any(one.ask_all("valid")), what="the end of the session")
    pool = watcher.stats().pools["ranked"]
    assert (pool.pages.quarantined, pool.pages.private) == (1, 0), "the others can still write to it"
    assert pool.evictable_pages == pool.pages.cached, "its pins are gone"
    for rank in set(range(ranks)) - {dies}:
        assert one.ask(rank, *(("commit", 10) if rank == 0 else ("write", 0, 1.0))) == "session_lost"
    left = sorted(set(range(ranks)) - {dies})
    for rank in left[:-1]:
        one.kill(rank)
    assert busy(watcher) == 1, "one of them is left"
    one.kill(left[-1])
    wait_until(lambda: busy(watcher) == 0, what="the return of the page")


@of_two_and_four
def test_rank_0_closes_the_group(ranks: int, group: Any, ns: Any, watcher: Any, wait_until: Any) -> None:
    """Its bye speaks for itself: what others may still write to waits for them, and not for rank 0's process."""
    one = group()
    one.join(ranks)
    one.ask(0, "reserve", PROMPT, ns)
    one.ask(0, "close")
    wait_until(lambda: watcher.stats().sessions == 1)
    assert one.ask(1, "valid") is False
    assert busy(watcher) == 3
    for rank in range(1, ranks):
        one.kill(rank)
    wait_until(lambda: busy(watcher) == 0, what="the return of its pages")
    assert one.processes[0].is_alive()


@pytest.mark.parametrize("ranks", [2])
def test_who_may_not_join(daemons: dict[int, Any], ranks: int, group: Any, wait_until: Any, watcher: Any) -> None:
    endpoint = daemons[ranks].endpoint
    one = group()
    one.join(2)
    wrong = one.token[:-1] + bytes([one.token[-1] ^ 1])
    for token, rank, error in (
        (one.token, 1, radixkv.BadRequest),  # taken
        (one.token, 2, radixkv.BadRequest),
        (one.token, 0, radixkv.BadRequest),
        (one.token, -1, radixkv.BadRequest),
        (one.token, "1", radixkv.BadRequest),
        (one.token[1:], 1, radixkv.BadRequest),
        ("token", 1, radixkv.BadRequest),
        (wrong, 1, (radixkv.SessionLost, radixkv.BadRequest)),
        (bytes(24), 1, radixkv.SessionLost),
        (one.token, True, radixkv.BadRequest),
    ):
        with pytest.raises(error):
            radixkv.attach(endpoint, token, rank)
    assert one.ask(1, "valid"), "nothing of that has harmed the group"
    assert one.ask(1, "single") == "bad_request", "a pool of one rank has no arena for it"
    assert one.ask(1, "fork") == 7
    one.ask(0, "close")
    wait_until(lambda: watcher.stats().sessions == 1)
    with pytest.raises(radixkv.SessionLost):
        radixkv.attach(endpoint, one.token, 1)


@pytest.mark.parametrize("ranks", [4])
def test_a_wrong_token_does_not_take_a_seat(daemons: dict[int, Any], ranks: int, group: Any) -> None:
    one = group()
    wrong = one.token[:-1] + bytes([one.token[-1] ^ 1])
    with pytest.raises(radixkv.SessionLost):
        radixkv.attach(daemons[ranks].endpoint, wrong, 1)
    one.join(2)
    assert one.ask(1, "valid")


@pytest.mark.parametrize("dies", [None, 2], ids=["nobody", "rank 2"])
def test_a_group_outlives_the_daemon(
    forks: Any, daemon_factory: Any, ns: Any, wait_until: Any, dies: int | None
) -> None:
    """It goes on with the next one; or it does not, because one of them died while there was none."""
    daemon = daemon_factory(pools=[{**POOLS[0], "ranks": 3}, POOLS[1]], supervised=True)
    one = Group(forks, daemon.endpoint)
    one.join(3)
    try:
        table = one.ask(0, "reserve", PROMPT, ns)
        for rank in range(3):
            one.ask(rank, "write", table[0], 1.0 + rank)
        for _ in range(2):
            os.kill(daemon.keeper_pid, signal.SIGSTOP)
            daemon.kill_daemon()
            if dies is not None:
                one.kill(dies)
            os.kill(daemon.keeper_pid, signal.SIGCONT)
            daemon.wait_ready()
            with radixkv.connect(daemon.endpoint) as watcher:
                if dies is not None:
                    wait_until(lambda: not any(one.ask_all("valid")), what="the end of the group")
                    assert busy(watcher) == 3, "the others can still write to its pages"
                    return
                assert one.ask_all("valid") == [True] * 3
                assert [one.ask(rank, "read", table[0]) for rank in range(3)] == [[1.0], [2.0], [3.0]]
                assert one.ask(0, "token") == one.token
        assert one.ask(0, "commit", 8) is None, "all of them are still there"
        one.kill(1)
        wait_until(lambda: not any(one.ask_all("valid")), what="the end of the group")
    finally:
        one.end()
