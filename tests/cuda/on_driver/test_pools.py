"""Pools on CUDA devices, whole: daemon, copier, workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import radixkv
from radixkv.client.cuda_mapping import CudaPoolMemory
from radixkv.config import QUANTIZED
from radixkv.device import cuda_driver
from radixkv.device.cuda_stream import Stream
from radixkv.kernels.layout import arena_view
from tests.cuda import on_fake
from tests.cuda.suites import Word
from tests.integration.tiered import NAMESPACE, answer, check, document, write

ILLEGAL_ADDRESS = 700


def cached(pool: Any, number: int) -> int:
    return int(pool.lookup(document(number, 16), namespace=NAMESPACE).device_tokens)


# -- who has a context ----------------------------------------------------------------------------------------------


def test_the_daemon_makes_no_context_and_imports_no_torch(daemon_factory: Any, connect: Any, control: Any) -> None:
    daemon = daemon_factory(pools=[{"pages": 16, "host_pages": 16, "ranks": 1}])
    pool = connect(daemon).pool()
    for number in range(3):
        answer(pool, document(number, 32))
    assert pool.client.stats().counters["saved_pages"] > 0
    holders = control.holders()
    assert os.getpid() in holders and daemon.pid not in holders
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "libcuda" in maps and "torch" not in maps
    assert not [line for line in maps.splitlines() if "fake-cuda-memory" in line], "nor does it map the arena"


def test_a_pool_says_where_it_is(daemon_factory: Any, connect: Any) -> None:
    one, other = cuda_driver.devices()[:2]
    daemon = daemon_factory(
        pools=[{"name": "second", "device": f"cuda:{other.uuid}"}, {"name": "plain", "device": "cpu"}, {"name": "any"}]
    )
    client = connect(daemon)
    assert client.pool("second").memory.range.device == other
    assert client.pool("any").memory.range.device == one
    assert not isinstance(client.pool("plain").memory, CudaPoolMemory)


def test_two_workers_share_pages_of_a_device(daemon_factory: Any, connect: Any) -> None:
    daemon = daemon_factory()
    first, second = (connect(daemon).pool() for _ in range(2))
    assert first.memory.range.pointer != second.memory.range.pointer
    with first.reserve(document(1, 16), namespace=NAMESPACE) as seq:
        write(seq)
    with second.reserve(document(1, 20), namespace=NAMESPACE) as seq:
        assert seq.cached_tokens == 16
        check(seq)


def test_rows_are_left_to_the_caller(daemon_factory: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library does it; elsewhere in these tests ``on_fake`` stands for a worker that copies at once."""
    monkeypatch.setattr(CudaPoolMemory, "copy_rows", on_fake.left_to_the_caller)
    monkeypatch.setattr(CudaPoolMemory, "copy", on_fake.copied_by_torch)
    pool = connect(daemon_factory()).pool()
    answer(pool, document(1, 16))
    with pool.reserve(document(1, 16), namespace=NAMESPACE) as seq:
        assert seq.cached_tokens == 15
        ((source, target, rows),) = seq.copy_rows
        assert rows == 3 and target == seq.page_table[-1] and source != target
        pool.copy_rows(seq.copy_rows)
        check(seq)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_rows_of_quantized_pages_are_copied_with_their_scales(
    daemon_factory: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(CudaPoolMemory, "copy_rows", on_fake.left_to_the_caller)
    monkeypatch.setattr(CudaPoolMemory, "copy", on_fake.copied_by_torch)
    pool = connect(daemon_factory(pools=[{"dtype": dtype}])).pool()
    content = arena_view(on_fake.bytes_of(pool.memory), pool.layout, pool.memory.pages)
    content.copy_(torch.arange(content.numel()).view(content.shape) % 251)
    source, target = content[0].clone(), content[1].clone()
    pool.copy_rows([(0, 1, 3)])
    assert torch.equal(content[1][:, :, :3], source[:, :, :3])
    assert torch.equal(content[1][:, :, 3:], target[:, :, 3:]) and torch.equal(content[0], source)
    assert not torch.equal(source[:, :, :3], target[:, :, :3])


@pytest.mark.parametrize(
    ("device", "code", "said"),
    [("cuda:9", 2, "there is no CUDA device 9"), ("cuda:0", 4, "bytes are needed on Fake device 0")],
)
def test_a_start_that_cannot_be_says_why(control: Any, tmp_path: Path, device: str, code: int, said: str) -> None:
    command = [sys.executable, "-m", "radixkv", "serve", "--endpoint", f"ipc://{tmp_path}/sock", "--pool"]
    pool = f"layers=1,kv_heads=1,head_dim=8,page_size=4,device={device},device_bytes=2GiB"
    tmp_path.chmod(0o700)
    ran = subprocess.run([*command, pool], capture_output=True, text=True, timeout=60)
    assert ran.returncode == code and said in ran.stderr and ran.stdout == ""


# -- fences -----------------------------------------------------------------------------------------------------------


def test_a_commit_goes_out_when_its_event_is_done(daemon_factory: Any, connect: Any, control: Any) -> None:
    pool = connect(daemon_factory()).pool()
    stream = Stream(pool.memory.range.device)
    seq = pool.reserve(document(1, 16), namespace=NAMESPACE)
    control[Word.HOLD] = 1
    stream.copy_to_device(pool.memory.range.pointer, pool.memory.range.pointer, 8)
    seq.commit(16, after=stream.record())
    assert cached(pool, 1) == 0
    control[Word.HOLD] = 0
    pool.flush(30.0)
    assert cached(pool, 1) == 16
    seq.free()


WORKER = """
import sys
from pathlib import Path
import radixkv
from radixkv.device.cuda_stream import Stream
from radixkv.kernels.layout import arena_view
from tests.cuda.suites import Control, Word
client, control = radixkv.connect(sys.argv[1], timeout=30.0), Control(Path(sys.argv[2]))
pool = client.pool()
seq = pool.reserve([1000 + n for n in range(16)], namespace=radixkv.Namespace("tiered"))
control[Word.HOLD] = 1
stream = Stream(pool.memory.range.device)
stream.copy_to_device(pool.memory.range.pointer, pool.memory.range.pointer, 8)
event = stream.record()
print("reserved", flush=True)
sys.stdin.readline()
control[Word.FAIL_IN], control[Word.FAIL_CODE], control[Word.HOLD] = 1, 700, 0
try:
    seq.commit(16, after=event)
    pool.flush(10.0)
    print("committed", flush=True)
except radixkv.RadixKVError as error:
    print(type(error).__name__, error, flush=True)
sys.stdin.readline()
"""
"""Has something running on the device, which then fails."""


def start_worker(daemon: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, daemon.endpoint, os.environ["FAKE_CUDA_CONTROL"]]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline() == "reserved\n"
    return worker


def test_a_workers_dead_context_publishes_nothing_and_ends_nobody_else(
    daemon_factory: Any, connect: Any, control: Any
) -> None:
    daemon = daemon_factory()
    pool = connect(daemon).pool()
    answer(pool, document(2, 16))
    with start_worker(daemon) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        print(file=worker.stdin, flush=True)
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in worker.stdout.readline()
        assert cached(pool, 1) == 0 and cached(pool, 2) == 16
        worker.kill()
    assert answer(pool, document(2, 16)) == 15


# -- after the death of a worker, of a daemon, of a context ---------------------------------------------------------


@pytest.mark.parametrize("paused", [False, True], ids=["as they come", "at once"])
def test_pages_of_the_dead_wait_for_the_drivers_word(
    daemon_factory: Any, connect: Any, control: Any, wait_until: Any, paused: bool
) -> None:
    """The daemon sees the ends of process and connection one by one, or both at once when it goes on."""
    daemon = daemon_factory()
    client = connect(daemon)
    pool = client.pool()
    with start_worker(daemon) as worker:
        control[Word.LINGER] = worker.pid
        if paused:
            daemon.pause()
        worker.send_signal(signal.SIGKILL)
    if paused:
        daemon.resume()
    states = lambda: client.stats().pools["default"].pages  # noqa: E731
    wait_until(lambda: states()["private"] == 0, what="the end of the session", timeout=60.0)
    wait_until(lambda: client.stats().sessions == 1, what="the end of the process", timeout=60.0)
    for _ in range(3):
        assert states()["quarantined"] == 4
    control[Word.LINGER] = 0
    wait_until(lambda: states()["free"] == 16, what="the driver's word", timeout=60.0)
    assert client.stats().counters["unquiet_sessions"] == 0
    assert answer(pool, document(3, 64)) == 0


def test_a_cold_daemons_memory_comes_to_the_same_addresses(daemon_factory: Any, connect: Any) -> None:
    """Views and captured graphs of a worker stay good; what it had is told not to be."""
    daemon = daemon_factory()
    pool = connect(daemon).pool()
    at, view = pool.memory.range.pointer, pool.keys(0)
    seq = pool.reserve(document(1, 16), namespace=NAMESPACE)
    write(seq)
    daemon.kill()
    daemon_factory(endpoint=daemon.endpoint)
    assert answer(pool, document(1, 16), timeout=20.0) == 0
    assert not seq.valid()
    assert pool.memory.range.pointer == at and pool.keys(0).data_ptr() == view.data_ptr() == at
    with pool.reserve(document(1, 16), namespace=NAMESPACE, last_page="keep") as again:
        assert again.cached_tokens == 15
        check(again)


def test_a_warm_start_needs_no_driver(daemon_factory: Any, connect: Any, control: Any) -> None:
    daemon = daemon_factory(supervised=True, pools=[{"pages": 16, "host_pages": 16}])
    pool = connect(daemon).pool()
    for number in range(3):
        answer(pool, document(number, 24))
    made = control[Word.ALLOCATIONS]
    daemon.kill_daemon()
    daemon.wait_ready()
    for number in range(3):
        assert answer(pool, document(number, 24), timeout=20.0) == 23, "from either tier, to the byte"
    assert control[Word.ALLOCATIONS] == made
    assert connect(daemon).pool().memory.range.device == pool.memory.range.device


def test_a_context_that_dies_ends_its_pools_cache_and_nothing_else(
    daemon_factory: Any, connect: Any, control: Any, wait_until: Any
) -> None:
    """Whose session ends goes on in another one, with the same memory at the same addresses."""
    tiers = {"pages": 16, "host_pages": 32}
    daemon = daemon_factory(pools=[{"name": "gpu", **tiers}, {"name": "plain", "device": "cpu"}])
    client, bystander = connect(daemon), connect(daemon)
    pool, plain = client.pool("gpu"), bystander.pool("plain")
    at, safe = pool.memory.range, plain.reserve(document(7, 16), namespace=NAMESPACE)
    write(safe)
    held = pool.reserve(document(8, 16), namespace=NAMESPACE)
    write(held)
    for number in range(2):
        answer(pool, document(number, 24))
    control[Word.FAIL_IN], control[Word.FAIL_CODE] = 1, ILLEGAL_ADDRESS
    with pytest.raises(radixkv.SessionLost):
        for number in range(2, 40):  # pages leave the device: copies
            answer(pool, document(number, 24), timeout=20.0)
    lost = lambda: bystander.stats().counters["lost_pools"]  # noqa: E731
    wait_until(lambda: lost() == 1, what="the end of the pool's cache", timeout=60.0)
    assert [cached(pool, number) for number in (0, 1, 8)] == [0, 0, 0]
    with pytest.raises(radixkv.SessionLost):
        held.extend([1])
    assert not held.valid()
    assert safe.valid() and cached(plain, 7) == 16
    safe.free()
    gpu = lambda: bystander.stats().pools["gpu"]  # noqa: E731
    wait_until(lambda: gpu().pages["cached"] == gpu().host_pages["cached"] == 0, what="all pages", timeout=60.0)
    assert answer(pool, document(1, 24), timeout=20.0) == 0, "a cold pool, and a new copier with it"
    assert answer(pool, document(1, 24)) == 23
    assert pool.memory.range is at
    assert bystander.stats().counters["copier_deaths"] == 1 and daemon.process.poll() is None
