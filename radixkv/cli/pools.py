"""One pool from its keys: ``--pool name=default,layers=1,pages=8`` or a ``[[pool]]`` table of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from radixkv.cli import model_config, sizes
from radixkv.cli.keys import POOL, SPEC, unknown
from radixkv.cli.values import read, refuse
from radixkv.config import KVSpec, PoolConfig
from radixkv.errors import ConfigError

EXAMPLE = "name=default,layers=30,kv_heads=3,head_dim=64,dtype=float32,page_size=16,pages=728"
PLAIN = (
    "name", "pages", "decode_reserve_pages", "session_floor_pages", "session_cap_pages", "namespaces", "policy",
    "ranks", "host_pages", "host_staging_pages", "reclaim_pages", "host_write", "host_load_min_tokens",
    "pin_limit_pages", "namespace_floor_pages", "namespace_cap_pages", "device",
)  # fmt: skip


def split(text: str, where: str) -> dict[str, object]:
    """The keys of ``name=a,layers=1``. Errors: ConfigError for a part without ``=``, or a key written twice."""
    keys: dict[str, object] = {}
    refused = f"pool = {text!r} (from {where}) is not allowed"
    for part in text.split(","):
        key, sign, value = part.partition("=")
        key = key.strip()
        if not sign:
            raise ConfigError(f"{refused}; allowed: keys and values as in {EXAMPLE}")
        if key in keys:
            raise ConfigError(f"{refused}; {key} is written twice")
        keys[key] = value.strip()
    return keys


def build(keys: Mapping[str, object], where: str, folder: Path) -> PoolConfig:
    """The pool that ``keys`` describe. ``folder``: what a relative ``model_config`` is relative to.

    Errors: ConfigError names key, value, what is allowed, the pool and ``where``.
    """
    for key in keys:
        if key not in POOL:
            raise unknown(key, POOL, where)
    values = {key: read(f"pool.{key}", value) for key, value in keys.items()}
    try:
        return _build(values, folder)
    except ConfigError as error:
        name = values.get("name", PoolConfig().name)
        message = error.message if error.message.startswith("pool.") else f"pool.{error.message}"
        raise ConfigError(f"{message} (pool {name!r}, from {where})") from None


def _build(values: dict[str, object], folder: Path) -> PoolConfig:
    if not isinstance(values.get("name", ""), str):
        raise refuse("pool.name", values["name"], "1 to 64 printable characters")
    spec = _spec(values, folder)
    if spec.is_mla:
        raise refuse("pool.mla_latent_dim", spec.mla_latent_dim, "0 (latent pages are not supported yet)")
    plain = {key: values[key] for key in PLAIN if key in values}
    if plain.get("pages") == 0:
        raise refuse("pool.pages", 0, "a whole number from 1")
    for in_bytes, in_pages in (("device_bytes", "pages"), ("host_bytes", "host_pages")):
        if in_bytes in values:
            if in_pages in values:
                raise refuse(f"pool.{in_bytes}", values[in_bytes], f"{in_pages} or {in_bytes}, not both")
            plain[in_pages] = pages_in(values[in_bytes], spec, f"pool.{in_bytes}")
    return PoolConfig(spec=spec, **plain)  # type: ignore[arg-type] # PoolConfig itself checks every value


def _spec(values: dict[str, object], folder: Path) -> KVSpec:
    written = {key: values[key] for key in SPEC if key in values}
    if "model_config" not in values:
        return KVSpec(**written)  # type: ignore[arg-type] # KVSpec itself checks every value
    path = values["model_config"]
    if not isinstance(path, str) or not path:
        raise refuse("pool.model_config", path, "the path of a model's config.json")
    spec = model_config.spec_of(folder / Path(path).expanduser(), written)
    return spec if "kv_heads" in written else _share_of(spec, values.get("ranks", 1))


def _share_of(model: KVSpec, ranks: object) -> KVSpec:
    """What one of ``ranks`` holds of a model: its share of the heads, or one head that others hold as well."""
    heads = model.kv_heads
    if model.is_mla or not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        return model  # every rank holds all; or PoolConfig refuses it
    if heads % ranks and ranks % heads:
        raise refuse("pool.ranks", ranks, f"a divisor or a multiple of the model's {heads} KV heads")
    return replace(model, kv_heads=max(1, heads // ranks))


def pages_in(size: object, spec: KVSpec, name: str) -> int:
    """How many pages of ``spec`` fit into so many bytes, which were written as ``name``.

    Errors: ConfigError when not even one does.
    """
    near = sizes.near(size) if isinstance(size, str) else None
    hint = f"; did you mean {near}?" if near else ""
    allowed = f"bytes, or a size as in 512MiB, of at least one page ({spec.page_bytes}){hint}"
    if not isinstance(size, int) or isinstance(size, bool) or size < spec.page_bytes:
        raise refuse(name, size, allowed)
    return size // spec.page_bytes
