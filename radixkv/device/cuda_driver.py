"""The CUDA driver, as far as radixkv needs it: loaded when first asked for, its result codes as typed errors.

``cuda-bindings`` finds libcuda by its soname. Nothing here makes a context but ``primary_context``, which the daemon
never calls: what it needs (``devices``, and creating and exporting memory) works without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from radixkv.errors import ConfigError, RadixKVError

INSTALL = "pip install -e '.[cuda]' in the checkout"
_KILL_THE_CONTEXT = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "CONTAINED", "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT",
        "CONTEXT_IS_DESTROYED", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "TENSOR_MEMORY_LEAK", "EXTERNAL_DEVICE",
        "MPS_CLIENT_TERMINATED", "UNKNOWN",
    )
)  # fmt: skip
"""After these every later call in the same context fails as well, whatever it is; only another process helps."""


class CudaUnavailable(ConfigError):
    """A CUDA pool cannot be had here: no cuda-bindings, no driver, no such device. Says what would mend it."""

    code: ClassVar[str] = "cuda_unavailable"


class CudaError(RadixKVError):
    """A call of the driver failed. Never crosses the wire.

    Attributes: call, result (the driver's name for it), kills_context.
    """

    code: ClassVar[str] = "cuda"
    call: str
    result: str
    kills_context: bool

    def __init__(self, call: str, result: str) -> None:
        super().__init__(f"{call}: {result}", call=call, result=result, kills_context=result in _KILL_THE_CONTEXT)


@dataclass(frozen=True, slots=True)
class Device:
    """``ordinal``: the driver's number for it in this process; by ``uuid`` others know it too."""

    ordinal: int
    uuid: str
    name: str
    total_bytes: int
    maps_memory: bool
    """It has virtual memory management, and gives memory out as POSIX file descriptors."""


@cache
def load() -> Any:
    """The driver's functions, initialised. Errors: CudaUnavailable."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaUnavailable(f"cuda-bindings is not installed; {INSTALL}") from error
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as error:  # what cuda-bindings raises for a library, or a function of it, that is not there
        raise CudaUnavailable(f"there is no CUDA driver (libcuda.so.1) here: {error}; install NVIDIA's") from error
    if result.value:
        raise CudaUnavailable(f"cuInit: {result.name}; nvidia-smi says what is wrong with driver or devices")
    return driver


def call(name: str, *arguments: Any) -> Any:
    """One function of the driver; what it gives beside its result code. Errors: CudaUnavailable, CudaError."""
    result, *given = getattr(load(), name)(*arguments)
    if result.value:
        raise CudaError(name, result.name)
    return given[0] if len(given) == 1 else tuple(given)


@cache
def devices() -> tuple[Device, ...]:
    """All that this process may see. Errors: CudaUnavailable, CudaError."""
    return tuple(_device(ordinal) for ordinal in range(call("cuDeviceGetCount")))


def _device(ordinal: int) -> Device:
    attribute = load().CUdevice_attribute
    needed = (
        attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    )
    device = call("cuDeviceGet", ordinal)
    return Device(
        ordinal=ordinal,
        uuid=_written(bytes(call("cuDeviceGetUuid", device).bytes)),
        name=call("cuDeviceGetName", 256, device).split(b"\0")[0].decode(),
        total_bytes=call("cuDeviceTotalMem", device),
        maps_memory=all(call("cuDeviceGetAttribute", each, device) for each in needed),
    )


def _written(uuid: bytes) -> str:
    """As nvidia-smi writes it."""
    text = uuid.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def find(names: Sequence[str]) -> tuple[Device, ...]:
    """Devices by number or UUID. Errors: CudaUnavailable: there is no such device, or it cannot share its memory."""
    return tuple(map(_find, names))


def _find(name: str) -> Device:
    known = devices()
    found = [device for device in known if name in (str(device.ordinal), device.uuid)]
    if not found:
        there = ", ".join(f"{device.ordinal} ({device.uuid})" for device in known)
        raise CudaUnavailable(f"there is no CUDA device {name}; there are: {there or 'none'}")
    if not found[0].maps_memory:
        raise CudaUnavailable(
            f"{found[0].name} ({name}) has no virtual memory management with POSIX file descriptors, by which "
            "processes share a pool; use device=cpu, or a driver and device that have it"
        )
    return found[0]


@cache
def primary_context(ordinal: int) -> Any:
    """This process's context on a device, the one that torch uses as well. Kept until the process ends."""
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))


@contextmanager
def current(device: Device) -> Iterator[None]:
    """The device's context is this thread's meanwhile."""
    before = call("cuCtxGetCurrent")
    call("cuCtxSetCurrent", primary_context(device.ordinal))
    try:
        yield
    finally:
        call("cuCtxSetCurrent", before)
