"""What radixkv needs of the kernel, each tried out for real on something small."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

from radixkv.cli.checks.check import Check, fail, ok, warn

SO_PEERPIDFD = 77
"""Linux 6.5; not in Python's socket module yet."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def checks() -> list[Check]:
    return [sealed_memory(), pidfd(), peer_pidfd(), no_inheritance()]


def sealed_memory() -> Check:
    """memfd_create, posix_fallocate and seals: a pool's memory."""
    name, fix = "sealed memory", "run on Linux 3.17 or later, in a sandbox that allows memfd_create"
    try:
        memory = os.memfd_create("radixkv-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        return fail(name, f"memfd_create does not work: {error}", fix)
    try:
        os.posix_fallocate(memory, 0, mmap.PAGESIZE)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
        if fcntl.fcntl(memory, fcntl.F_GET_SEALS) & SEALS != SEALS:
            return fail(name, "seals are taken and not kept", fix)
    except OSError as error:
        return fail(name, f"a memfd cannot be reserved and sealed: {error}", fix)
    finally:
        os.close(memory)
    return ok(name, "memfd_create, posix_fallocate and seals work")


def pidfd() -> Check:
    """pidfd_open: how the daemon sees at once that a worker has died."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        fix = "run on Linux 5.3 or later, in a sandbox that allows pidfd_open"
        return fail("pidfd", f"pidfd_open does not work: {error}", fix)
    return ok("pidfd", "pidfd_open works")


def peer_pidfd() -> Check:
    """SO_PEERPIDFD: the same, race-free and across pid namespaces."""
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        try:
            raw = here.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
        except OSError as error:
            detail = f"SO_PEERPIDFD does not work ({error.strerror}); pidfd_open of the peer's pid is used"
            return warn("peer pidfd", detail, "Linux 6.5 or later, for workers in containers of their own")
    os.close(int.from_bytes(raw, "little"))
    return ok("peer pidfd", "SO_PEERPIDFD works, also for workers in other pid namespaces")


def no_inheritance() -> Check:
    """MADV_DONTFORK: a forked child of a worker does not inherit the mapping."""
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as area:
            area.madvise(mmap.MADV_DONTFORK)
    except (OSError, AttributeError) as error:
        detail = f"MADV_DONTFORK does not work: {error}"
        return warn("fork", detail, "do not fork in a worker while it is connected")
    return ok("fork", "MADV_DONTFORK works")
