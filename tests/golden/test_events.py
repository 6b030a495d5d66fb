"""Batches of events as bytes, in both forms, and what vLLM's own classes make of them.

The bytes are kept: subscribers of other makes read them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import msgspec
import pytest

from radixkv import Namespace
from radixkv.config import EventsConfig
from radixkv.ipc.event_codec import EventCodec, lora_and_salt
from radixkv.ipc.event_ledger import Cleared, Event, Removed, Stored

GOLDEN = {
    (line["format"], line["hash"]): bytes.fromhex(line["bytes"])
    for line in map(json.loads, Path(__file__).with_name("events.jsonl").read_text().splitlines())
}
BOTH = [("array", "int64"), ("array", "bytes"), ("map", "int64"), ("map", "bytes")]
FORMS = pytest.mark.parametrize(("form", "kind"), BOTH)

TIMESTAMP = 1_700_000_000.5
FIRST, SECOND = bytes(range(16)), bytes(range(0xF0, 0x100))
TOKENS = [1, 2, 4_294_967_295, 300]
PLAIN = Namespace("m").canonical
TENANT = Namespace("m", lora="adapter", salt="tenant").canonical
EVENTS: list[Event] = [
    Cleared(),
    Stored("GPU", b"", FIRST + SECOND, b"".join(token.to_bytes(4, "little") for token in TOKENS), PLAIN),
    Stored("CPU", FIRST, SECOND, b"".join(token.to_bytes(4, "little") for token in TOKENS[2:]), TENANT),
    Stored("GPU", b"", FIRST + SECOND, b"".join(token.to_bytes(4, "little") for token in TOKENS), TENANT),
    Removed("CPU", SECOND + FIRST),
]


def encoded(form: str, kind: str) -> bytes:
    codec = EventCodec(EventsConfig(format=form, hash=kind, rank=3), page_size=2)
    return codec.batch(TIMESTAMP, [codec.event(event) for event in EVENTS])


def meant(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """What the events are, spelt out."""
    one, two = {"int64": (0x08090A0B0C0D0E0F, 0xF8F9FAFBFCFDFEFF), "bytes": (FIRST, SECOND)}[kind]
    plain = {"block_size": 2, "lora_id": None, "lora_name": None, "extra_keys": None}
    lora = {"block_size": 2, "lora_id": None, "lora_name": "adapter"}
    first = {"block_hashes": [one, two], "parent_block_hash": None, "token_ids": TOKENS, "medium": "GPU"}
    second = {"block_hashes": [two], "parent_block_hash": one, "token_ids": TOKENS[2:], "medium": "CPU"}
    return [
        ("AllBlocksCleared", {}),
        ("BlockStored", first | plain),
        ("BlockStored", second | lora | {"extra_keys": [["adapter"]]}),
        ("BlockStored", first | lora | {"extra_keys": [["adapter", "tenant"], ["adapter"]]}),
        ("BlockRemoved", {"block_hashes": [two, one], "medium": "CPU"}),
    ]


@FORMS
def test_the_bytes_stay_the_same(form: str, kind: str) -> None:
    assert encoded(form, kind) == GOLDEN[form, kind]


@FORMS
def test_another_decoder_reads_them(form: str, kind: str) -> None:
    timestamp, events, rank = msgpack.unpackb(GOLDEN[form, kind])
    assert (timestamp, rank) == (TIMESTAMP, 3)
    order = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    order.append("extra_keys")
    for event, (name, fields) in zip(events, meant(kind), strict=True):
        if form == "map":
            assert event == {"type": name, **fields}
        else:
            assert event == [name, *(fields[key] for key in order if key in fields)]


@pytest.mark.parametrize("count", [0, 15, 16, 65_535, 65_536])
def test_a_batch_may_have_any_number_of_events(count: int) -> None:
    codec = EventCodec(EventsConfig(), page_size=2)
    batch = codec.batch(TIMESTAMP, [codec.event(Cleared())] * count)
    assert msgpack.unpackb(batch) == [TIMESTAMP, [["AllBlocksCleared"]] * count, 0]


# -- vLLM's classes -----------------------------------------------------------------------------------------------

NAMES_IT_IMPORTS = {
    "vllm.config.kv_events": {"KVEventsConfig": object},
    "vllm.logger": {"init_logger": lambda name: None},
    "vllm.utils.network_utils": dict.fromkeys(
        ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"), lambda *_: None
    ),
    "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
}
"""What that file takes from the rest of vLLM: none of it has a part in decoding but the type of a hash."""


def vllm_file() -> Path | None:
    root = Path(os.environ.get("RADIXKV_VLLM_VENV", Path(__file__).parents[2] / ".venv-vllm"))
    return next(root.glob("lib/python3*/site-packages/vllm/distributed/kv_events.py"), None)


@pytest.fixture(scope="module")
def vllm() -> Any:
    """vLLM's file by itself: to import all of vLLM takes half a minute."""
    path = vllm_file()
    if path is None:
        pytest.skip("vLLM is not installed in .venv-vllm (or $RADIXKV_VLLM_VENV): its decoder was not asked")
    spec = importlib.util.spec_from_file_location("vllm_kv_events", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, names in NAMES_IT_IMPORTS.items():
            made = ModuleType(name)
            vars(made).update(names)
            patch.setitem(sys.modules, name, made)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def as_arrays(vllm: Any) -> Any:
    """The batch of vLLM up to 0.23: the same classes, which were arrays then."""
    kinds = []
    for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        fields = [
            (field.name, field.type, *([] if field.required else [field.default]))
            for field in msgspec.structs.fields(getattr(vllm, name))
        ]
        kinds.append(msgspec.defstruct(name, fields, array_like=True, tag=True))
    stored, removed, cleared = kinds
    batch = [("ts", float), ("events", list[stored | removed | cleared]), ("data_parallel_rank", int | None, None)]
    return msgspec.defstruct("KVEventBatch", batch, array_like=True)


@FORMS
def test_vllms_own_classes_read_them(vllm: Any, form: str, kind: str) -> None:
    batch_type = vllm.KVEventBatch if form == "map" else as_arrays(vllm)
    batch = msgspec.msgpack.decode(GOLDEN[form, kind], type=batch_type)
    assert (batch.ts, batch.data_parallel_rank) == (TIMESTAMP, 3)
    for event, (name, fields) in zip(batch.events, meant(kind), strict=True):
        assert type(event).__name__ == name
        if fields.get("extra_keys"):
            fields["extra_keys"] = [tuple(keys) for keys in fields["extra_keys"]]
        assert {key: getattr(event, key) for key in fields} == fields


def test_the_end_of_a_replay_is_vllms(vllm: Any) -> None:
    from radixkv.ipc.events import END

    assert vllm.ZmqEventPublisher.END_SEQ == END


# -- namespaces ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("canonical", "known"),
    [
        (Namespace("m").canonical, (None, None)),
        (Namespace("m", lora="a", salt="b", extra={"lora": "x", "salt": "y"}).canonical, ("a", "b")),
        (Namespace("m", lora=b"\xff\x01", salt=b"s").canonical, ("ff01", "s")),
        (b"", (None, None)),
        (b"somebody's own", (None, None)),
        (Namespace("m", lora="a", salt="b").canonical[:-3], (None, None)),
    ],
    ids=["plain", "both", "bytes", "empty", "another form", "cut short"],
)
def test_what_is_known_of_a_namespace(canonical: bytes, known: tuple[str | None, str | None]) -> None:
    assert lora_and_salt(canonical) == known


def test_no_canonical_bytes_are_too_strange() -> None:
    whole = Namespace("m", lora="a", salt="b").canonical
    for length in range(len(whole)):
        for spoilt in (whole[:length], whole[:length] + b"\xff\xff\xff\xff" + whole[length + 4 :]):
            lora, _ = lora_and_salt(spoilt)
            assert lora is None or isinstance(lora, str)
