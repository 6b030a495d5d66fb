"""CUDA as the daemon and the workers would find it: bindings, driver, devices, and whether these can share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from radixkv.cli import extras
from radixkv.cli.checks.check import Check, fail, ok, warn
from radixkv.config import Config
from radixkv.device import cuda_driver
from radixkv.device.cuda_driver import CudaError, CudaUnavailable, Device

GPUS = Path("/proc/driver/nvidia/gpus")


def checks(config: Config, version: Callable[[str], str | None], gpus: Path = GPUS) -> list[Check]:
    """One line for the machine, one for each device, one for each pool that is to be on some."""
    wanted = [pool.name for pool in config.pools if pool.cuda_devices]
    count = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    try:
        devices = cuda_driver.devices()
        driver = cuda_driver.call("cuDriverGetVersion")
    except (CudaUnavailable, CudaError) as error:
        return [_absent(error.message, wanted, count)]
    head = ok(
        "cuda", f"driver for CUDA {driver // 1000}.{driver % 1000 // 10}, cuda-bindings {version('cuda-bindings')}"
    )
    return [head, *map(_device, devices), *_pools(config, devices)]


def _absent(why: str, wanted: Sequence[str], count: int) -> Check:
    if wanted:
        return fail("cuda", why, f"mend that, or put pool {wanted[0]} into the machine's memory by device=cpu")
    if count:
        return warn("cuda", f"{count} GPUs found, but {why}", extras.install("cuda"))
    return ok("cuda", f"no pool needs it; {why}")


def _device(device: Device) -> Check:
    name = f"cuda:{device.ordinal}"
    detail = f"{device.name}, {device.uuid}, {device.total_bytes / 2**30:.1f} GiB"
    if device.maps_memory:
        return ok(name, f"{detail}; maps and shares memory by file descriptors")
    fix = "pools cannot be on it: use device=cpu or another device; a newer driver may help, a vGPU often cannot"
    return warn(name, f"{detail}; no virtual memory management with POSIX file descriptors", fix)


def _pools(config: Config, devices: Sequence[Device]) -> list[Check]:
    """Whether what each pool needs is there, and large enough. What others use of a device is not known here."""
    found, needed = [], dict.fromkeys((device.uuid for device in devices), 0)
    for pool in config.pools:
        try:
            for device in cuda_driver.find(pool.cuda_devices):
                needed[device.uuid] += pool.arena_bytes
        except CudaUnavailable as error:
            found.append(fail(f"pool {pool.name}", error.message, "another device=; radixkv doctor lists them"))
    for device in devices:
        if needed[device.uuid] > device.total_bytes:
            detail = f"the pools take {needed[device.uuid] / 2**30:.1f} GiB of it"
            found.append(fail(f"cuda:{device.ordinal} memory", detail, "give them fewer pages: device_bytes="))
    return found
