"""Shared memory without names: sealed memfds, reserved in full before anyone uses them.

The daemon makes the memory and hands its descriptors out; it never maps an arena itself. A worker maps what it was
given. Why so: ``ftruncate`` alone reserves nothing, and the first write to a page that the machine does not have kills
an innocent process by SIGBUS; a name in /dev/shm outlives its owner. The seals keep anybody from shrinking or growing
the file under the others' mappings.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import time
from pathlib import Path
from typing import ClassVar

from radixkv.errors import RadixKVError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SPARE_BYTES = 64 * 2**20
"""What must stay free beside the arenas, for the daemon itself."""

_LOCK_AGAIN_S = 0.005
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class MemoryTooSmall(RadixKVError):
    """The machine cannot give the memory that the pools need. Ends ``serve`` with exit 4, never crosses the wire.

    Attributes: needed_bytes, available_bytes.
    """

    code: ClassVar[str] = "memory"
    needed_bytes: int
    available_bytes: int


class MemoryInUse(RadixKVError):
    """Another daemon writes to the memory that this one found. Ends ``serve`` with exit 3, never crosses the wire."""

    code: ClassVar[str] = "memory_in_use"


def create(name: str, size: int) -> int:
    """A sealed memfd of ``size`` bytes, all of them reserved; ``name`` is only a label in /proc.

    Errors: MemoryTooSmall.
    """
    check_memory(size)
    fd = os.memfd_create(f"radixkv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EFBIG:
            raise _over_limit(size, resource.getrlimit(resource.RLIMIT_FSIZE)[0]) from error
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise _too_small(size, available_bytes()) from error
        raise
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_memory(needed: int) -> None:
    """Refuse before allocating: the kernel would rather end some process than refuse a memfd its pages.

    Errors: MemoryTooSmall.
    """
    available = available_bytes()
    if needed > available - SPARE_BYTES:
        raise _too_small(needed, max(0, available - SPARE_BYTES))


def available_bytes() -> int:
    """Memory the machine and the control groups of this process can still give without swapping."""
    rooms = [_meminfo_available()]
    rooms += [room for room in map(_cgroup_room, _cgroup_directories()) if room is not None]
    return max(0, min(rooms))


def map_shared(fd: int, size: int) -> mmap.mmap:
    """Map an arena for reading and writing. A forked child does not inherit the mapping, a core dump leaves it out."""
    return _for_us_alone(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))


def map_readonly(fd: int, size: int) -> mmap.mmap:
    """Map a descriptor table for reading. A forked child does not inherit the mapping, a core dump leaves it out."""
    return _for_us_alone(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))


def _for_us_alone(memory: mmap.mmap) -> mmap.mmap:
    """A worker that crashes holds all that it has until its core is written: an arena in it would take minutes."""
    memory.madvise(mmap.MADV_DONTFORK)
    memory.madvise(mmap.MADV_DONTDUMP)
    return memory


def reopen_readonly(fd: int) -> int:
    """A second descriptor of the same memory through which nobody can write; the same descriptor duplicated without
    /proc (the mapping is then read-only by the reader's own choice)."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)


def lock(fd: int, patience_s: float = 0.0) -> int:
    """Make this process the only one that writes to this memory: a descriptor that holds the lock until it is closed.

    ``patience_s``: how long somebody who has it and may be about to end is waited for.

    It is the process's own, opened anew: a lock on a descriptor that others have as well would outlive us in their
    hands, and one of POSIX's would be gone as soon as any descriptor of the memory is closed here.
    Errors: MemoryInUse.
    """
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # no /proc: then the keeper, which reaps a daemon before it starts the next, has to do
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    until = time.monotonic() + patience_s
    while not _try_lock(own):
        if time.monotonic() >= until:
            os.close(own)
            raise MemoryInUse("another daemon still serves from this memory")
        time.sleep(_LOCK_AGAIN_S)
    return own


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _too_small(needed: int, available: int) -> MemoryTooSmall:
    return MemoryTooSmall(
        f"{needed} bytes of memory are needed and {available} are available: "
        "give the pools fewer pages (pages=, device_bytes=) or free memory",
        needed_bytes=needed,
        available_bytes=available,
    )


def _over_limit(needed: int, limit: int) -> MemoryTooSmall:
    """The limit on file sizes holds for shared memory as well."""
    return MemoryTooSmall(
        f"{needed} bytes of memory in one piece are needed, over the file size limit of {limit} bytes: "
        "ulimit -f unlimited in the shell that starts the daemon (LimitFSIZE=infinity in a systemd unit)",
        needed_bytes=needed,
        available_bytes=limit,
    )


def _meminfo_available() -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(errno.ENOTSUP, "no MemAvailable in /proc/meminfo")


def _cgroup_directories() -> list[Path]:
    """This process's control group and the groups above it, of version 2 and of version 1's memory controller."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            root = _CGROUP if number == "0" else _CGROUP / "memory"
            leaf = root / path.lstrip("/")
            found += [leaf, *(parent for parent in leaf.parents if parent.is_relative_to(root))]
    return found


_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and the page cache that can go, in version 2 and version 1."""


def _cgroup_room(directory: Path) -> int | None:
    """Bytes until a control group's limit; None without one."""
    for limit_file, usage_file, cache_key in _CGROUP_FILES:
        try:
            limit = (directory / limit_file).read_text().strip()
            if limit == "max":
                return None
            used = int((directory / usage_file).read_text())
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        return int(limit) - used + int(stat.get(cache_key, 0))
    return None
