"""Every setting by name: its unit and what it means. Defaults and allowed values live in ``radixkv.config``.

``--help`` is made from these tables; docs/configuration.md says the same at greater length and a test holds it to
them and to the dataclasses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches

from radixkv.config import EventsConfig, KVSpec, Limits, PoolConfig, ServerConfig
from radixkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Key:
    """One setting. ``unit`` also stands for the value in ``--help``."""

    unit: str
    meaning: str


SERVER = {
    "endpoint": Key("ADDRESS", "where workers reach the daemon, ipc://PATH; empty: the user's runtime directory"),
    "lease_s": Key(
        "SECONDS",
        "silent for so long, a session may be ended for its cached pages; "
        "its private ones stay out of use until its process ends",
    ),
    "heartbeat_s": Key("SECONDS", "how often a client library that is otherwise silent says that it is alive"),
    "resume_timeout_s": Key(
        "SECONDS", "how long after a warm start only free pages are handed out, for old sessions to come back"
    ),
    "drain_s": Key("SECONDS", "how long SIGTERM lets running work come to its end"),
    "keep_replies": Key("COUNT", "answers kept for each session, so that a repeated request gets the same one"),
}

LIMITS = {
    "message_bytes": Key("BYTES", "largest message taken"),
    "tokens": Key("COUNT", "most tokens of one sequence or prompt"),
    "batch_items": Key("COUNT", "most items in one step message"),
    "sessions": Key("COUNT", "most sessions at a time"),
    "queued": Key("COUNT", "most reserves that wait for pages at a time"),
    "sequences_per_session": Key("COUNT", "most sequences that one session may hold"),
}

EVENTS = {
    "endpoint": Key("ADDRESS", "where routers hear of cached blocks, ipc://PATH or tcp://ADDRESS; empty: nowhere"),
    "replay_endpoint": Key("ADDRESS", "where they ask for what they have missed; empty: nowhere"),
    "pool": Key("NAME", "whose blocks; may be empty if there is one pool"),
    "topic": Key("TEXT", "first frame of each message"),
    "format": Key("NAME", "events as array (as vLLM's up to 0.23) or map (0.24 on)"),
    "hash": Key("NAME", "blocks are named by int64, the low 64 bits of their chain hash, or bytes, all of it"),
    "rank": Key("NUMBER", "data-parallel rank in each batch"),
    "buffer_batches": Key("COUNT", "most batches kept for replays (and 64 MiB)"),
    "hwm": Key("COUNT", "most batches that wait for a subscriber; it loses further ones"),
}

SPEC = {
    "layers": Key("COUNT", "layers that keep keys and values"),
    "kv_heads": Key("COUNT", "key/value heads of a layer"),
    "head_dim": Key("COUNT", "numbers in one head's key"),
    "dtype": Key("NAME", "element type: float32, float16, bfloat16, or quantized fp8_e4m3, int8, int4"),
    "page_size": Key("TOKENS", "tokens of one page"),
    "mla_latent_dim": Key("COUNT", "latent numbers of a token and layer with multi-head latent attention; 0: none"),
    "mla_rope_dim": Key("COUNT", "rotary numbers beside the latent ones"),
}

POOL = {
    "name": Key("NAME", "what clients call the pool by"),
    **SPEC,
    "model_config": Key("PATH", "a model's config.json that says layers, kv_heads, head_dim and dtype"),
    "pages": Key("COUNT", "pages of the pool"),
    "device_bytes": Key("BYTES", "memory of the pool (of each rank), instead of pages"),
    "decode_reserve_pages": Key("PAGES", "pages that extend may use and reserve may not"),
    "session_floor_pages": Key("PAGES", "pages each session can always get"),
    "session_cap_pages": Key("PAGES", "most private pages of a session; 0: no cap"),
    "namespaces": Key("COUNT", "namespaces the pool can tell apart at a time"),
    "policy": Key("NAME", "which cached pages leave first: lru, lfu, fifo, s3fifo"),
    "ranks": Key("COUNT", "processes that hold the pool together, each with an arena of this shape"),
    "host_pages": Key("PAGES", "pages of the host tier, where cold pages go; 0: none"),
    "host_bytes": Key("BYTES", "memory of the host tier (of each rank), instead of host_pages"),
    "host_staging_pages": Key("PAGES", "pages of the host tier beside those, for what passes through"),
    "reclaim_pages": Key("PAGES", "coldest pages to be free or copied ahead of need; -1: an eighth with a host tier"),
    "host_write": Key("NAME", "when pages are copied to the host tier: back (before they leave), through (at once)"),
    "host_load_min_tokens": Key("TOKENS", "fewer than this are computed again rather than loaded from the host tier"),
    "pin_limit_pages": Key("PAGES", "most pages that are pinned at a time; -1: an eighth of the pool"),
    "namespace_floor_pages": Key("PAGES", "pages of each namespace that no other one makes leave"),
    "namespace_cap_pages": Key("PAGES", "most pages of a namespace, cached ones too; 0: no cap"),
    "device": Key("NAME", "where the pages are: cpu, cuda, cuda:0, cuda:GPU-UUID, one a rank: cuda:0+1"),
}

TABLES = {"server": SERVER, "limits": LIMITS, "events": EVENTS}

BYTE_KEYS = frozenset(name for table in (SERVER, LIMITS, POOL) for name, key in table.items() if key.unit == "BYTES")


def field_types(kind: type) -> dict[str, str]:
    """Names and types, as written, of a settings dataclass."""
    return {field.name: str(field.type) for field in fields(kind)}


TYPES = {
    **{f"server.{name}": kind for name, kind in field_types(ServerConfig).items()},
    **{f"limits.{name}": kind for name, kind in field_types(Limits).items()},
    **{f"events.{name}": kind for name, kind in field_types(EventsConfig).items()},
    **{f"pool.{name}": kind for kind_of in (KVSpec, PoolConfig) for name, kind in field_types(kind_of).items()},
    "pool.device_bytes": "int",
    "pool.host_bytes": "int",
}


def default_of(key: str) -> object:
    """The default of ``server.lease_s``, ``limits.tokens`` or ``pool.layers``; None where there is none of its own."""
    table, _, name = key.partition(".")
    owners: dict[str, tuple[object, ...]] = {
        "server": (ServerConfig(),), "limits": (Limits(),), "events": (EventsConfig(),),
        "pool": (PoolConfig(), KVSpec()),
    }  # fmt: skip
    return next((getattr(owner, name) for owner in owners[table] if hasattr(owner, name)), None)


def unknown(key: str, known: Iterable[str], where: str) -> ConfigError:
    """The error for a name that is no setting: says which are near, then which there are."""
    names = list(known)
    near = get_close_matches(key, names, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return ConfigError(f"{key!r} (from {where}) is not a known key; {hint}allowed: {', '.join(names)}")
