"""Python packages by their metadata (importing torch to ask its version takes seconds), and whether there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from radixkv.cli import extras
from radixkv.cli.checks.check import Check, fail, ok, warn

NEEDED = ("msgspec", "pyzmq", "xxhash", "numpy", "cyclopts", "structlog", "rich")
OPTIONAL = {
    "torch": ("workers cannot map pages as tensors", "torch"),
    "triton": ("attention runs in plain torch", "kernels"),
    "transformers": ("`radixkv demo` and the Transformers adapter cannot run", "transformers"),
}
GPUS = Path("/proc/driver/nvidia/gpus")


def checks() -> list[Check]:
    return [needed(version_of), libzmq(), *(optional(name, version_of) for name in OPTIONAL), gpu(version_of, GPUS)]


def version_of(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def needed(version: Callable[[str], str | None]) -> Check:
    found = {name: version(name) for name in NEEDED}
    missing = [name for name, number in found.items() if number is None]
    if missing:
        return fail("packages", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return ok("packages", ", ".join(f"{name} {number}" for name, number in found.items()))


def libzmq() -> Check:
    try:
        import zmq
    except ImportError as error:
        return fail("libzmq", f"pyzmq cannot be imported: {error}", "pip install --force-reinstall pyzmq")
    if not zmq.has("ipc"):
        return fail("libzmq", f"{zmq.zmq_version()} cannot do ipc://", "install a pyzmq built with ipc")
    return ok("libzmq", f"{zmq.zmq_version()} with ipc://")


def optional(name: str, version: Callable[[str], str | None]) -> Check:
    number = version(name)
    without, extra = OPTIONAL[name]
    if number is None:
        return warn(name, f"not installed: {without}", extras.install(extra))
    return ok(name, number)


def gpu(version: Callable[[str], str | None], gpus: Path) -> Check:
    """Pools are CPU memory so far, so that no GPU is nothing to mend."""
    count = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    if count == 0:
        return ok("gpu", "none found; pools are CPU memory")
    if version("cuda-bindings") is None:
        return warn("gpu", f"{count} found, cuda-bindings is not installed", extras.install("cuda"))
    return ok("gpu", f"{count} found")
