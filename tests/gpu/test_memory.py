"""CUDA memory on a device: the checks of ``bench.gpu_memory``, which also times. Over a fake driver: tests/cuda."""

import os

import pytest

from bench import gpu_memory
from radixkv.device import cuda_driver


@pytest.fixture
def device() -> cuda_driver.Device:
    try:
        return cuda_driver.find(["0"])[0]
    except cuda_driver.CudaUnavailable as error:
        pytest.skip(str(error))


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("FAKE_CUDA_CONTROL" in os.environ, reason="the driver is a fake one"),
]


def test_memory_on_the_device(device: cuda_driver.Device) -> None:
    assert set(gpu_memory.checks(device).values()) == {"ok"}


def test_what_is_seen_of_a_process_that_is_killed_in_a_writing_kernel(device: cuda_driver.Device) -> None:
    seen = {row.name.rpartition(".")[2]: row.value for row in gpu_memory.killed(device)}
    assert seen["last_write"] <= max(seen["pidfd"], seen["eof"], seen["driver"]), seen
