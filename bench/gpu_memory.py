"""``python -m bench.gpu_memory``: CUDA memory as pools use it, checked and timed on a device in about a minute.

Needs cuda-bindings and numpy; with torch and Triton the process that is killed is inside a kernel, else inside a stream
of copies. One JSON object with ``--json``; docs/cuda.md says what the rows are for. ``bench.gpu`` takes them along.
Over the fake driver (tests/cuda) all of it runs as well, and times nothing that is.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from bench.rows import Row, as_text, single, wants_json
from radixkv.device import arena, cuda_arena, cuda_driver
from radixkv.device.cuda_arena import Range
from radixkv.device.cuda_copying import CudaTiers
from radixkv.device.cuda_driver import CudaUnavailable, Device
from radixkv.device.cuda_stream import Stream
from radixkv.device.quiescence import processes_on

Bytes = NDArray[np.uint8]
PAGE_BYTES = (737_280, 4 * 2**20)
"""SmolLM2's page in float32 with 16 tokens; a page of a larger model."""
WINDOW_BYTES = 512 * 2**20
"""Copied at a time when copies are timed."""
ROUNDS = 5
OFFLOAD_BAR = 0.9
QUIET_S = 0.5
"""The last write is the last one when so long nothing has changed."""
LIMIT_S = 30.0


def checks(device: Device) -> dict[str, str]:
    """ "ok", or what is wrong."""
    found = {}
    for check in (made_without_a_context, kept_by_the_descriptor, mapped_where_it_was, copied_both_ways):
        try:
            check(device)
        except (AssertionError, cuda_driver.CudaError, subprocess.CalledProcessError) as error:
            found[check.__name__] = f"{type(error).__name__}: {error}"
        else:
            found[check.__name__] = "ok"
    return found


# -- what must hold -------------------------------------------------------------------------------------------------


def made_without_a_context(device: Device) -> None:
    """The daemon's part, in a process that does nothing else: the driver must show no context of it."""
    with Child("make", device.uuid) as child:
        fd = child.receive()
        assert child.process.pid not in processes_on([device.uuid]), "who only made memory has a context"
        os.close(fd)


def kept_by_the_descriptor(device: Device) -> None:
    """Who made it has ended; two mappings of the descriptor see the same bytes."""
    with Child("make", device.uuid) as child:
        fd = child.receive()
    first, second = _mapped(device, fd), _mapped(device, fd)
    content = np.random.default_rng(0).integers(0, 255, first.size, np.uint8)
    _put(first, content)
    assert np.array_equal(_get(second, second.size), content), "not what was written through the other mapping"
    os.close(fd)


def mapped_where_it_was(device: Device) -> None:
    """Other memory at the same addresses, for views and captured graphs."""
    fds = [cuda_arena.create(device, cuda_arena.whole_bytes(device, 1)) for _ in range(2)]
    addresses = _mapped(device, fds[0])
    at = addresses.pointer
    _put(addresses, np.full(64, 7, np.uint8))
    addresses.map(fds[1])
    _put(addresses, np.full(64, 8, np.uint8))
    addresses.map(fds[0])
    assert addresses.pointer == at and _get(addresses, 64).tolist() == [7] * 64
    for fd in fds:
        os.close(fd)


def copied_both_ways(device: Device) -> None:
    with Copies(device, 2**16 + 256, 64) as copies:
        content = np.random.default_rng(0).integers(0, 255, (64, copies.page_bytes), np.uint8)
        _put(copies.addresses, content.ravel())
        there = np.random.default_rng(1).permutation(64).astype("<i4").tobytes()
        same = np.arange(64, dtype="<i4").tobytes()
        assert copies.tiers.copy(there, same, to_host=True), "saving failed"
        assert copies.tiers.copy(same, same, to_host=False), "loading failed"
        found = _get(copies.addresses, content.nbytes).reshape(content.shape)
        assert np.array_equal(found, content[np.frombuffer(there, "<i4")]), "other bytes came back"


# -- what is timed ----------------------------------------------------------------------------------------------------


def rows(device: Device) -> Iterator[Row]:
    yield from _times_of_making(device)
    for page_bytes in PAGE_BYTES:
        yield from _copy_rows(device, page_bytes)
    yield from killed(device)


def _times_of_making(device: Device) -> Iterator[Row]:
    began = time.monotonic()
    with Child("make", device.uuid) as child:
        os.close(child.receive())
        yield single("gpu.memory.first_start", "s", time.monotonic() - began)
    size = cuda_arena.whole_bytes(device, WINDOW_BYTES)
    began = time.perf_counter()
    fd = cuda_arena.create(device, size)
    yield single("gpu.memory.create", "ms", (time.perf_counter() - began) * 1e3)
    addresses = Range(device, size)
    began = time.perf_counter()
    addresses.map(fd)
    yield single("gpu.memory.map", "ms", (time.perf_counter() - began) * 1e3)
    os.close(fd)


def _copy_rows(device: Device, page_bytes: int) -> Iterator[Row]:
    """The copier against one copy of as many pinned bytes: medians of rounds, in turns."""
    pages = min(WINDOW_BYTES, device.total_bytes // 8) // page_bytes
    with Copies(device, page_bytes, pages) as copies:
        ids = np.arange(pages, dtype="<i4")
        ids = np.concatenate([ids[::2], ids[1::2]]).tobytes()  # no two neighbours: the worst for a copier
        for to_host, name in ((True, "save"), (False, "load")):
            ratios = []
            for _ in range(ROUNDS):
                whole_s = _seconds(lambda to_host=to_host: copies.at_once(to_host))  # type: ignore[misc]
                paged_s = _seconds(lambda to_host=to_host: copies.tiers.copy(ids, ids, to_host))  # type: ignore[misc]
                ratios.append(whole_s / paged_s)
            size = f"{page_bytes / 1e6:.1f}MB"
            row = single(f"gpu.memory.{name}_ratio.{size}", "of pinned copy", float(np.median(ratios)), OFFLOAD_BAR)
            yield Row(**(row.__dict__ | {"at_least": True}))
            yield single(f"gpu.memory.{name}.{size}", "GB/s", copies.size / paged_s / 1e9)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def killed(device: Device) -> Iterator[Row]:
    """Two processes map one arena; one is killed while its kernel writes there. From the kill on: when its process and
    its connection are seen to end, when the last write is seen, when the driver shows no context of it any more."""
    size = cuda_arena.whole_bytes(device, 1)
    fd = cuda_arena.create(device, size)
    addresses = _mapped(device, fd)
    _put(addresses, np.zeros(8, np.uint8))
    with Child("write", device.uuid, fd) as child:
        word, end = _word(addresses), time.monotonic() + LIMIT_S
        while _word(addresses) == word and time.monotonic() < end:
            pass
        pidfd = os.pidfd_open(child.process.pid)
        killed = changed = time.perf_counter()
        child.process.send_signal(signal.SIGKILL)
        seen: dict[str, float] = {}
        word = _word(addresses)
        while len(seen) < 3 or time.perf_counter() - changed < QUIET_S:
            now = time.perf_counter()
            if _word(addresses) != word:
                word, changed = _word(addresses), now
            if "pidfd" not in seen and select.select([pidfd], [], [], 0)[0]:
                seen["pidfd"] = now - killed
                child.process.wait()
            if "eof" not in seen and select.select([child.ours], [], [], 0)[0]:
                seen["eof"] = now - killed
            if "driver" not in seen and child.process.pid not in processes_on([device.uuid]):
                seen["driver"] = now - killed
            if now - killed > LIMIT_S:
                break
        os.close(pidfd)
    os.close(fd)
    for what in ("pidfd", "eof", "driver"):
        yield single(f"gpu.memory.kill.{what}", "ms", seen.get(what, LIMIT_S) * 1e3)
    yield single("gpu.memory.kill.last_write", "ms", (changed - killed) * 1e3)
    yield single("gpu.memory.kill.written_words", "words", float(word))


# -- tools ------------------------------------------------------------------------------------------------------------


class Copies:
    """A copier's memory in this process: an arena of ``pages`` and a host arena as large."""

    def __init__(self, device: Device, page_bytes: int, pages: int) -> None:
        self.page_bytes, self.size = page_bytes, page_bytes * pages
        fd = cuda_arena.create(device, cuda_arena.whole_bytes(device, self.size))
        self.addresses = _mapped(device, fd, self.size)
        host_fd = arena.create("bench", self.size)
        self.tiers = CudaTiers((page_bytes, 1, page_bytes, pages), [fd], [host_fd], [device.uuid])
        (self._rank,) = self.tiers._ranks
        self._stream = Stream(device)

    def at_once(self, to_host: bool) -> None:
        """All of it in one pinned copy."""
        if to_host:
            self._stream.copy_to_host(self._rank.host_at, self._rank.device_at, self.size)
        else:
            self._stream.copy_to_device(self._rank.device_at, self._rank.host_at, self.size)
        self._stream.synchronize()

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        with cuda_driver.current(self.addresses.device):
            cuda_driver.call("cuMemHostUnregister", self._rank.host_at)


class Child:
    """Another process on the device, and a connection to it: ``make`` or ``write``, see ``child``."""

    def __init__(self, what: str, uuid: str, *fds: int) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(LIMIT_S)
        with theirs:
            command = [sys.executable, "-m", "bench.gpu_memory", what, uuid, *map(str, (theirs.fileno(), *fds))]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno(), *fds])

    def receive(self) -> int:
        """The descriptor that it sends."""
        _, (fd,), _, _ = socket.recv_fds(self.ours, 1, 1)
        return fd

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.ours.shutdown(socket.SHUT_WR)
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.ours.close()


def child(what: str, uuid: str, numbers: Sequence[int]) -> None:
    """``make``: send memory, then wait for the end. ``write``: into the arena that was given, until killed."""
    connection = socket.socket(fileno=numbers[0])
    (device,) = cuda_driver.find([uuid])
    if what == "make":
        socket.send_fds(connection, [b"m"], [cuda_arena.create(device, cuda_arena.whole_bytes(device, 1))])
        connection.recv(1)
        return
    addresses = _mapped(device, numbers[1])
    try:
        _write_by_kernel(addresses)
    except ImportError:
        _write_by_copies(addresses)


def _write_by_kernel(addresses: Range) -> None:
    """One launch that counts up in the arena's first word for minutes. Errors: ImportError without torch for CUDA."""
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch has no CUDA device")
    from bench.gpu_writer import count_up

    words = torch.as_tensor(addresses, device=f"cuda:{addresses.device.ordinal}").view(torch.int64)
    count_up(words)
    torch.cuda.synchronize()


def _write_by_copies(addresses: Range) -> None:
    stream, word, end = Stream(addresses.device), np.zeros(1, np.int64), time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        word += 1
        stream.copy_to_device(addresses.pointer, word.ctypes.data, 8)
        stream.synchronize()


def _mapped(device: Device, fd: int, size: int = 1) -> Range:
    """``size``: bytes that were asked for when it was made; a driver's descriptor does not tell."""
    addresses = Range(device, cuda_arena.whole_bytes(device, size))
    addresses.map(fd)
    return addresses


def _put(addresses: Range, content: Bytes) -> None:
    with cuda_driver.current(addresses.device):
        cuda_driver.call("cuMemcpyHtoD", addresses.pointer, content.ctypes.data, content.nbytes)
        cuda_driver.call("cuCtxSynchronize")


def _get(addresses: Range, size: int) -> Bytes:
    content = np.empty(size, np.uint8)
    with cuda_driver.current(addresses.device):
        cuda_driver.call("cuMemcpyDtoH", content.ctypes.data, addresses.pointer, size)
    return content


def _word(addresses: Range) -> int:
    return int(_get(addresses, 8).view(np.int64)[0])


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] in (["make"], ["write"]):
        child(arguments[0], arguments[1], list(map(int, arguments[2:])))
        return 0
    try:
        device = cuda_driver.find(["0"])[0]
    except CudaUnavailable as error:
        print(f"skipped: {error}", file=sys.stderr)
        return 0
    found, made = checks(device), []
    for row in rows(device):
        made.append(row)
        print(as_text(row), file=sys.stderr, flush=True)
    ok = set(found.values()) == {"ok"} and all(row.ok for row in made)
    if wants_json(arguments):
        rows_as = [json.loads(row.as_json()) for row in made]
        print(json.dumps({"device": device.name, "uuid": device.uuid, "checks": found, "rows": rows_as, "ok": ok}))
    else:
        print("\n".join(f"{name}: {what}" for name, what in found.items()))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
