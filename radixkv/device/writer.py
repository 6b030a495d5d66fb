"""Writing descriptor tables: the daemon's side. One writer, stores in the order of the lines, state word last.

Words are stored through a memoryview or a numpy column: one store each, so that a kill leaves the old or the new one.
(``struct.pack_into`` would clear the place first, and "<Q" writes byte by byte.)

A page that is evicted and somebody else's at once goes from CACHED to PRIVATE by one ``Assign``. The generation is
stored first, the check after it, the state last: whoever finds it half written finds a cached page whose check does not
agree, and drops it.

A handful of pages is written record by record, many at once by numpy; both give the same bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.commands import Assign, Copied, NamespaceRecord, Own, Publish, Retire, SessionRecord, Stamp, Write
from radixkv.device import arena
from radixkv.device.descriptors import (
    CACHED,
    CHECK,
    FREE,
    GENERATION,
    LAST_SERIAL_AT,
    MIX_GENERATION,
    MIX_NAMESPACE,
    MIX_PARENT_SERIAL,
    MIX_SERIAL,
    MIX_STATE,
    NAMESPACE,
    NAMESPACE_BYTES,
    NAMESPACE_HEAD,
    OWNER,
    PARENT_SERIAL,
    PRIVATE,
    QUARANTINED,
    SERIAL,
    SESSION,
    SESSION_BYTES,
    SHADOW,
    STAMP,
    STATE,
    TAINTED_AT,
    TOKENS,
    USED,
    WORD_MASK,
    Geometry,
)
from radixkv.types import PAGE_ID_BYTES, TOKEN_BYTES

_COLUMNS = (
    "generations", "owners", "stamps", "scopes", "checks", "states", "serials", "parent_serials", "tokens", "contents",
)  # fmt: skip
_FEW_PAGES = 8
"""Up to here record by record is faster (measured: 0.35 us a page, against 4 us and 0.02 us a page)."""
_UNPACK_FEW = {n * PAGE_ID_BYTES: struct.Struct(f"<{n}i").unpack for n in range(_FEW_PAGES + 1)}
"""By their length: how packed ids that are a handful become a tuple."""

_WORD_BYTES = 8
_OWNER, _STAMP, _SCOPE, _CHECK, _STATE = (at // _WORD_BYTES for at in (OWNER, STAMP, NAMESPACE, CHECK, STATE))
"""Places in a record, in words; the generation is the first. A scope is a namespace and its epoch."""
_PAIR = struct.Struct("@QQ")
"""A serial and the parent's."""
_LAST_SERIAL = LAST_SERIAL_AT // _WORD_BYTES
assert sys.byteorder == "little"
_ONE = np.uint64(1)
_MIX = np.uint64(MIX_GENERATION)
_PRIVATE_SALT = PRIVATE * MIX_STATE & WORD_MASK
_PUBLISHED = {state: (PRIVATE * MIX_STATE ^ state * MIX_STATE) & WORD_MASK for state in (CACHED, SHADOW)}
"""What the check changes by when a private page gets this state, its serials aside."""


class TableWriter:
    """One pool's descriptor table. ``fd`` stays open for handing out, until ``close``."""

    def __init__(self, geometry: Geometry, fd: int = -1) -> None:
        """Create it empty: every page FREE, generation 0; or go on with the one behind ``fd``, which is taken over and
        must have this geometry. Errors: MemoryTooSmall.
        """
        self.geometry = geometry
        self.fd = arena.create("table", geometry.table_bytes) if fd < 0 else fd
        self._memory = mmap.mmap(self.fd, geometry.table_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        if fd < 0:
            header = geometry.pack()
            self._memory[: len(header)] = header
        self._words = memoryview(self._memory).cast("Q")
        self._records_at = geometry.records_at
        self._record_bytes = geometry.record_bytes
        self._token_bytes = geometry.page_size * TOKEN_BYTES
        self._generations = self._column("<u8", GENERATION)
        self._owners = self._column("<u8", OWNER)
        self._stamps = self._column("<u8", STAMP)
        self._scopes = self._column("<u8", NAMESPACE)
        self._checks = self._column("<u8", CHECK)
        self._states = self._column("<u8", STATE)
        self._serials = self._column("<u8", SERIAL)
        self._parent_serials = self._column("<u8", PARENT_SERIAL)
        self._tokens = self._column(f"V{self._token_bytes}", TOKENS)
        self._contents = self._column(f"V{TOKENS - SERIAL + self._token_bytes}", SERIAL)
        """All of these three together."""

    def _column(self, dtype: str, offset: int) -> NDArray[Any]:
        """One field of all records: [records], strided over the mapped table."""
        geometry = self.geometry
        at = geometry.records_at + offset
        return np.ndarray((geometry.records,), dtype, self._memory, at, (geometry.record_bytes,))

    def apply(self, write: Write) -> None:
        """Store one write. A session's record goes into every pool's table, all others into the named pool's."""
        _STORE[type(write)](self, write)

    def repair(self) -> None:
        """After another daemon's death: a private page's check may be half way to what a publish would have made it."""
        private = self._states == PRIVATE
        checks = self._generations[private] * _MIX
        checks ^= self._scopes[private] * np.uint64(MIX_NAMESPACE)
        checks ^= np.uint64(_PRIVATE_SALT)
        self._checks[private] = checks

    def taint(self) -> None:
        """Mark the table: the daemon found a bug in itself, the next start must not trust what is here."""
        self._words[TAINTED_AT // _WORD_BYTES] = 1

    def close(self) -> None:
        """Unmap and close. Workers keep what they have mapped."""
        for name in _COLUMNS:
            delattr(self, f"_{name}")
        self._words.release()
        self._memory.close()
        os.close(self.fd)

    # -- pages ----------------------------------------------------------------------------------------------------

    def _assign(self, write: Assign) -> None:
        scope = write.epoch << 32 | write.namespace
        salt = scope * MIX_NAMESPACE & WORD_MASK ^ _PRIVATE_SALT
        few = _UNPACK_FEW.get(len(write.pages))
        if few is None:
            pages = _indices(write.pages)
            generations = self._generations[pages]
            generations += _ONE
            self._generations[pages] = generations
            self._owners[pages] = write.owner
            self._stamps[pages] = 0
            self._scopes[pages] = scope
            generations *= _MIX
            generations ^= np.uint64(salt)
            self._checks[pages] = generations
            self._states[pages] = PRIVATE
            return
        words, start, record = self._words, self._records_at // _WORD_BYTES, self._record_bytes // _WORD_BYTES
        for page in few(write.pages):
            at = start + page * record
            words[at] = generation = words[at] + 1
            words[at + _OWNER] = write.owner
            words[at + _STAMP] = 0
            words[at + _SCOPE] = scope
            words[at + _CHECK] = (generation * MIX_GENERATION ^ salt) & WORD_MASK
            words[at + _STATE] = PRIVATE

    def _publish(self, write: Publish) -> None:
        """Serials are taken before any page has one."""
        state = SHADOW if write.shadow else CACHED
        words, start, record = self._words, self._records_at, self._record_bytes
        above = words[(start + write.parent_page * record + SERIAL) // _WORD_BYTES] if write.parent_page >= 0 else 0
        serial = words[_LAST_SERIAL]
        words[_LAST_SERIAL] = serial + len(write.pages) // PAGE_ID_BYTES
        few = _UNPACK_FEW.get(len(write.pages))
        if few is None:
            pages = _indices(write.pages)
            serials = np.arange(serial, serial + len(pages) + 1, dtype=np.uint64)
            self._serials[pages] = serials[1:]
            serials[0] = above
            self._parent_serials[pages] = serials[:-1]
            self._tokens[pages] = np.frombuffer(write.tokens, self._tokens.dtype)
            changes = serials[1:] * np.uint64(MIX_SERIAL)
            changes ^= serials[:-1] * np.uint64(MIX_PARENT_SERIAL)
            changes ^= np.uint64(_PUBLISHED[state])
            self._checks[pages] ^= changes
            self._states[pages] = state
            return
        memory, size = self._memory, self._token_bytes
        for index, page in enumerate(few(write.pages)):
            at = start + page * record
            tokens = write.tokens[index * size : index * size + size]
            serial += 1
            memory[at + SERIAL : at + TOKENS + size] = _PAIR.pack(serial, above) + tokens
            change = (serial * MIX_SERIAL ^ above * MIX_PARENT_SERIAL) & WORD_MASK
            above = serial
            word = at // _WORD_BYTES
            words[word + _CHECK] ^= change ^ _PUBLISHED[state]
            words[word + _STATE] = state

    def _copied(self, write: Copied) -> None:
        """From one tier to the other. The check is that of the source but for its generation: were it wrong there, it
        would be here."""
        sources, targets = _indices(write.sources), _indices(write.targets)
        self._stamps[targets] = self._stamps[sources]
        self._scopes[targets] = self._scopes[sources]
        self._contents[targets] = self._contents[sources]
        generations = self._generations[sources] * _MIX ^ self._generations[targets] * _MIX
        self._checks[targets] = self._checks[sources] ^ generations
        self._states[targets] = CACHED

    def _retire(self, write: Retire) -> None:
        self._set(STATE, write.pages, QUARANTINED if write.quarantined else FREE)

    def _stamp(self, write: Stamp) -> None:
        self._set(STAMP, write.pages, write.stamp)

    def _own(self, write: Own) -> None:
        self._set(OWNER, write.pages, write.owner)

    def _set(self, offset: int, pages: bytes, value: int) -> None:
        """One word of each of these records."""
        few = _UNPACK_FEW.get(len(pages))
        if few is None:
            column = {STATE: self._states, STAMP: self._stamps, OWNER: self._owners}[offset]
            column[_indices(pages)] = value
            return
        start, record = (self._records_at + offset) // _WORD_BYTES, self._record_bytes // _WORD_BYTES
        for page in few(pages):
            self._words[start + page * record] = value

    # -- sections -------------------------------------------------------------------------------------------------

    def _namespace(self, write: NamespaceRecord) -> None:
        """A new epoch is one store; a slot that changes its namespace is unused while it does."""
        at = self.geometry.namespaces_at + write.namespace * NAMESPACE_BYTES
        content = at + NAMESPACE_HEAD.size
        word = write.invalidations << 32 | write.epoch
        _, _, length, used = NAMESPACE_HEAD.unpack_from(self._memory, at)
        if not used or self._memory[content : content + length] != write.canonical:
            self._words[(at + USED) // _WORD_BYTES] = 0
            self._memory[content : content + len(write.canonical)] = write.canonical
            NAMESPACE_HEAD.pack_into(self._memory, at, word, write.namespace, len(write.canonical), 0)
            self._words[(at + USED) // _WORD_BYTES] = 1
        self._words[at // _WORD_BYTES] = word

    def _session(self, write: SessionRecord) -> None:
        """A session that goes on with a new epoch is never seen as over."""
        at = self.geometry.sessions_at + write.slot * SESSION_BYTES
        epoch = at // _WORD_BYTES + 1
        if write.epoch and self._words[epoch - 1] != write.session:
            self._words[epoch] = 0
            SESSION.pack_into(self._memory, at, write.session, 0, write.token)
        self._words[epoch] = write.epoch


_STORE: dict[type, Callable[[TableWriter, Any], None]] = {
    Assign: TableWriter._assign,
    Publish: TableWriter._publish,
    Copied: TableWriter._copied,
    Retire: TableWriter._retire,
    Stamp: TableWriter._stamp,
    Own: TableWriter._own,
    NamespaceRecord: TableWriter._namespace,
    SessionRecord: TableWriter._session,
}


def _indices(pages: bytes) -> NDArray[np.intp]:
    return np.frombuffer(pages, "<i4").astype(np.intp)


def apply_all(tables: Mapping[str, TableWriter], writes: Iterable[Write]) -> None:
    """Store the writes of one command, in order. When this returns the reply may leave."""
    for write in writes:
        if type(write) is SessionRecord:
            for table in tables.values():
                table.apply(write)
        else:
            _STORE[type(write)](tables[write.pool], write)  # type: ignore[union-attr]
