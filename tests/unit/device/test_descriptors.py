"""The descriptor table: what the writer stores is what a reader finds, few pages or many, and in the right order."""

from __future__ import annotations

import os
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.commands import Assign, NamespaceRecord, Own, Publish, Retire, SessionRecord, Stamp
from radixkv.config import KVSpec, PoolConfig
from radixkv.device import arena, descriptors
from radixkv.device.descriptors import (
    CACHED,
    FREE,
    PRIVATE,
    QUARANTINED,
    SHADOW,
    STATE,
    Geometry,
    TableReader,
    check_of,
)
from radixkv.device.pool_memory import PoolMemory
from radixkv.device.writer import TableWriter, apply_all
from radixkv.errors import VersionMismatch

PAGES = 64
GEOMETRY = Geometry("default", "c" * 32, PAGES, 4, 3, 5)
TOKEN_BYTES = GEOMETRY.page_size * 4


@pytest.fixture
def table():
    writer = TableWriter(GEOMETRY)
    reader = TableReader(os.dup(writer.fd))
    yield writer, reader
    reader.close()
    writer.close()


def packed(pages) -> bytes:
    return np.asarray(list(pages), "<i4").tobytes()


def published(pages, *, shadow: bool = False) -> Publish:
    pages = list(pages)
    tokens = b"".join(struct.pack("<4I", page, page + 1, 7, 2**32 - 1) for page in pages)
    return Publish("default", packed(pages), shadow, tokens)


def test_a_new_table_is_empty(table) -> None:
    writer, reader = table
    assert reader.geometry == GEOMETRY
    assert not reader.records["state"].any() and not reader.records["generation"].any()
    assert reader.namespaces() == [] and not reader.tainted
    assert reader.session(4) == (0, 0, bytes(16))
    assert os.fstat(writer.fd).st_size == GEOMETRY.table_bytes


def test_records_are_whole_cache_lines_for_every_page_size() -> None:
    for page_size in (1, 4, 16, 17, 256):
        geometry = replace(GEOMETRY, page_size=page_size)
        assert geometry.record_bytes % 64 == 0
        assert geometry.record_bytes >= descriptors.TOKENS + 4 * page_size
        assert geometry.records_at % 4096 == 0
        assert geometry.table_bytes >= geometry.records_at + PAGES * geometry.record_bytes


@pytest.mark.parametrize("count", [1, 8, 9, 60])
def test_a_page_from_assign_to_retire(table, count: int) -> None:
    writer, reader = table
    pages = list(range(PAGES - 1, PAGES - 1 - count, -1))
    record = reader.records

    writer.apply(Assign("default", packed(pages), 2**62 - 1, 2, 2**32 - 1))
    chosen = record[pages]
    assert (chosen["generation"] == 1).all() and (chosen["state"] == PRIVATE).all()
    assert (chosen["owner"] == 2**62 - 1).all() and (chosen["stamp"] == 0).all()
    assert (chosen["namespace"] == 2).all() and (chosen["epoch"] == 2**32 - 1).all()
    assert (chosen["check"] == check_of(chosen)).all()

    write = published(pages)
    writer.apply(write)
    chosen = record[pages]
    assert (chosen["state"] == CACHED).all()
    assert chosen["tokens"].astype("<u4").tobytes() == write.tokens
    assert (chosen["check"] == check_of(chosen)).all()

    writer.apply(Stamp("default", packed(pages), 2**63))
    assert (record[pages]["stamp"] == 2**63).all()
    writer.apply(Own("default", packed(pages), 9))
    assert (record[pages]["owner"] == 9).all()
    assert (record[pages]["check"] == check_of(record[pages])).all()

    writer.apply(Retire("default", packed(pages)))
    assert (record[pages]["state"] == FREE).all()
    assert (record[pages]["generation"] == 1).all(), "who still looks may see that the content is the one he knew"
    writer.apply(Assign("default", packed(pages), 5, 0, 1))
    assert (record[pages]["generation"] == 2).all()
    assert (record[pages]["stamp"] == 0).all()
    writer.apply(Retire("default", packed(pages), quarantined=True))
    assert (record[pages]["state"] == QUARANTINED).all()
    assert (record[pages]["owner"] == 5).all()

    raw = os.pread(writer.fd, PAGES * GEOMETRY.record_bytes, GEOMETRY.records_at)
    rows = np.frombuffer(raw, "u1").reshape(PAGES, -1)
    assert not np.delete(rows, pages, axis=0).any(), "all other pages are as they were"


@pytest.mark.parametrize("count", [1, 8, 9, 60])
def test_a_cached_page_that_is_being_assigned_is_not_sound_from_the_first_store_on(table, count: int) -> None:
    """Wherever a kill cuts an ``Assign`` of evicted pages, none of them is taken for what it was, or for anything."""
    writer, reader = table
    pages = list(range(count))
    writer.apply(Assign("default", packed(pages), 1, 2, 3))
    writer.apply(published(pages))
    writer.apply(Stamp("default", packed(pages), 7))
    size, at = GEOMETRY.record_bytes, GEOMETRY.records_at
    old = os.pread(writer.fd, count * size, at)
    assert reader.image().sound[pages].all()
    writer.apply(Assign("default", packed(pages), 9, 2, 4))
    new = os.pread(writer.fd, count * size, at)
    assert (reader.records["state"][pages] == PRIVATE).all() and reader.image().sound[pages].all()
    words = [word for word in range(0, size, 8) if old[word : word + 8] != new[word : word + 8]]
    assert words[0] == descriptors.GENERATION and words[-1] == descriptors.STATE
    for stored in range(1, len(words)):
        for page in pages:
            record = bytearray(old[page * size : (page + 1) * size])
            for word in words[:stored]:
                record[word : word + 8] = new[page * size + word : page * size + word + 8]
            os.pwrite(writer.fd, record, at + page * size)
        assert (reader.records["state"][pages] == CACHED).all() and not reader.image().sound[pages].any()


@pytest.mark.parametrize("count", [1, 8, 9, 40])
def test_contents_have_serials_and_name_the_one_before_them(table, count: int) -> None:
    writer, reader = table
    pages = list(range(5, 5 + count))
    writer.apply(Assign("default", packed([2, *pages]), 1, 1, 1))
    writer.apply(published([2]))
    write = published(pages)
    writer.apply(Publish("default", write.pages, False, write.tokens, 2))
    records = reader.records
    assert (records[2]["serial"], records[2]["parent_serial"]) == (1, 0)
    assert records[pages]["serial"].tolist() == list(range(2, 2 + count))
    assert records[pages]["parent_serial"].tolist() == list(range(1, 1 + count))
    again = TableWriter(GEOMETRY, os.dup(writer.fd))
    again.apply(Assign("default", packed([0]), 1, 1, 1))
    again.apply(published([0]))
    assert records[0]["serial"] == 2 + count, "whoever goes on with the table gives none a second time"
    again.close()


def test_repair_makes_good_what_a_torn_publish_left(table) -> None:
    writer, reader = table
    writer.apply(Assign("default", packed([3, 4]), 1, 1, 1))
    writer._checks[3] ^= np.uint64(12345)
    writer.repair()
    assert (reader.records[[3, 4]]["check"] == check_of(reader.records[[3, 4]])).all()


def test_a_session_that_goes_on_is_never_seen_as_over(table, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = table
    writer.apply(SessionRecord(1, 9, 1, b"t" * 16))
    seen = []
    monkeypatch.setattr(writer, "_words", _Watched(writer._words, lambda _, __: seen.append(reader.session(1))))
    writer.apply(SessionRecord(1, 9, 2, b"t" * 16))
    assert seen == [(9, 2, b"t" * 16)]
    seen.clear()
    writer.apply(SessionRecord(1, 10, 1, b"u" * 16))
    assert seen == [(9, 0, b"t" * 16), (10, 1, b"u" * 16)]
    assert [entry[:2] for entry in reader.sessions()] == [(1, 10)]


def test_a_namespace_in_a_used_slot_is_seen_whole_or_not_at_all(table, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = table
    writer.apply(NamespaceRecord("default", 2, 5, b"old name", 1))
    seen = []
    watched = _Watched(writer._words, lambda _, __: seen.append([name[::3] for name in reader.namespaces()]))
    monkeypatch.setattr(writer, "_words", watched)
    writer.apply(NamespaceRecord("default", 2, 6, b"old name", 2))
    assert seen == [[(2, b"old name")]], "a new epoch is one store"
    seen.clear()
    writer.apply(NamespaceRecord("default", 2, 7, b"new", 0))
    assert seen[0] == [], "before a byte of it changes nobody reads it"
    assert all(names in ([], [(2, b"new")]) for names in seen) and seen[-1]


def test_shadows_carry_their_check(table) -> None:
    writer, reader = table
    writer.apply(Assign("default", packed([3, 5]), 1, 1, 1))
    writer.apply(published([3, 5], shadow=True))
    assert (reader.records[[3, 5]]["state"] == SHADOW).all()
    assert (reader.records[[3, 5]]["check"] == check_of(reader.records[[3, 5]])).all()


@pytest.mark.parametrize("field", ["generation", "namespace", "epoch", "state", "serial", "parent_serial"])
def test_a_check_notices_a_changed_field(table, field: str) -> None:
    writer, reader = table
    writer.apply(Assign("default", packed([3]), 1, 1, 1))
    writer.apply(published([3]))
    record = reader.records[[3]].copy()
    raw = bytearray(record[field].tobytes())
    raw[0] ^= 1
    record[field] = np.frombuffer(bytes(raw), record[field].dtype)
    assert (record["check"] != check_of(record)).all()


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, PAGES - 1), min_size=1, unique=True), min_size=1, max_size=6), st.randoms())
def test_many_at_once_are_the_same_bytes_as_one_by_one(groups: list[list[int]], random) -> None:
    """The numpy way and the record-by-record way agree."""
    joined, single = TableWriter(GEOMETRY), TableWriter(GEOMETRY)
    try:
        for pages in groups:
            stamp = random.randrange(2**64)
            assign = Assign(
                "default", packed(pages), random.randrange(2**62), random.randrange(3), random.randrange(2**32)
            )
            whole = published(pages, shadow=random.random() < 0.3)
            joined.apply(assign)
            joined.apply(whole)
            joined.apply(Stamp("default", packed(pages), stamp))
            for index, page in enumerate(pages):
                single.apply(Assign("default", packed([page]), assign.owner, assign.namespace, assign.epoch))
                single.apply(
                    Publish(
                        "default",
                        packed([page]),
                        whole.shadow,
                        whole.tokens[TOKEN_BYTES * index : TOKEN_BYTES * (index + 1)],
                        pages[index - 1] if index else whole.parent_page,
                    )
                )
                single.apply(Stamp("default", packed([page]), stamp))
        assert os.pread(joined.fd, GEOMETRY.table_bytes, 0) == os.pread(single.fd, GEOMETRY.table_bytes, 0)
    finally:
        joined.close()
        single.close()


@pytest.mark.parametrize("count", [1, 40])
def test_the_state_word_is_stored_last(table, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Cut off right before the last store, a record still has its former state."""
    writer, reader = table
    pages = packed(range(count))

    class CutOff(Exception):
        pass

    def cut(*_: object) -> None:
        raise CutOff

    def without_last_store(write) -> None:
        with monkeypatch.context() as patch, pytest.raises(CutOff):
            if count > 8:
                patch.setattr(writer, "_states", _Refusing(cut))
            else:
                patch.setattr(writer, "_words", _Watched(writer._words, before=_at_state_words(cut)))
            writer.apply(write)

    without_last_store(Assign("default", pages, 7, 1, 1))
    assert (reader.records["state"] == FREE).all()
    assert reader.records["generation"][0] == 1, "everything else was stored"
    writer.apply(Assign("default", pages, 7, 1, 1))
    without_last_store(published(range(count)))
    assert (reader.records["state"][:count] == PRIVATE).all()
    assert reader.records["tokens"][0].any()


class _Refusing:
    """A column that cannot be assigned to."""

    def __init__(self, cut) -> None:
        self.cut = cut

    def __setitem__(self, *_: object) -> None:
        self.cut()


class _Watched:
    """The table's words; ``after`` and ``before`` are called with place and value of each store."""

    def __init__(self, words, after=None, before=None) -> None:
        self._words, self._after, self._before = words, after, before

    def __getitem__(self, at: int) -> int:
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        if self._before:
            self._before(at, value)
        self._words[at] = value
        if self._after:
            self._after(at, value)


def _at_state_words(cut):
    def before(at: int, _: int) -> None:
        if (at * 8 - GEOMETRY.records_at) % GEOMETRY.record_bytes == STATE:
            cut()

    return before


def test_no_word_is_ever_seen_half_stored(table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pages: the stores of each record, one by one. A word goes from its old to its new value at once."""
    writer, reader = table
    stores: list[tuple[int, int]] = []
    monkeypatch.setattr(writer, "_words", _Watched(writer._words, lambda at, value: stores.append((at, value))))
    writer.apply(Assign("default", packed([3]), 7, 1, 1))
    first = GEOMETRY.records_at // 8 + 3 * GEOMETRY.record_bytes // 8
    assert [at - first for at, _ in stores] == [0, 1, 2, 3, 4, 5], "generation first, then check, the state last"
    assert stores[0][1] == 1 and stores[-1][1] == PRIVATE
    stores.clear()
    writer.apply(published([3]))
    assert stores[0] == (descriptors.LAST_SERIAL_AT // 8, 1), "nobody has a serial that could be given again"
    assert [at - first for at, _ in stores[1:]] == [4, 5]
    assert int(reader.records["state"][3]) == CACHED


def test_generations_of_a_page_table_in_one_look(table) -> None:
    writer, reader = table
    writer.apply(Assign("default", packed([5, 6]), 1, 1, 1))
    mine = np.array([5, 6, 0], np.int32)
    before = reader.generations(mine)
    assert before.tolist() == [1, 1, 0]
    writer.apply(Assign("default", packed([6]), 2, 1, 1))
    assert (reader.generations(mine) == before).tolist() == [True, False, True]
    assert before.tolist() == [1, 1, 0], "what was read earlier does not change"


def test_sessions_come_and_go(table) -> None:
    writer, reader = table
    writer.apply(SessionRecord(4, 2**62 - 1, 3, b"t" * 16))
    assert reader.session(4) == (2**62 - 1, 3, b"t" * 16)
    writer.apply(SessionRecord(4, 2**62 - 1, 0, b""))
    assert reader.session(4).epoch == 0
    writer.apply(SessionRecord(4, 77, 1, b"u" * 16))
    assert reader.session(4) == (77, 1, b"u" * 16)


def test_namespaces_keep_their_bytes_over_epochs(table) -> None:
    writer, reader = table
    writer.apply(NamespaceRecord("default", 2, 1, b"x" * 1024))
    writer.apply(NamespaceRecord("default", 0, 7, b""))
    writer.apply(NamespaceRecord("default", 2, 9, b"x" * 1024, 3))
    assert reader.namespaces() == [(0, 7, 0, b""), (2, 9, 3, b"x" * 1024)]
    writer.apply(NamespaceRecord("default", 2, 10, b"short"))
    assert reader.namespaces() == [(0, 7, 0, b""), (2, 10, 0, b"short")]
    assert reader.records["generation"].sum() == 0, "the longest name stays inside its section"


def test_writes_go_to_their_pool_and_sessions_to_all() -> None:
    tables = {name: TableWriter(replace(GEOMETRY, pool=name)) for name in ("a", "b")}
    readers = {name: TableReader(os.dup(table.fd)) for name, table in tables.items()}
    apply_all(tables, [SessionRecord(0, 5, 1, b"t" * 16), Assign("b", packed([1]), 5, 0, 1)])
    assert [reader.session(0).session for reader in readers.values()] == [5, 5]
    assert [int(reader.records["generation"][1]) for reader in readers.values()] == [0, 1]
    for each in (*tables.values(), *readers.values()):
        each.close()


def test_tainted_is_seen_by_readers(table) -> None:
    writer, reader = table
    writer.taint()
    assert reader.tainted
    assert reader.geometry == Geometry.unpack(os.pread(writer.fd, 4096, 0)), "the rest of the header is as before"


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, b"nothing\0"),
        (8, b"\x63"),
        (16, b"\xff"),
        (24, b"\xff"),
        (36, b"\x01"),
        (40, b"\x01"),
        (56, b"\x01"),
        (72, b"\x01"),
    ],
)
def test_another_format_is_refused(at: int, value: bytes) -> None:
    fd = arena.create("test", GEOMETRY.table_bytes)
    os.pwrite(fd, GEOMETRY.pack(), 0)
    os.pwrite(fd, value, at)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(VersionMismatch):
        TableReader(fd)
    assert len(os.listdir("/proc/self/fd")) == before - 1, "the descriptor was taken over and closed"


def test_a_table_that_is_cut_off_is_refused() -> None:
    for size in (100, 4096, GEOMETRY.table_bytes - 4096):
        fd = os.memfd_create("test")
        os.ftruncate(fd, size)
        os.pwrite(fd, GEOMETRY.pack()[:size], 0)
        with pytest.raises(VersionMismatch):
            TableReader(fd)


def test_a_pools_memory_and_its_description() -> None:
    config = PoolConfig("tiny", KVSpec(1, 1, 8, "float32", 4), 8)
    before = len(os.listdir("/proc/self/fd"))
    memory = PoolMemory.create(config, "c" * 32, 5)
    described = memory.description
    assert [os.fstat(fd).st_size for fd in memory.arena_fds] == [described.arena_bytes] == [8 * 256]
    assert os.fstat(memory.table_fd).st_size == described.table_bytes
    assert described.spec["head_dim"] == 8 and described.layout["page_stride"] == 64
    reader = TableReader(os.dup(memory.table_fd))
    assert (reader.geometry.pool, reader.geometry.pages) == ("tiny", 8)
    reader.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pool_of_several_ranks_has_an_arena_for_each() -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = PoolMemory.create(PoolConfig("tiny", KVSpec(1, 1, 8, "float32", 4), 8, ranks=3), "c" * 32, 5)
    assert memory.description.ranks == 3
    assert len({os.fstat(fd).st_ino for fd in memory.arena_fds}) == 3
    assert {os.fstat(fd).st_size for fd in memory.arena_fds} == {8 * 256}
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before
