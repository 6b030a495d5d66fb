"""Device memory as processes share it: by a descriptor, mapped where it stays, without a context of the maker's."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from radixkv.device import cuda_arena, cuda_driver
from radixkv.device.arena import MemoryTooSmall
from radixkv.device.cuda_arena import Range
from radixkv.device.cuda_driver import CudaError, CudaUnavailable
from radixkv.device.cuda_stream import Stream
from tests.cuda.suites import Word

ODD = 5_000_000


@pytest.fixture
def device() -> Any:
    return cuda_driver.devices()[0]


def put(addresses: Range, content: np.ndarray) -> None:
    with cuda_driver.current(addresses.device):
        cuda_driver.call("cuMemcpyHtoD", addresses.pointer, content.ctypes.data, content.nbytes)
        cuda_driver.call("cuCtxSynchronize")


def get(addresses: Range, size: int) -> np.ndarray:
    content = np.empty(size, np.uint8)
    with cuda_driver.current(addresses.device):
        cuda_driver.call("cuMemcpyDtoH", content.ctypes.data, addresses.pointer, size)
    return content


def in_a_process(code: str, *arguments: object, fds: tuple[int, ...] = ()) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, pass_fds=fds, capture_output=True, text=True, check=True).stdout


def test_a_device_is_found_by_number_and_by_uuid(device: Any) -> None:
    assert device.uuid.startswith("GPU-") and len(device.uuid) == 40
    assert cuda_driver.find(["0", device.uuid]) == (device, device)
    for unknown in ("77", "GPU-00000000"):
        with pytest.raises(CudaUnavailable, match=rf"no CUDA device {unknown}; there are: 0 \({device.uuid}\)"):
            cuda_driver.find([unknown])


def test_a_device_that_cannot_share_memory_is_refused(control: Any) -> None:
    for lacking in ("vmm", "fd"):
        command = [sys.executable, "-c", "from radixkv.device import cuda_driver; cuda_driver.find(['0'])"]
        without = os.environ | {"FAKE_CUDA_WITHOUT": lacking}
        ran = subprocess.run(command, env=without, capture_output=True, text=True)
        assert ran.returncode == 1 and "POSIX file descriptors" in ran.stderr and "use device=cpu" in ran.stderr


def test_memory_is_made_without_a_context(control: Any) -> None:
    """In a process that has made none, which is what the daemon is."""
    before = control[Word.CONTEXTS]
    code = """
from radixkv.device import cuda_arena, cuda_driver
device = cuda_driver.find(["1"])[0]
size = cuda_arena.whole_bytes(device, 5_000_000)
print(size, cuda_arena.create(device, size) > 2, int(cuda_driver.call("cuCtxGetCurrent")))
"""
    assert in_a_process(code) == "6291456 True 0\n"
    assert control[Word.CONTEXTS] == before


def test_what_does_not_fit_is_memory_too_small(control: Any, device: Any) -> None:
    control[Word.MEMORY_MIB] = 4
    with pytest.raises(MemoryTooSmall) as caught:
        cuda_arena.create(device, cuda_arena.whole_bytes(device, 6 << 20))
    assert caught.value.needed_bytes == 6 << 20 and device.uuid in str(caught.value)


def test_two_processes_see_the_same_bytes(device: Any) -> None:
    size = cuda_arena.whole_bytes(device, ODD)
    fd = cuda_arena.create(device, size)
    addresses = Range(device, size)
    addresses.map(fd)
    put(addresses, np.arange(100, dtype=np.uint8))
    code = """
import sys, numpy as np
from radixkv.device import cuda_driver
from radixkv.device.cuda_arena import Range
fd, size, uuid = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
addresses = Range(cuda_driver.find([uuid])[0], size)
addresses.map(fd)
content = np.empty(100, np.uint8)
with cuda_driver.current(addresses.device):
    cuda_driver.call("cuMemcpyDtoH", content.ctypes.data, addresses.pointer, 100)
    print(content.sum())
    content += 1
    cuda_driver.call("cuMemcpyHtoD", addresses.pointer, content.ctypes.data, 100)
    cuda_driver.call("cuCtxSynchronize")
"""
    assert int(in_a_process(code, fd, size, device.uuid, fds=(fd,))) == sum(range(100))
    assert get(addresses, 100).tolist() == list(range(1, 101))
    os.close(fd)


def test_the_descriptor_alone_keeps_the_memory(device: Any) -> None:
    """Its maker has ended: what a warm start rests on."""
    ours, theirs = socket.socketpair()
    code = """
import socket, sys
from radixkv.device import cuda_arena, cuda_driver
device = cuda_driver.devices()[0]
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"x"], [cuda_arena.create(device, int(sys.argv[2]))])
"""
    size = cuda_arena.whole_bytes(device, ODD)
    with ours, theirs:
        in_a_process(code, theirs.fileno(), size, fds=(theirs.fileno(),))
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    content = np.random.default_rng(1).integers(0, 255, size, np.uint8)
    first, second = Range(device, size), Range(device, size)
    first.map(fd)
    put(first, content)
    second.map(fd)
    assert np.array_equal(get(second, size), content)
    os.close(fd)


def test_other_memory_comes_to_the_same_addresses(device: Any, control: Any) -> None:
    size = cuda_arena.whole_bytes(device, ODD)
    old, new = cuda_arena.create(device, size), cuda_arena.create(device, size)
    addresses = Range(device, size)
    at, mapped = addresses.pointer, control[Word.MAPPED]
    addresses.map(old)
    put(addresses, np.full(10, 7, np.uint8))
    assert addresses.__cuda_array_interface__["data"] == (at, False)
    addresses.map(new)
    assert addresses.pointer == at and get(addresses, 10).tolist() == [0] * 10
    assert control[Word.MAPPED] == mapped + 1, "the old is not mapped any more"
    addresses.map(old)
    assert get(addresses, 10).tolist() == [7] * 10, "a descriptor outlives its mappings"
    del addresses
    gc.collect()
    assert control[Word.MAPPED] == mapped
    os.close(old)
    os.close(new)


def test_an_event_is_done_when_the_device_is(device: Any, control: Any) -> None:
    host = np.zeros(8, np.uint8)
    size = cuda_arena.whole_bytes(device, 8)
    fd = cuda_arena.create(device, size)
    addresses = Range(device, size)
    addresses.map(fd)
    put(addresses, np.full(8, 3, np.uint8))
    stream = Stream(device)
    control[Word.HOLD] = 1
    stream.copy_to_host(host.ctypes.data, addresses.pointer, 8)
    event = stream.record()
    assert not event.query() and host.sum() == 0
    control[Word.HOLD] = 0
    event.synchronize()
    assert event.query() and host.sum() == 24
    os.close(fd)


def test_an_error_that_kills_the_context_is_told_by_every_call_from_then_on(control: Any) -> None:
    """In a process of its own: there is no way back."""
    control[Word.FAIL_IN], control[Word.FAIL_CODE] = 1, 700
    code = """
import numpy as np
from radixkv.device import cuda_arena, cuda_driver
from radixkv.device.cuda_stream import Stream
device = cuda_driver.devices()[0]
size = cuda_arena.whole_bytes(device, 8)
fd = cuda_arena.create(device, size)
addresses = cuda_arena.Range(device, size)
addresses.map(fd)
host = np.zeros(8, np.uint8)
stream = Stream(device)
stream.copy_to_host(host.ctypes.data, addresses.pointer, 8)
for call in (stream.synchronize, stream.record, lambda: stream.copy_to_device(addresses.pointer, host.ctypes.data, 8)):
    try:
        call()
    except cuda_driver.CudaError as error:
        print(error.result, error.kills_context)
"""
    assert in_a_process(code) == "CUDA_ERROR_ILLEGAL_ADDRESS True\n" * 3


def test_other_errors_do_not(device: Any) -> None:
    with pytest.raises(CudaError) as caught:
        cuda_driver.call("cuMemAddressReserve", 12345, 0, 0, 0)
    assert (caught.value.result, caught.value.kills_context) == ("CUDA_ERROR_INVALID_VALUE", False)
    assert Stream(device).record() is not None
