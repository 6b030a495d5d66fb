"""The descriptor table: one fixed record a page, in a memfd of its own beside the arenas. The truth about bytes.

::

    0          header      what table this is: magic, versions, counts, offsets, tainted; the serial given last
    4096       sessions    {id, epoch, token}                        epoch 0: nobody
    ...        namespaces  {epoch, invalidations, id, length, used, canonical}    used 0: empty
    ...        records     one a page of the device, then one a page of the host tier, a multiple of 64 bytes:
                 0  generation   u64   how often the page was handed out; a reader compares it after its work
                 8  owner        u64   session of a private or shadow page; 0: nobody or in transit
                16  stamp        u64   place in the order of eviction; a page's is the latest of its own and of
                                       those of the pages that continue it (only ends of runs are written)
                24  namespace    u32
                28  epoch        u32   of the namespace, when the page was handed out
                32  check        u64   see ``check_of``
                40  state        u64   FREE, PRIVATE, ...; always written last
                48  serial       u64   of the content: given when it is published, never given again
                56  parent's     u64   serial of the content before it, 0: none
                64  tokens       page_size * 4 bytes

A *place* is the number of a record: a page of the device has its own, a page of the host tier comes behind the last of
the device. Content keeps its serial from place to place, so a scan finds what follows what whichever tier has it, and
without any hash. Who comes before has the smaller serial.

All little-endian, words stored whole (a kill leaves the old or the new one). The daemon writes (``writer.py``), before
the reply that tells of it leaves; workers map it read-only. A daemon that starts on an existing table may trust a
record in CACHED or SHADOW whose check agrees; the state word comes last, so a record it was writing when it died is
still in its former state: free, private, or a cached page being evicted, whose check agrees no longer. Pages of the
host tier are only ever free or cached here, and are free before anything else is copied into them.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.device import arena
from radixkv.errors import VersionMismatch
from radixkv.image import NamespaceImage, SessionImage, TableImage
from radixkv.types import TOKEN_BYTES

MAGIC = b"radixkv\x00"
TABLE_VERSION = 4
HEADER_BYTES = 4096
SESSION_BYTES = 64
NAMESPACE_BYTES = 1088
CANONICAL_MAX = 1024
RECORD_ALIGN = 64

FREE, PRIVATE, CACHED, SHADOW, LOADING, SAVING, QUARANTINED = range(7)
"""Values of the state word. Part of the format: never renumbered."""
STATE_NAMES = ("free", "private", "cached", "shadow", "loading", "saving", "quarantined")

GENERATION, OWNER, STAMP, NAMESPACE, EPOCH, CHECK, STATE = 0, 8, 16, 24, 28, 32, 40
SERIAL, PARENT_SERIAL, TOKENS = 48, 56, 64
"""Offsets in a record."""

_HEADER = struct.Struct("<8sIIQQIIQIIQIIQQQQ64s256s")
TAINTED_AT = struct.calcsize("<8sIIQQIIQIIQIIQQ")
LAST_SERIAL_AT = TAINTED_AT + 8
NAMESPACE_HEAD = struct.Struct("@QIIQ")
"""Epoch and, above bit 32, invalidations: one word, changed by one store. Id, length; used, written last."""
USED = 16
SESSION = struct.Struct("@QQ16s")

WORD_MASK = 2**64 - 1
HALF_MASK = 2**32 - 1
MIX_GENERATION = 0x9E3779B97F4A7C15
MIX_NAMESPACE = 0xC2B2AE3D27D4EB4F
MIX_STATE = 0xD6E8FEB86659FD93
MIX_SERIAL = 0xBF58476D1CE4E5B9
MIX_PARENT_SERIAL = 0x94D049BB133111EB


def _aligned(size: int, to: int) -> int:
    return (size + to - 1) // to * to


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the header says: which pool's table this is and where its sections lie (bytes)."""

    pool: str
    cache_id: str
    pages: int
    page_size: int
    namespaces: int
    sessions: int
    host_pages: int = 0

    @property
    def records(self) -> int:
        """Of both tiers."""
        return self.pages + self.host_pages

    @property
    def record_bytes(self) -> int:
        return _aligned(TOKENS + self.page_size * TOKEN_BYTES, RECORD_ALIGN)

    @property
    def sessions_at(self) -> int:
        return HEADER_BYTES

    @property
    def namespaces_at(self) -> int:
        return self.sessions_at + self.sessions * SESSION_BYTES

    @property
    def records_at(self) -> int:
        return _aligned(self.namespaces_at + self.namespaces * NAMESPACE_BYTES, HEADER_BYTES)

    @property
    def table_bytes(self) -> int:
        return _aligned(self.records_at + self.records * self.record_bytes, HEADER_BYTES)

    def pack(self) -> bytes:
        return _HEADER.pack(
            MAGIC, TABLE_VERSION, HEADER_BYTES, self.table_bytes,
            self.pages, self.page_size, self.record_bytes, self.records_at,
            self.namespaces, NAMESPACE_BYTES, self.namespaces_at,
            self.sessions, SESSION_BYTES, self.sessions_at,
            self.host_pages, 0, 0, self.cache_id.encode(), self.pool.encode(),
        )  # fmt: skip

    @classmethod
    def unpack(cls, header: bytes | memoryview) -> Geometry:
        """Raises VersionMismatch for a table of another format."""
        fields = _HEADER.unpack_from(header)
        magic, version = fields[:2]
        if magic != MAGIC or version != TABLE_VERSION:
            raise VersionMismatch(f"not a descriptor table of version {TABLE_VERSION}: {magic!r}, version {version}")
        found = cls(
            pool=fields[18].rstrip(b"\0").decode(),
            cache_id=fields[17].rstrip(b"\0").decode(),
            pages=fields[4],
            page_size=fields[5],
            namespaces=fields[8],
            sessions=fields[11],
            host_pages=fields[14],
        )
        if fields[:15] != _HEADER.unpack(found.pack())[:15]:
            raise VersionMismatch("the descriptor table's sections are not where this version has them")
        return found


def record_dtype(page_size: int, record_bytes: int) -> np.dtype[Any]:
    """A whole record as a numpy structure, for scans."""
    fields = {
        "generation": ("<u8", GENERATION),
        "owner": ("<u8", OWNER),
        "stamp": ("<u8", STAMP),
        "namespace": ("<u4", NAMESPACE),
        "epoch": ("<u4", EPOCH),
        "check": ("<u8", CHECK),
        "state": ("<u8", STATE),
        "serial": ("<u8", SERIAL),
        "parent_serial": ("<u8", PARENT_SERIAL),
        "tokens": (f"({page_size},)<u4", TOKENS),
    }
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype(
        {"names": list(fields), "formats": list(formats), "offsets": list(offsets), "itemsize": record_bytes}
    )


def check_of(records: NDArray[Any]) -> NDArray[np.uint64]:
    """The check that whole records must carry: [n] uint64.

    Over generation, namespace, epoch and state; over both serials too where a page is immutable. Owner and stamp change
    by one aligned store each and are not part of it.
    """
    state = records["state"]
    scope = records["namespace"].astype(np.uint64) | records["epoch"].astype(np.uint64) << np.uint64(32)
    check = records["generation"] * np.uint64(MIX_GENERATION)
    check ^= scope * np.uint64(MIX_NAMESPACE)
    check ^= state * np.uint64(MIX_STATE)
    serials = records["serial"] * np.uint64(MIX_SERIAL) ^ records["parent_serial"] * np.uint64(MIX_PARENT_SERIAL)
    check ^= np.where((state == CACHED) | (state == SHADOW), serials, np.uint64(0))
    return check


class SessionEntry(NamedTuple):
    session: int
    epoch: int
    token: bytes


class TableReader:
    """A descriptor table mapped read-only: what a worker checks its pages with, and what a scan reads.

    Takes over ``fd``: it is closed here, also when the table cannot be used. Errors: VersionMismatch.
    """

    def __init__(self, fd: int) -> None:
        try:
            size = os.fstat(fd).st_size
            if size < HEADER_BYTES:
                raise VersionMismatch(f"not a descriptor table: {size} bytes")
            self._memory = arena.map_readonly(fd, size)
        finally:
            os.close(fd)
        try:
            self.geometry = Geometry.unpack(self._memory[:HEADER_BYTES])
            if self.geometry.table_bytes > size:
                raise VersionMismatch(f"the descriptor table is cut off: {size} of {self.geometry.table_bytes} bytes")
        except BaseException:
            self._memory.close()
            raise
        geometry = self.geometry
        self.records: NDArray[Any] = np.ndarray(
            (geometry.records,),
            record_dtype(geometry.page_size, geometry.record_bytes),
            self._memory,
            geometry.records_at,
        )
        self._generations: NDArray[np.uint64] = self.records["generation"]

    def generations(self, pages: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
        """How often each of these pages was handed out, now: [n] uint64, a copy."""
        return self._generations[pages.astype(np.intp)]

    def session(self, slot: int) -> SessionEntry:
        """Who holds a session slot; epoch 0: that session is over."""
        return SessionEntry(*SESSION.unpack_from(self._memory, self.geometry.sessions_at + slot * SESSION_BYTES))

    def sessions(self) -> list[SessionImage]:
        """All sessions that are not over."""
        found = []
        for slot in range(self.geometry.sessions):
            identity, epoch, token = self.session(slot)
            if epoch:
                found.append(SessionImage(slot, identity, epoch, token))
        return found

    def namespaces(self) -> list[NamespaceImage]:
        """All namespaces in use."""
        found = []
        for slot in range(self.geometry.namespaces):
            at = self.geometry.namespaces_at + slot * NAMESPACE_BYTES
            word, identity, length, used = NAMESPACE_HEAD.unpack_from(self._memory, at)
            if used:
                start = at + NAMESPACE_HEAD.size
                canonical = self._memory[start : start + length]
                found.append(NamespaceImage(identity, word & HALF_MASK, word >> 32, canonical))
        return found

    def image(self) -> TableImage:
        """All of it as it is now, copied: what recovery works on."""
        records = self.records.copy()
        return TableImage(
            pages=self.geometry.pages,
            states=records["state"].astype(np.uint8),
            sound=records["check"] == check_of(records),
            generations=records["generation"].copy(),
            owners=records["owner"].copy(),
            stamps=records["stamp"].copy(),
            namespaces=records["namespace"].copy(),
            epochs=records["epoch"].copy(),
            serials=records["serial"].copy(),
            parent_serials=records["parent_serial"].copy(),
            tokens=np.ascontiguousarray(records["tokens"]).view(f"V{self.geometry.page_size * TOKEN_BYTES}").ravel(),
            names=self.namespaces(),
        )

    @property
    def tainted(self) -> bool:
        """True: the daemon that wrote this found a bug in itself; nothing here may be trusted."""
        return self._memory[TAINTED_AT] != 0

    def close(self) -> None:
        del self.records, self._generations
        self._memory.close()
