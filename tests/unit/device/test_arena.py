"""Sealed, nameless, reserved in full, or refused with the numbers."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from radixkv.device import arena

SIZE = 1 << 20


@pytest.fixture
def fd():
    fd = arena.create("test", SIZE)
    yield fd
    os.close(fd)


def test_all_of_it_is_reserved_at_once(fd: int) -> None:
    stat = os.fstat(fd)
    assert stat.st_size == SIZE
    assert stat.st_blocks * 512 >= SIZE


def test_nobody_can_resize_it_or_lift_the_seals(fd: int) -> None:
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == arena.SEALS
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_it_has_no_name_and_is_not_inherited(fd: int) -> None:
    assert not os.get_inheritable(fd)
    assert not [path for path in Path("/dev/shm").iterdir() if "radixkv" in path.name]


def test_two_mappings_see_the_same_bytes(fd: int) -> None:
    writer, reader = arena.map_shared(fd, SIZE), arena.map_readonly(fd, SIZE)
    writer[SIZE - 4 :] = b"last"
    assert reader[SIZE - 4 :] == b"last"
    with pytest.raises(TypeError):
        reader[0] = 1
    writer.close()
    reader.close()


def test_a_forked_child_has_no_mapping(fd: int) -> None:
    memory = arena.map_shared(fd, SIZE)
    start = _address(memory)
    child = os.fork()
    if child == 0:
        os._exit(0 if not _is_mapped(start) else 1)
    assert _is_mapped(start)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    memory.close()


@pytest.mark.parametrize("how", [arena.map_shared, arena.map_readonly])
def test_a_core_dump_leaves_the_memory_out(fd: int, how: Callable[[int, int], mmap.mmap]) -> None:
    memory = how(fd, SIZE)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    _, smaps = Path("/proc/self/smaps").read_text().split(f"\n{start:x}-", 1)
    flags = smaps[smaps.index("VmFlags:") :].splitlines()[0].split()
    assert {"dd", "dc", "sh"} <= set(flags), "left out of a dump, not copied by fork, shared"


def _address(memory: mmap.mmap) -> int:
    import ctypes

    view = (ctypes.c_char * 1).from_buffer(memory)
    address = ctypes.addressof(view)
    del view
    return address


def _is_mapped(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_the_readers_descriptor_cannot_write(fd: int) -> None:
    readonly = arena.reopen_readonly(fd)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(readonly, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError):
            os.write(readonly, b"x")
        arena.map_readonly(readonly, SIZE).close()
    finally:
        os.close(readonly)


def test_too_much_is_refused_with_the_numbers_and_nothing_is_left() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(arena.MemoryTooSmall) as caught:
        arena.create("test", 2**50)
    error = caught.value
    assert error.code == "memory"
    assert error.needed_bytes == 2**50
    assert 0 < error.available_bytes < 2**50
    assert str(2**50) in str(error) and "fewer pages" in str(error)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_limit_on_file_sizes_is_the_same_error_by_its_name() -> None:
    """It holds for memory as well."""
    before = os.listdir("/proc/self/fd")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, limits[1]))
    try:
        with pytest.raises(arena.MemoryTooSmall, match="file size limit") as caught:
            arena.create("test", 2 * SIZE)
        assert (caught.value.needed_bytes, caught.value.available_bytes) == (2 * SIZE, SIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(
    ("limit", "used", "cache"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_control_group_bounds_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str, cache: str
) -> None:
    group = tmp_path / "pod"
    group.mkdir()
    (group / limit).write_text("200000000\n")
    (group / used).write_text("150000000\n")
    (group / "memory.stat").write_text(f"anon 100000000\n{cache} 50000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(arena, "_cgroup_directories", lambda: [group, tmp_path, tmp_path / "none"])
    assert arena.available_bytes() == 100_000_000
    with pytest.raises(arena.MemoryTooSmall):
        arena.check_memory(100_000_000 - arena.SPARE_BYTES + 1)
    arena.check_memory(100_000_000 - arena.SPARE_BYTES)


def test_the_lock_is_one_process_alone_and_waited_for_if_asked(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held = arena.lock(fd)
    begin = time.monotonic()
    with pytest.raises(arena.MemoryInUse):
        arena.lock(fd, patience_s=0.1)
    assert time.monotonic() - begin >= 0.1
    monkeypatch.setattr(arena.time, "sleep", lambda _: os.close(held))
    os.close(arena.lock(fd, patience_s=30.0))
    os.close(arena.lock(fd))
