"""Groups of flags that commands share, each a frozen dataclass that cyclopts fills in.

Every value arrives as text and is read by ``settings``, like the environment's and the files', so that a wrong one is
refused in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from radixkv.cli.keys import EVENTS, LIMITS, SERVER, SPEC, Key, default_of


def _flag(key: str, table: Mapping[str, Key], *, default: bool = True) -> Parameter:
    meaning = table[key.partition(".")[2]]
    value = default_of(key)
    number = f"{value:g}" if isinstance(value, float) else str(value)
    shown = f" [default: {number}]" if default and number else ""
    return Parameter(help=meaning.meaning + shown, metavar=meaning.unit)


def switch(meaning: str, name: str | None = None) -> Parameter:
    """A flag without a value, off unless it is written. ``name``: when the argument's own will not do."""
    return Parameter(name=name, help=meaning, negative="", show_default=False)


JsonFlag = Annotated[bool, Parameter(name="json", help="print one JSON object", negative="", show_default=False)]

EndpointFlag = Annotated[
    str | None,
    Parameter(
        help="where the daemon is, ipc://PATH [default: $RADIXKV_ENDPOINT, else the user's runtime directory]",
        metavar="ADDRESS",
    ),
]


def given(flags: object) -> dict[str, str]:
    """The flags that were written on the command line, by name."""
    names = getattr(type(flags), "__dataclass_fields__", {})
    return {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ServerFlags:
    endpoint: Annotated[str | None, _flag("server.endpoint", SERVER)] = None
    lease_s: Annotated[str | None, _flag("server.lease_s", SERVER)] = None
    heartbeat_s: Annotated[str | None, _flag("server.heartbeat_s", SERVER)] = None
    resume_timeout_s: Annotated[str | None, _flag("server.resume_timeout_s", SERVER)] = None
    drain_s: Annotated[str | None, _flag("server.drain_s", SERVER)] = None
    keep_replies: Annotated[str | None, _flag("server.keep_replies", SERVER)] = None


@Parameter(name="limits")
@dataclass(frozen=True, slots=True)
class LimitFlags:
    message_bytes: Annotated[str | None, _flag("limits.message_bytes", LIMITS)] = None
    tokens: Annotated[str | None, _flag("limits.tokens", LIMITS)] = None
    batch_items: Annotated[str | None, _flag("limits.batch_items", LIMITS)] = None
    sessions: Annotated[str | None, _flag("limits.sessions", LIMITS)] = None
    queued: Annotated[str | None, _flag("limits.queued", LIMITS)] = None
    sequences_per_session: Annotated[str | None, _flag("limits.sequences_per_session", LIMITS)] = None


@Parameter(name="events")
@dataclass(frozen=True, slots=True)
class EventFlags:
    endpoint: Annotated[str | None, _flag("events.endpoint", EVENTS)] = None
    replay_endpoint: Annotated[str | None, _flag("events.replay_endpoint", EVENTS)] = None
    pool: Annotated[str | None, _flag("events.pool", EVENTS)] = None
    topic: Annotated[str | None, _flag("events.topic", EVENTS)] = None
    format: Annotated[str | None, _flag("events.format", EVENTS)] = None
    hash: Annotated[str | None, _flag("events.hash", EVENTS)] = None
    rank: Annotated[str | None, _flag("events.rank", EVENTS)] = None
    buffer_batches: Annotated[str | None, _flag("events.buffer_batches", EVENTS)] = None
    hwm: Annotated[str | None, _flag("events.hwm", EVENTS)] = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class PoolFlags:
    """Which configuration is meant, by the commands that read one."""

    pool: Annotated[
        tuple[str, ...],
        Parameter(
            help="a pool, as in name=default,layers=1,kv_heads=1,head_dim=8,dtype=float32,page_size=4,pages=8; "
            "once for each pool. [default: one pool that fits SmolLM2-135M, 512 MiB]",
            metavar="KEY=VALUE,...",
            negative="",
            show_default=False,
        ),
    ] = ()
    config: Annotated[Path | None, Parameter(help="a TOML file; $RADIXKV_CONFIG names it too", metavar="FILE")] = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class SpecFlags:
    layers: Annotated[str | None, _flag("pool.layers", SPEC, default=False)] = None
    kv_heads: Annotated[str | None, _flag("pool.kv_heads", SPEC, default=False)] = None
    head_dim: Annotated[str | None, _flag("pool.head_dim", SPEC, default=False)] = None
    dtype: Annotated[str | None, _flag("pool.dtype", SPEC)] = None
    page_size: Annotated[str | None, _flag("pool.page_size", SPEC)] = None
    mla_latent_dim: Annotated[str | None, _flag("pool.mla_latent_dim", SPEC)] = None
    mla_rope_dim: Annotated[str | None, _flag("pool.mla_rope_dim", SPEC)] = None
