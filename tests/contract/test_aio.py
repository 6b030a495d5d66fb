"""The asyncio client as its own users see it: many tasks, cancellation, a loop that goes on, loops that come and go.

That it keeps the contract is shown by the other modules, which run for it too (``facade.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import zmq

import radixkv
from radixkv.commands import PROTOCOL_VERSION, Welcome
from tests.contract.test_connect import answer_hello

POOLS = [{"name": "default", "pages": 128}, {"name": "small", "pages": 4}]
TICKS = 20
SEEDS = range(3)


@pytest.fixture(scope="module")
def daemon(daemon_factory: Any) -> Any:
    """Heartbeats come so seldom that no test is over before one: what has to go out soon goes out by itself."""
    return daemon_factory(pools=POOLS, heartbeat_s=30.0)


@pytest.fixture
def watcher(connect: Any) -> Any:
    """A blocking client that only looks."""
    return connect()


@pytest.fixture
def idle(watcher: Any, wait_until: Any) -> Callable[[], None]:
    """Nothing is held, nothing waits, nobody is there but the one that looks: soon, if not now."""

    def nothing_held() -> bool:
        stats = watcher.stats()
        pools = [(pool.sequences, pool.pages.private, pool.pages.quarantined) for pool in stats.pools.values()]
        return set(pools) == {(0, 0, 0)} and (stats.queued, stats.in_transit, stats.sessions) == (0, 0, 1)

    return lambda: wait_until(nothing_held, what="the return of everything")


@pytest.fixture
def held(watcher: Any) -> Callable[..., Awaitable[None]]:
    """Waits until the daemon has so many sequences and queued requests."""

    async def held(sequences: int = 0, queued: int = 0, pool: str = "default") -> None:
        end = time.monotonic() + 10
        while True:
            stats = await asyncio.to_thread(watcher.stats)
            seen = (stats.pools[pool].sequences, stats.queued)
            if seen == (sequences, queued):
                return
            assert time.monotonic() < end, f"{seen}, not {(sequences, queued)}"
            await asyncio.sleep(0.005)

    return held


async def after_some_ticks(then: Callable[[], Any]) -> None:
    """Something that only a loop that goes on can do."""
    for _ in range(TICKS):
        await asyncio.sleep(0.001)
    then()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 60))


@contextlib.asynccontextmanager
async def default_pool(daemon: Any, timeout: float = 30.0) -> AsyncIterator[Any]:
    async with await radixkv.aio.connect(daemon.endpoint, timeout=timeout) as client:
        yield await client.pool("default")


# -- many tasks ---------------------------------------------------------------------------------------------------


def test_two_hundred_tasks_share_one_socket(daemon_factory: Any, ns: Any) -> None:
    daemon = daemon_factory(pools=[{"pages": 1024}], paranoid=False)

    async def work(pool: Any, number: int) -> int:
        tokens = [number] * 6
        async with await pool.reserve(tokens, namespace=ns) as seq:
            await seq.commit(4)
            await seq.extend([number + 1], headroom_tokens=1)
            assert seq.tokens.tolist() == [*tokens, number + 1]
            assert seq.valid()
            (child,) = await seq.share()
            await child.free()
            return (await pool.lookup(tokens, namespace=ns)).device_tokens

    async def main() -> None:
        async with default_pool(daemon) as pool:
            assert await asyncio.gather(*(work(pool, number) for number in range(200))) == [4] * 200
            assert len(pool.link._sockets) <= 2  # the keeper has one of its own
            assert not pool.link._loops[asyncio.get_running_loop()]._askers
            assert (await pool.client.stats()).pools["default"].sequences == 0

    run(main())


def test_tasks_on_one_sequence_come_one_after_the_other(daemon: Any, ns: Any) -> None:
    async def main() -> None:
        async with default_pool(daemon) as pool, await pool.reserve([], namespace=ns) as seq:
            await asyncio.gather(*(seq.extend([n]) for n in range(30)))
            assert seq.tokens.tolist() == list(range(30))
            await seq.commit(30)
            async with await pool.reserve(seq.tokens, namespace=ns, last_page="keep") as other:
                assert other.page_table[:7].tolist() == seq.page_table[:7].tolist()

    run(main())


def test_what_comes_behind_a_waiting_call_waits_too(daemon: Any, ns: Any) -> None:
    async def main() -> None:
        async with default_pool(daemon) as pool:
            seq, fence = await pool.reserve(range(8), namespace=ns), HeldFence()
            await seq.commit(8, after=fence)
            handoff, extend = asyncio.create_task(seq.handoff()), asyncio.create_task(seq.extend([1]))
            await after_some_ticks(fence.done.set)
            with pytest.raises(radixkv.StaleHandle):
                await extend
            async with await pool.adopt(await handoff) as moved:
                assert (moved.length, moved.committed_tokens) == (8, 8)

    run(main())


def test_a_batch(daemon: Any, ns: Any) -> None:
    async def main() -> None:
        async with default_pool(daemon) as pool:
            a, b = [await pool.reserve(range(n), namespace=ns) for n in (8, 12)]
            result = await pool.step(commit={a: 8, b: 13}, extend={b: [5]}, share={a: (4, 2)})
            assert (result.commit[a], result.extend[b], b.length) == (None, None, 13)
            assert isinstance(result.commit[b], radixkv.BadRequest)
            assert [type(child) for child in result.share[a]] == [radixkv.aio.Sequence] * 2
            await pool.step(free=[a, b, *result.share[a]])

    run(main())


# -- cancellation -------------------------------------------------------------------------------------------------


class LateEvent:
    """Done a few milliseconds after it was made, like device work."""

    def __init__(self, after_s: float) -> None:
        self.at = time.monotonic() + after_s

    def query(self) -> bool:
        return time.monotonic() >= self.at

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.monotonic()))


async def live(pool: Any, rng: random.Random) -> None:
    tokens = rng.choices([0, 1], k=rng.randrange(40))
    async with await pool.reserve(tokens, timeout=rng.choice([None, 0.05, 60.0])) as seq:
        while True:
            after = LateEvent(0.01 * rng.random()) if rng.random() < 0.3 else None
            match rng.randrange(6):
                case 0:
                    await seq.extend([1] * rng.randrange(5), headroom_tokens=rng.randrange(4))
                case 1:
                    await seq.commit(seq.length, after=after)
                case 2:
                    await seq.truncate(rng.randrange(seq.length + 1), after=after)
                case 3:
                    async with contextlib.AsyncExitStack() as children:
                        for child in await seq.share(count=rng.randrange(3)):
                            await children.enter_async_context(child)
                        await seq.extend([2])
                case 4:
                    await (await pool.adopt(await seq.handoff(ttl=0.5))).free()
                    return
                case 5:
                    await pool.step(extend={seq: [1]}, commit={seq: (seq.length, after)})


async def live_and_be_cancelled(pool: Any, rng: random.Random) -> None:
    task = asyncio.create_task(live(pool, rng))
    for _ in range(rng.randrange(150)):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, radixkv.RadixKVError):
        await task


@pytest.mark.parametrize("seed", SEEDS)
def test_cancelled_at_random_points_under_load(daemon: Any, idle: Any, seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with default_pool(daemon) as pool:
            for _ in range(3):
                await asyncio.gather(*(live_and_be_cancelled(pool, random.Random(rng.random())) for _ in range(60)))
            async with await pool.reserve([1, 2, 3]) as seq:
                assert seq.valid()
            await nothing_of(pool)

    async def nothing_of(pool: Any) -> None:
        """While the session lives: not because its end gave all back."""
        end = time.monotonic() + 15
        while (seen := await pool.client.stats()).pools["default"].sequences or seen.queued or seen.in_transit:
            assert time.monotonic() < end, (seed, seen.pools["default"], seen.queued, seen.in_transit)
            with contextlib.suppress(radixkv.RadixKVError):
                await pool.flush(1.0)
            await asyncio.sleep(0.01)
        assert seen.pools["default"].pages.private == 0, seed

    run(main())
    idle()


def test_a_cancelled_reserve_leaves_the_queue_at_once(daemon: Any, ns: Any, held: Any, idle: Any) -> None:
    async def main() -> None:
        async with await radixkv.aio.connect(daemon.endpoint, timeout=30) as client:
            pool = await client.pool("small")
            async with await pool.reserve(range(16), namespace=ns):
                waiting = [asyncio.create_task(pool.reserve([1] * 4, timeout=60)) for _ in range(10)]
                await held(sequences=1, queued=10, pool="small")
                for task in waiting[1:]:
                    task.cancel()
                await held(sequences=1, queued=1, pool="small")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(waiting[0], 0.01)
                await held(sequences=1, queued=0, pool="small")
                assert {task.cancelled() for task in waiting} == {True}

    run(main())
    idle()


def test_a_grant_that_comes_after_the_cancellation_goes_back_at_once(daemon: Any, ns: Any, held: Any) -> None:
    async def main() -> None:
        async with default_pool(daemon) as pool:
            daemon.pause()
            tasks = [asyncio.create_task(pool.reserve(range(9), namespace=ns, timeout=n)) for n in (None, 60)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert {task.cancelled() for task in tasks} == {True}
            asked = len(pool.core._unwanted)
            daemon.resume()
            await held(sequences=0)
            assert asked == 2

    run(main())


def test_what_a_cancelled_call_did_is_found_out_before_the_next_one(daemon: Any, ns: Any) -> None:
    async def main() -> None:
        async with default_pool(daemon) as pool, await pool.reserve(range(4), namespace=ns) as seq:
            daemon.pause()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(seq.extend([4, 5]), 0.05)
            assert seq.length == 4
            daemon.resume()
            await seq.extend([6])
            assert seq.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6]

    run(main())


def test_a_cancelled_connect_leaves_no_session(daemon: Any, idle: Any) -> None:
    async def main() -> None:
        for pause in (0.0, 0.001, 0.003, 0.01):
            task = asyncio.create_task(radixkv.aio.connect(daemon.endpoint))
            await asyncio.sleep(pause)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).close()

    run(main())
    idle()


# -- the loop goes on ---------------------------------------------------------------------------------------------


class HeldFence:
    """Done when the loop says so; whoever waits for it on the loop itself waits in vain."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.in_vain = False

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.in_vain = not self.done.wait(10)


def flush(pool: Any, seq: Any) -> Any:
    return pool.flush()


def flush_for_a_time(pool: Any, seq: Any) -> Any:
    return pool.flush(20)


def extend(pool: Any, seq: Any) -> Any:
    return seq.extend([1])


def handoff(pool: Any, seq: Any) -> Any:
    return seq.handoff(ttl=0.0)


def compact(pool: Any, seq: Any) -> Any:
    return seq.compact()


@pytest.mark.parametrize("wait", [flush, flush_for_a_time, extend, handoff, compact])
def test_a_fence_does_not_stop_the_loop(daemon: Any, ns: Any, wait: Any) -> None:
    async def main() -> None:
        async with default_pool(daemon) as pool, await pool.reserve(range(8), namespace=ns) as seq:
            fence = HeldFence()
            await seq.truncate(6, after=fence)
            assert seq.length == 8
            await asyncio.gather(wait(pool, seq), after_some_ticks(fence.done.set))
            assert not fence.in_vain
            assert seq.length == 6 + (wait is extend)

    run(main())


def test_a_daemon_that_stands_still_does_not_stop_the_loop(daemon: Any, ns: Any) -> None:
    async def main() -> None:
        async with default_pool(daemon) as pool, await pool.reserve(range(8), namespace=ns) as seq:
            client = pool.client
            for calls in ([seq.commit(4), pool.lookup([1])], [client.pool("small")], [client.stats()]):
                daemon.pause()
                await asyncio.gather(*calls, after_some_ticks(daemon.resume))

    run(main())


def test_connecting_to_nobody_does_not_stop_the_loop(tmp_path: Path) -> None:
    async def main() -> None:
        ticks = asyncio.create_task(after_some_ticks(lambda: None))
        with pytest.raises(radixkv.Unavailable, match="start one with"):
            await radixkv.aio.connect(f"ipc://{tmp_path}/nobody.sock", timeout=0.5)
        assert ticks.done()
        await ticks

    run(main())


def test_the_loop_turns_while_a_reserve_waits(daemon: Any, ns: Any) -> None:
    """The longest pause between two turns, of the best of some tries: other processes take their time too."""

    async def longest_pause() -> float:
        longest, last = 0.0, time.monotonic()
        while True:
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                return longest
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    async def main() -> None:
        async with await radixkv.aio.connect(daemon.endpoint) as client:
            pool = await client.pool("small")
            async with await pool.reserve(range(16), namespace=ns):
                pauses = []
                for _ in range(3):
                    watch = asyncio.create_task(longest_pause())
                    with pytest.raises(radixkv.OutOfPages):
                        await pool.reserve([1] * 4, timeout=0.4)
                    watch.cancel()
                    pauses.append(await watch)
                assert min(pauses) < 0.1, pauses

    run(main())


def test_closing_does_not_stop_the_loop(daemon: Any, ns: Any) -> None:
    async def main() -> None:
        client = await radixkv.aio.connect(daemon.endpoint)
        pool = await client.pool("default")
        fence = HeldFence()
        await (await pool.reserve(range(8), namespace=ns)).free(after=fence)
        await asyncio.gather(client.close(), after_some_ticks(fence.done.set))

    run(main())


# -- the end ------------------------------------------------------------------------------------------------------


def test_closing_ends_the_calls_that_wait(daemon: Any, ns: Any, held: Any, idle: Any) -> None:
    async def main() -> None:
        client = await radixkv.aio.connect(daemon.endpoint)
        pool = await client.pool("small")
        holder = await pool.reserve(range(16), namespace=ns)
        waiting = [asyncio.create_task(pool.reserve([1] * 4, timeout=60)) for _ in range(20)]
        await held(sequences=1, queued=20, pool="small")
        started = time.monotonic()
        await client.close()
        await client.close()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, radixkv.Unavailable)
            assert "closed" in str(outcome)
        assert time.monotonic() - started < 5
        assert not holder.valid()
        with pytest.raises(radixkv.Unavailable, match="closed"):
            await client.stats()
        assert not client._link._sockets

    run(main())
    idle()


def test_a_client_nobody_holds_any_more_ends_its_session(daemon: Any, idle: Any) -> None:
    async def main() -> None:
        client = await radixkv.aio.connect(daemon.endpoint)
        await client.stats()
        del client
        await asyncio.to_thread(idle)

    run(main())


def test_leaving_a_block_keeps_the_bodys_error(daemon: Any, ns: Any, idle: Any) -> None:
    async def a_commit_that_fails_later(pool: Any, seq: Any) -> None:
        fence = HeldFence()
        await seq.commit(5, after=fence)
        fence.done.set()
        await pool.lookup([1])

    async def main() -> None:
        async with default_pool(daemon) as pool:
            with pytest.raises(ZeroDivisionError):
                async with await pool.reserve(range(4), namespace=ns) as seq:
                    await a_commit_that_fails_later(pool, seq)
                    1 / 0
            with pytest.raises(radixkv.BadRequest):
                async with await pool.reserve(range(4), namespace=ns) as seq:
                    await a_commit_that_fails_later(pool, seq)

    run(main())
    idle()


def test_a_daemon_that_dies_keeps_nobody_waiting(daemon_factory: Any, ns: Any) -> None:
    daemon = daemon_factory(pools=POOLS)

    async def main() -> None:
        async with default_pool(daemon) as pool:
            sequences = [await pool.reserve(range(8), namespace=ns) for _ in range(4)]
            daemon.pause()
            calls = [asyncio.create_task(seq.commit(4)) for seq in sequences]
            await asyncio.sleep(0.05)
            daemon.kill()
            started = time.monotonic()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, radixkv.Unavailable)
            assert time.monotonic() - started < 10
            assert not any(seq.valid() for seq in sequences)

    run(main())


# -- loops and processes ------------------------------------------------------------------------------------------


def test_one_client_in_two_loops_one_after_the_other(daemon: Any, ns: Any, idle: Any) -> None:
    async def first() -> Any:
        client = await radixkv.aio.connect(daemon.endpoint)
        pool = await client.pool("default")
        seq = await pool.reserve(range(8), namespace=ns)
        await asyncio.gather(*(seq.extend([n]) for n in range(5)))
        return client, pool, seq

    async def second(client: Any, pool: Any, seq: Any) -> None:
        await asyncio.gather(*(seq.extend([n]) for n in range(5)))
        assert (seq.length, seq.valid()) == (18, True)
        assert await client.pool("default") is pool
        assert (len(pool.link._loops), len(pool.link._sockets) <= 2) == (1, True)
        await client.close()

    run(second(*run(first())))
    idle()


def test_one_client_in_two_loops_at_once(daemon: Any, ns: Any) -> None:
    async def use(pool: Any) -> None:
        for n in range(30):
            async with await pool.reserve([n] * 5, namespace=ns) as seq:
                await seq.commit(5)

    async def main() -> None:
        async with default_pool(daemon) as pool:
            await asyncio.gather(asyncio.to_thread(asyncio.run, use(pool)), use(pool))

    run(main())


def test_after_a_fork_the_child_is_refused_and_the_parent_goes_on(daemon: Any, ns: Any) -> None:
    def child(pool: Any, seq: Any) -> int:
        for call in (pool.client.stats(), pool.reserve([1]), seq.commit(4), pool.client.pool("default"), seq.free()):
            try:
                call.send(None)
            except radixkv.Forked:
                continue
            return 1
        return 7

    async def main() -> None:
        async with default_pool(daemon) as pool, await pool.reserve(range(8), namespace=ns) as seq:
            waiting = [asyncio.create_task(seq.extend([n])) for n in range(5)]
            await asyncio.sleep(0)
            if (pid := os.fork()) == 0:
                status = 1
                try:
                    status = child(pool, seq)
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            await asyncio.gather(*waiting)
            await seq.commit(13)
            assert seq.valid()

    run(main())


def test_a_restart_is_nobodys_error(daemon_factory: Any, ns: Any) -> None:
    daemon = daemon_factory(pools=POOLS, supervised=True, heartbeat_s=0.05)

    async def work(pool: Any, number: int, restarted: asyncio.Event) -> None:
        async with await pool.reserve([number] * 6, namespace=ns) as seq:
            table = seq.page_table.tolist()
            while not restarted.is_set():
                await seq.extend([1], headroom_tokens=0)
                await seq.truncate(6)
                await asyncio.sleep(0.01)
            await seq.commit(6)
            assert (seq.page_table.tolist(), seq.valid()) == (table, True)

    async def main() -> None:
        restarted = asyncio.Event()
        async with default_pool(daemon) as pool:
            tasks = [asyncio.create_task(work(pool, number, restarted)) for number in range(20)]
            await asyncio.sleep(0.1)
            daemon.kill_daemon()
            await asyncio.to_thread(daemon.wait_ready)
            await pool.lookup([1])
            restarted.set()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            lost = [outcome for outcome in outcomes if isinstance(outcome, radixkv.SessionLost)]
            assert [outcome for outcome in outcomes if outcome not in (None, *lost)] == []
            assert len(lost) < 20
            assert (await pool.client.stats()).boot_id == daemon.boot_ids[1]

    run(main())


def test_a_session_outlives_a_loop_that_stands_still(daemon_factory: Any, ns: Any) -> None:
    daemon = daemon_factory(pools=POOLS, lease_s=0.5, heartbeat_s=0.1)

    async def main() -> None:
        async with default_pool(daemon) as pool, await pool.reserve(range(4), namespace=ns) as seq:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                pass
            await seq.commit(4)
            assert seq.valid()

    run(main())


def test_the_group_token_lets_others_in(daemon_factory: Any) -> None:
    daemon = daemon_factory(pools=[{"ranks": 2}])

    async def main() -> None:
        async with default_pool(daemon) as pool:
            token = pool.client.group_token
            with await asyncio.to_thread(radixkv.attach, daemon.endpoint, token, 1) as member:
                assert member.valid()
                assert pool.ranks == 2
        with pytest.raises(radixkv.Unavailable):
            _ = pool.client.group_token

    run(main())


def talk_nonsense(router: Any, until: threading.Event) -> None:
    while not until.is_set():
        if router.poll(10):
            peer, _ = router.recv_multipart()
            router.send_multipart([peer, b"\xc1"])


def test_a_daemon_that_talks_nonsense_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    server = answer_hello(path, Welcome(PROTOCOL_VERSION, 1, 1, 0, b"t" * 16, "boot", "cache", ["p"], 60.0, 600.0))

    async def main() -> None:
        context = zmq.Context()
        with context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{path}")
            async with await radixkv.aio.connect(str(path), timeout=30) as client:
                calls = [asyncio.create_task(client.stats()) for _ in range(5)]
                enough = threading.Event()
                talking = asyncio.create_task(asyncio.to_thread(talk_nonsense, router, enough))
                for outcome in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(outcome, radixkv.VersionMismatch)
                enough.set()
                await talking
        context.term()

    run(main())
    server.join()
