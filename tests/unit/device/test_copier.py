"""The copier's contract, on real processes: bytes arrive exactly, every copy ends once, nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from radixkv.commands import Copy, CopyDone, CopyProgress
from radixkv.device import arena, cuda_arena, cuda_driver
from radixkv.device.copier import PAUSE_FIRST_S, STUCK_S, ProcessCopier
from radixkv.device.copier_process import PoolTiers
from radixkv.device.copying import NICENESS, SLAB_BYTES, slabs
from tests.conftest import DEVICE

PATIENCE_S = 30.0
PAGE_BYTES = 4096 + 256
"""Not a multiple of the machine's page."""
DEVICE_PAGES, HOST_PAGES, RANKS = 24, 10, 2

Pages = np.ndarray


class Memory:
    """One pool's arenas, with content in which every 8 bytes differ; ``device`` and ``host`` are views, one a rank."""

    def __init__(self, pages: tuple[int, int], page_bytes: int = PAGE_BYTES, ranks: tuple[int, int] = (1, 1)) -> None:
        self.page_bytes = page_bytes
        self.fds: list[int] = []
        self._device = [self._device_arena(pages[0]) for _ in range(ranks[0])]
        self.host = [self._arena(pages[1]) for _ in range(ranks[1])]
        self.tiers = PoolTiers(page_bytes, self.fds[: ranks[0]], self.fds[ranks[0] :], self._uuids(ranks[0]), pages[0])

    @property
    def device(self) -> list[Pages]:
        return self._device

    def _uuids(self, ranks: int) -> list[str]:
        return []

    def _device_arena(self, pages: int) -> Any:
        return self._arena(pages)

    def _arena(self, pages: int) -> Pages:
        size = pages * self.page_bytes
        self.fds.append(arena.create("test", size))
        view = np.frombuffer(arena.map_shared(self.fds[-1], size), np.uint64)
        view[:] = self._content(size)
        return view.reshape(pages, -1)

    def _content(self, size: int) -> Pages:
        return np.arange(size // 8, dtype=np.uint64) + (len(self.fds) << 40)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class CudaMemory(Memory):
    """The same with the device's arenas on CUDA devices, each time read anew."""

    @property
    def device(self) -> list[Pages]:
        return [self._read(addresses, pages) for addresses, pages in self._device]

    def _uuids(self, ranks: int) -> list[str]:
        return [cuda_driver.devices()[rank].uuid for rank in range(ranks)]

    def _device_arena(self, pages: int) -> Any:
        size = pages * self.page_bytes
        device = cuda_driver.devices()[len(self.fds)]
        addresses = cuda_arena.Range(device, cuda_arena.whole_bytes(device, size))
        self.fds.append(cuda_arena.create(device, addresses.size))
        addresses.map(self.fds[-1])
        content = self._content(size)
        with cuda_driver.current(device):
            cuda_driver.call("cuMemcpyHtoD", addresses.pointer, content.ctypes.data, size)
            cuda_driver.call("cuCtxSynchronize")
        return addresses, pages

    def _read(self, addresses: cuda_arena.Range, pages: int) -> Pages:
        content = np.empty((pages, self.page_bytes // 8), np.uint64)
        with cuda_driver.current(addresses.device):
            cuda_driver.call("cuMemcpyDtoH", content.ctypes.data, addresses.pointer, content.nbytes)
        return content


ON_CUDA = DEVICE != "cpu"
"""The whole contract again, with another copier (``tests/cuda``)."""


@pytest.fixture
def memory() -> Iterator[Callable[..., Memory]]:
    made: list[Memory] = []

    def make(*args: object, **kwargs: object) -> Memory:
        made.append((CudaMemory if ON_CUDA else Memory)(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def copier() -> Iterator[Callable[..., ProcessCopier]]:
    made: list[ProcessCopier] = []

    def make(pools: dict[str, Memory], keep_fds: tuple[int, ...] = ()) -> ProcessCopier:
        made.append(ProcessCopier({name: pool.tiers for name, pool in pools.items()}, keep_fds))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def pool(memory: Callable[..., Memory]) -> Memory:
    return memory((DEVICE_PAGES, HOST_PAGES), ranks=(RANKS, RANKS))


@pytest.fixture
def running(pool: Memory, copier: Callable[..., ProcessCopier]) -> ProcessCopier:
    return copier({"default": pool})


def ids(*pages: int) -> bytes:
    return np.array(pages, "<i4").tobytes()


def save(copy: int, sources: list[int], targets: list[int], pool: str = "default") -> Copy:
    return Copy(copy, pool, ids(*sources), ids(*targets), to_host=True)


def load(copy: int, sources: list[int], targets: list[int], pool: str = "default") -> Copy:
    return Copy(copy, pool, ids(*sources), ids(*targets), to_host=False)


def next_ends(copier: ProcessCopier) -> list[CopyDone]:
    """Wait as the daemon does: for the descriptor, never for time."""
    assert select.select([copier], [], [], PATIENCE_S)[0], "the copier has nothing to say"
    return copier.completions()


def ends(copier: ProcessCopier, count: int) -> list[CopyDone]:
    ended: list[CopyDone] = []
    while len(ended) < count:
        ended += next_ends(copier)
    return ended


def verdicts(ended: list[CopyDone]) -> list[tuple[int, bool]]:
    return [(end.copy, end.ok) for end in ended]


def stop(pid: int) -> None:
    """Returns when the process stands still."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def kill(copier: ProcessCopier) -> int:
    """SIGKILL; returns when the kernel has ended it, before the copier has noticed."""
    pid = copier.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


# -- what is copied -----------------------------------------------------------------------------------------------


def test_pages_go_to_the_host_and_come_back_on_every_rank(pool: Memory, running: ProcessCopier) -> None:
    device, host = [rank.copy() for rank in pool.device], [rank.copy() for rank in pool.host]
    sources, targets = [3, 4, 5, 23, 0, 7], [8, 9, 1, 2, 0, 5]  # neighbours, the ends of the arenas, a page alone
    running.submit(save(1, sources, targets))
    assert verdicts(ends(running, 1)) == [(1, True)]
    for rank in range(RANKS):
        host[rank][targets] = device[rank][sources]
        assert np.array_equal(pool.host[rank], host[rank])
        assert np.array_equal(pool.device[rank], device[rank]), "what is saved stays as it is"
    running.submit(load(2, targets, [10, 11, 12, 13, 14, 15]))
    (end,) = ends(running, 1)
    assert verdicts([end]) == [(2, True)] and 0 < end.seconds < PATIENCE_S
    for rank in range(RANKS):
        device[rank][10:16] = device[rank][sources]
        assert np.array_equal(pool.device[rank], device[rank])
        assert np.array_equal(pool.host[rank], host[rank])


LAYERS, LAYER_BYTES = 5, SLAB_BYTES // 2
"""Two layers are copied at once; the page ends with some bytes of no layer."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_layer_by_layer_what_is_told_to_be_there_is(
    memory: Callable[..., Memory], copier: Callable[..., ProcessCopier], ranks: int
) -> None:
    """On every rank, of every page; and at the end the whole pages are."""
    pool = memory((7, 7), LAYERS * LAYER_BYTES + 256, (ranks, ranks))
    pool.tiers = pool.tiers._replace(layers=LAYERS, layer_bytes=LAYER_BYTES)
    running = copier({"default": pool})
    sources, targets = [0, 1, 2, 6, 4], [3, 4, 5, 0, 1]
    running.submit(replace(load(1, sources, targets), by_layer=True))
    running.submit(load(2, [3], [6]))
    told, ended = [], []
    while len(ended) < 2:
        for said in next_ends(running):
            (ended if isinstance(said, CopyDone) else told).append(said)
            if isinstance(said, CopyProgress):
                there = slice(0, said.layers * LAYER_BYTES // 8)
                for device, host in zip(pool.device, pool.host, strict=True):
                    assert np.array_equal(device[targets, there], host[sources, there])
    assert told == [CopyProgress(1, count) for count in (2, 4, 5)]
    assert verdicts(ended) == [(1, True), (2, True)]
    for device, host in zip(pool.device, pool.host, strict=True):
        assert np.array_equal(device[[*targets, 6]], host[[*sources, 3]])


def test_layers_that_are_small_are_copied_together() -> None:
    assert slabs(737_280, 30, 24_576) == [(22, 0, 540_672), (30, 540_672, 737_280)]
    assert slabs(512, 2, 64) == [(2, 0, 512)]
    assert slabs(2**22, 4, 2**20) == [(n + 1, n * 2**20, (n + 1) * 2**20) for n in range(4)]
    assert slabs(2**20 + 256, 2, 2**19) == [(1, 0, 2**19), (2, 2**19, 2**20 + 256)]


def test_a_copy_by_layer_that_makes_no_sense_fails_alone(pool: Memory, running: ProcessCopier) -> None:
    running.submit(replace(load(1, [0], [DEVICE_PAGES]), by_layer=True))
    running.submit(replace(load(2, [0], [0], "nowhere"), by_layer=True))
    assert verdicts(ends(running, 2)) == [(1, False), (2, False)]


def test_each_pool_has_its_own_memory(memory: Callable[..., Memory], copier: Callable[..., ProcessCopier]) -> None:
    small, large = memory((2, 1), page_bytes=64), memory((2, 1), page_bytes=8192)
    before = small.host[0].copy()
    running = copier({"small": small, "large": large})
    running.submit(save(1, [1], [0], "large"))
    assert verdicts(ends(running, 1)) == [(1, True)]
    assert np.array_equal(large.host[0][0], large.device[0][1])
    assert np.array_equal(small.host[0], before)


def test_one_direction_keeps_the_order_of_submission(pool: Memory, running: ProcessCopier) -> None:
    """Each copy moves on what the one before it brought; another order would leave other content."""
    first = pool.device[0][0].copy()
    chain = [save(0, [0], [0]), *(save(n, [n], [n % HOST_PAGES]) for n in range(1, HOST_PAGES)), save(99, [5], [0])]
    for copy in chain:
        running.submit(copy)
    assert verdicts(ends(running, len(chain))) == [(copy.copy, True) for copy in chain]
    assert np.array_equal(pool.host[0][0], pool.device[0][5]) and not np.array_equal(pool.host[0][0], first)
    for n in range(50):  # host 0 -> device n % 5 + 10, in turns with host 1
        running.submit(load(n, [n % 2], [10]))
    assert [end.copy for end in ends(running, 50)] == list(range(50))
    assert np.array_equal(pool.device[0][10], pool.host[0][1])


def test_a_long_save_delays_no_load(memory: Callable[..., Memory], copier: Callable[..., ProcessCopier]) -> None:
    pages, page_bytes = 1024, 2**15
    pool = memory((pages, pages), page_bytes)
    running = copier({"default": pool})
    everything = list(range(pages))
    for n in range(40):  # 1.3 GB
        running.submit(save(n, everything, everything))
    running.submit(load(99, [0], [0]))
    order = [end.copy for end in ends(running, 41)]
    assert sorted(order) == [*range(40), 99]
    assert order.index(99) < 40, "the load was told after the last save"


def test_more_than_the_socket_holds_waits_here(pool: Memory, running: ProcessCopier) -> None:
    """The process stands still, so that nothing is read; submit goes on at once, and later everything arrives."""
    assert running.pid is not None
    stop(running.pid)
    pages = [n % HOST_PAGES for n in range(20_000)]
    for n in range(40):
        running.submit(save(n, pages, pages))  # 160 kB each
        running.submit(load(100 + n, [n % HOST_PAGES], [10]))
    assert running.completions() == []
    assert not select.select([running], [], [], 0)[0], "nothing to do, and the descriptor says so"
    os.kill(running.pid, signal.SIGCONT)
    done = verdicts(ends(running, 80))
    assert [end for end in done if end[0] < 100] == [(n, True) for n in range(40)]
    assert [end for end in done if end[0] >= 100] == [(100 + n, True) for n in range(40)]
    assert np.array_equal(pool.host[0], pool.device[0][:HOST_PAGES])
    assert not select.select([running], [], [], 0)[0]


# -- what makes no sense --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copy",
    [
        save(7, [0], [0], "nobody's"),
        save(7, [DEVICE_PAGES], [0]),
        save(7, [0, 1], [0, HOST_PAGES]),
        save(7, [-1], [0]),
        load(7, [0], [-(2**31)]),
        load(7, [HOST_PAGES], [0]),
        save(7, [0, 1], [0]),
        Copy(7, "default", b"\0\0\0\0\0\0", b"\0\0\0\0\0\0", to_host=True),
        Copy(7, "default", os.urandom(4000), os.urandom(4000), to_host=False),
    ],
    ids=["pool", "source", "second target", "negative", "lowest", "host source", "lengths", "half an id", "noise"],
)
def test_what_makes_no_sense_fails_alone(pool: Memory, running: ProcessCopier, copy: Copy) -> None:
    before = [rank.copy() for rank in (*pool.device, *pool.host)]
    pid = running.pid
    running.submit(copy)
    assert verdicts(ends(running, 1)) == [(7, False)]
    assert all(map(np.array_equal, (*pool.device, *pool.host), before)), "not even its sound part is carried out"
    running.submit(save(8, [1], [1]))
    running.submit(load(9, [1], [2]))
    assert sorted(verdicts(ends(running, 2))) == [(8, True), (9, True)]
    assert running.pid == pid


def test_an_empty_copy_is_over_at_once(running: ProcessCopier) -> None:
    running.submit(save(1, [], []))
    assert verdicts(ends(running, 1)) == [(1, True)]


# -- deaths ---------------------------------------------------------------------------------------------------------


def test_the_death_of_the_process_fails_what_was_in_flight(pool: Memory, running: ProcessCopier) -> None:
    """Stopped first, so that nothing that is asked can have ended; more is asked than the socket holds."""
    fd, pid = running.fileno(), running.pid
    assert pid is not None
    stop(pid)
    pages = [n % HOST_PAGES for n in range(20_000)]
    for n in range(10):
        running.submit(save(n, pages, pages))
        running.submit(load(100 + n, [0], [10]))
    kill(running)
    assert sorted(verdicts(ends(running, 20))) == [(n, False) for n in [*range(10), *range(100, 110)]]
    assert running.deaths == 1
    assert not Path(f"/proc/{pid}").exists(), "reaped before it was told"
    assert running.pid not in (None, pid)
    assert running.fileno() == fd
    running.submit(save(50, [3], [4]))
    assert verdicts(ends(running, 1)) == [(50, True)]
    assert np.array_equal(pool.host[0][4], pool.device[0][3])


def test_killed_in_the_middle_each_copy_ends_once_and_truly(
    memory: Callable[..., Memory], copier: Callable[..., ProcessCopier]
) -> None:
    """Whatever was told to be there is there; nothing is written after the others have failed."""
    pages, page_bytes, batch = 2048, 2**14, 16
    pool = memory((pages, pages), page_bytes)
    running = copier({"default": pool})
    batches = [list(range(at, at + batch)) for at in range(0, pages, batch)]
    for n, batch_pages in enumerate(batches):
        running.submit(save(n, batch_pages, batch_pages))
    ended = next_ends(running)  # it is at work
    kill(running)
    ended += ends(running, len(batches) - len(ended))
    assert [end.copy for end in ended] == list(range(len(batches)))
    failed = [end.ok for end in ended].index(False) if not ended[-1].ok else len(ended)
    assert all(end.ok for end in ended[:failed]) and not any(end.ok for end in ended[failed:])
    whole = failed * batch
    assert np.array_equal(pool.host[0][:whole], pool.device[0][:whole])
    assert not np.array_equal(pool.host[0][-1], pool.device[0][-1]) or failed == len(ended)


def test_what_it_said_before_it_died_counts(pool: Memory, running: ProcessCopier) -> None:
    running.submit(save(1, [2], [3]))
    assert select.select([running], [], [], PATIENCE_S)[0]
    kill(running)
    assert verdicts(ends(running, 1)) == [(1, True)]
    assert np.array_equal(pool.host[0][3], pool.device[0][2])
    while running.deaths == 0:
        assert next_ends(running) == []


def test_one_that_dies_again_and_again_has_to_wait(running: ProcessCopier) -> None:
    """After a second death in a row copies fail until the pause is over; nobody sleeps, whoever asks next restarts."""
    for deaths in (1, 2):
        kill(running)
        while running.deaths < deaths:
            next_ends(running)
    begin = time.monotonic()
    assert running.pid is None
    tried = 0
    while running.pid is None:
        tried += 1
        running.submit(save(tried, [0], [0]))
        if running.pid is None:
            assert verdicts(next_ends(running)) == [(tried, False)]
    assert time.monotonic() - begin >= PAUSE_FIRST_S / 2
    assert tried > 1
    assert verdicts(ends(running, 1)) == [(tried, True)]


def test_one_that_takes_far_too_long_is_killed(pool: Memory, running: ProcessCopier) -> None:
    """By whoever watches the clock; here the clock is an argument."""
    assert running.stuck_at == math.inf
    pid = running.pid
    assert pid is not None
    stop(pid)
    running.submit(save(1, [0], [0]))
    due = running.stuck_at
    assert time.monotonic() < due < time.monotonic() + STUCK_S + 1
    running.submit(save(2, [1], [1]))
    running.kill_if_stuck(due - 0.001)
    assert running.timed_out == 0
    running.kill_if_stuck(due)
    assert running.timed_out == 1 and running.stuck_at == math.inf, "asked for once"
    assert verdicts(ends(running, 2)) == [(1, False), (2, False)]
    running.submit(save(3, [1], [1]))
    assert verdicts(ends(running, 1)) == [(3, True)]


@pytest.mark.skipif(ON_CUDA, reason="a pool that cannot be is refused when its memory is mapped")
def test_a_direction_that_fails_takes_the_process_with_it(
    memory: Callable[..., Memory], copier: Callable[..., ProcessCopier], capfd: pytest.CaptureFixture[str]
) -> None:
    """A bug, by a pool that cannot be. Half a copier would let copies wait for ever."""
    running = copier({"broken": memory((2, 2), ranks=(2, 1)), "default": memory((2, 2))})
    running.submit(load(1, [0], [0], "broken"))
    assert verdicts(ends(running, 1)) == [(1, False)]
    assert running.deaths == 1
    assert "ValueError" in capfd.readouterr().err
    running.submit(load(2, [0], [0]))
    assert verdicts(ends(running, 1)) == [(2, True)]


# -- the process ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_CUDA, reason="the driver has threads and files of its own")
def test_it_has_only_what_it_needs(pool: Memory, running: ProcessCopier) -> None:
    """No descriptor but its lanes and mappings, no torch, no zmq; behind the daemon when both want a CPU; deaf to what
    drains it."""
    stranger = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(stranger, True)
    try:
        kill(running)
        while running.deaths == 0:
            next_ends(running)
    finally:
        os.close(stranger)
    running.submit(save(1, [0], [0]))
    ends(running, 1)
    pid = running.pid
    assert pid is not None
    held = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    assert sum(what.startswith("socket:") for what in held) == 2
    assert sum("memfd" in what for what in held) == 2 * RANKS, "one a mapping"
    assert held.count("/dev/null") <= 3
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps and "zmq" not in maps
    threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    niceness = sorted(os.getpriority(os.PRIO_PROCESS, thread) for thread in threads)
    assert niceness == [NICENESS] * 2, "no other threads"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    running.submit(save(2, [1], [1]))
    assert verdicts(ends(running, 1)) == [(2, True)]
    assert os.getpgid(pid) != os.getpgid(0)
    assert os.getsid(pid) == os.getsid(0)


def test_close_leaves_nothing(pool: Memory) -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    copier = ProcessCopier({"default": pool.tiers})
    pid = copier.pid
    assert pid is not None
    stop(pid)  # nor does one that stands still keep it
    for n in range(1000):
        copier.submit(save(n, [0] * 100, [0] * 100))
    copier.close()
    assert not Path(f"/proc/{pid}").exists()
    assert set(os.listdir("/proc/self/fd")) <= before
    fcntl.fcntl(pool.fds[0], fcntl.F_GETFD)  # what it was given is still the caller's


def test_it_holds_the_lock_as_long_as_it_lives(pool: Memory) -> None:
    lock = arena.lock(pool.fds[-1])
    with contextlib.closing(ProcessCopier({"default": pool.tiers}, [lock])):
        os.close(lock)
        with pytest.raises(arena.MemoryInUse):
            arena.lock(pool.fds[-1])
    os.close(arena.lock(pool.fds[-1]))


PARENT = """
import os, select, sys
from radixkv.commands import Copy
from radixkv.device import arena
from radixkv.device.copier import ProcessCopier
from radixkv.device.copier_process import PoolTiers
device, host, page_bytes, pages = map(int, sys.argv[1:5])
copier = ProcessCopier({"default": PoolTiers(page_bytes, [device], [host], sys.argv[5:], pages)}, [arena.lock(host)])
ids = b"".join(n.to_bytes(4, "little") for n in range(pages))
for n in range(20_000):  # a minute's work
    copier.submit(Copy(n, "default", ids, ids, True))
assert select.select([copier], [], [], 30)[0]
print(copier.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["at work", "stopped"])
def test_the_sudden_death_of_the_daemon_is_its_own(memory: Callable[..., Memory], stopped: bool) -> None:
    """In the middle of copying, even if it stands still there. The next daemon gets the lock when it is gone."""
    pool = memory((512, 512), 2**16)
    command = [sys.executable, "-c", PARENT, *map(str, (*pool.fds, pool.page_bytes, 512)), *pool.tiers.uuids]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pool.fds, env=os.environ
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        parent.wait()
        os.close(arena.lock(pool.fds[1], patience_s=PATIENCE_S))
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        os.close(pidfd)
