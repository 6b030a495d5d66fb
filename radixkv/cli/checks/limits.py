"""Limits that the shell or the service manager sets: open files, locked memory, file size."""

from __future__ import annotations

import resource

from radixkv.cli import sizes
from radixkv.cli.checks.check import Check, fail, ok, warn
from radixkv.config import Config
from radixkv.device.pool_memory import geometry_of

FILES_OF_A_SESSION = 4
"""An attach connection, a pidfd, a socket for verbs and one for heartbeats."""

FILES_OF_THE_DAEMON = 64

UNLIMITED = resource.RLIM_INFINITY


def checks(config: Config) -> list[Check]:
    """Each limit of this process against what ``config`` will need."""
    return [
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE), config.limits.sessions),
        file_size(resource.getrlimit(resource.RLIMIT_FSIZE)[0], largest_file(config)),
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
    ]


def open_files(limit: tuple[int, int], sessions: int) -> Check:
    """``limit``: soft and hard number of open files; the daemon raises its soft limit to the hard one."""
    soft, hard = limit
    needed = FILES_OF_THE_DAEMON + FILES_OF_A_SESSION * sessions
    detail = f"{_count(hard)} may be open (soft limit {_count(soft)}, which serve raises); "
    fix = f"LimitNOFILE={needed} in a systemd unit, or ulimit -Hn as root, or lower limits.sessions"
    if hard != UNLIMITED and hard < FILES_OF_THE_DAEMON:
        return fail("open files", f"{detail}the daemon alone needs {FILES_OF_THE_DAEMON}", fix)
    if hard != UNLIMITED and hard < needed:
        fit = (hard - FILES_OF_THE_DAEMON) // FILES_OF_A_SESSION
        return warn("open files", f"{detail}{sessions:,} sessions need {needed:,}, {fit:,} can be served", fix)
    return ok("open files", f"{detail}{sessions:,} sessions need {needed:,}")


def file_size(soft: int, largest_bytes: int) -> Check:
    """The limit on file sizes holds for shared memory as well."""
    if soft != UNLIMITED and soft < largest_bytes:
        detail = f"limited to {sizes.show(soft)}, the largest piece of the pools takes {sizes.show(largest_bytes)}"
        return fail("file size", detail, "ulimit -f unlimited (LimitFSIZE=infinity in a systemd unit)")
    return ok("file size", "no limit" if soft == UNLIMITED else f"limited to {sizes.show(soft)}, which is enough")


def locked_memory(soft: int) -> Check:
    """Pools of CPU memory are not locked; NVIDIA's driver does not count what it pins against this."""
    shown = "no limit" if soft == UNLIMITED else sizes.show(soft)
    return ok("locked memory", f"{shown}; pools of CPU memory lock none")


def largest_file(config: Config) -> int:
    """Bytes of the largest arena or descriptor table."""
    return max(
        size
        for pool in config.pools
        for size in (
            pool.host_arena_bytes,
            0 if pool.cuda_devices else pool.arena_bytes,
            geometry_of(pool, "", config.limits.sessions).table_bytes,
        )
    )


def _count(limit: int) -> str:
    return "any number" if limit == UNLIMITED else f"{limit:,}"
