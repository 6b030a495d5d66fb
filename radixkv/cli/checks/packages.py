"""Python packages by their metadata: importing torch to ask its version takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from radixkv.cli import extras
from radixkv.cli.checks.check import Check, fail, ok, warn

NEEDED = ("msgspec", "pyzmq", "xxhash", "numpy", "cyclopts", "structlog", "rich")
OPTIONAL = {
    "torch": ("workers cannot map pages as tensors", "torch"),
    "triton": ("attention runs in plain torch", "kernels"),
    "transformers": ("`radixkv demo` and the Transformers adapter cannot run", "transformers"),
}


def checks() -> list[Check]:
    return [needed(version_of), libzmq(), *(optional(name, version_of) for name in OPTIONAL)]


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
