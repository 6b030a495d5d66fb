"""The daemon's configuration from all places it can be written, the first one that has a key wins::

    flag   >   environment   >   --config FILE or $RADIXKV_CONFIG   >   /etc/radixkv.toml   >   default

Keys are looked for one by one; pools as a whole: the first place that names any pool says which pools there are.
Environment variables are ``RADIXKV_SERVER__LEASE_S``, ``RADIXKV_LIMITS__TOKENS``, ``RADIXKV_POOL`` (as ``--pool``,
several with ``;`` between them) and ``RADIXKV_ENDPOINT``, which clients read as well.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixkv.cli import pools
from radixkv.cli.keys import TABLES, unknown
from radixkv.cli.values import read, refuse
from radixkv.config import Config, EventsConfig, Limits, PoolConfig, ServerConfig
from radixkv.errors import ConfigError
from radixkv.ipc import endpoint

SYSTEM_FILE = Path("/etc/radixkv.toml")
PREFIX = "RADIXKV_"


@dataclass(frozen=True, slots=True)
class Source:
    """What one place says: values by ``server.lease_s``, with the name under which it was written there."""

    values: dict[str, object] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    pools: tuple[PoolConfig, ...] = ()


def load(
    flags: Mapping[str, str],
    pool_flags: Sequence[str],
    environment: Mapping[str, str],
    *,
    config: Path | None = None,
    system_file: Path = SYSTEM_FILE,
) -> Config:
    """The configuration that ``serve`` runs with. ``flags``: text by ``server.lease_s``.

    Errors: ConfigError for the first thing that is wrong: the key, the value, where it is from and what is allowed.
    """
    chosen = config or (Path(environment["RADIXKV_CONFIG"]) if environment.get("RADIXKV_CONFIG") else None)
    sources = [from_flags(flags, pool_flags), from_environment(environment)]
    if chosen is not None:
        sources.append(from_file(chosen))
    if system_file.exists():
        sources.append(from_file(system_file))
    return merge(sources)


def from_flags(flags: Mapping[str, str], pool_flags: Sequence[str]) -> Source:
    names = {key: flag_name(key) for key in flags}
    made = tuple(pools.build(pools.split(text, "--pool"), "--pool", Path()) for text in pool_flags)
    return Source(dict(flags), names, made)


def flag_name(key: str) -> str:
    """``server.lease_s`` is ``--lease-s``, ``limits.tokens`` is ``--limits.tokens``."""
    return "--" + key.removeprefix("server.").replace("_", "-")


def from_environment(environment: Mapping[str, str]) -> Source:
    source = Source()
    if environment.get("RADIXKV_ENDPOINT"):
        _put(source, "server.endpoint", environment["RADIXKV_ENDPOINT"], "RADIXKV_ENDPOINT")
    for name, value in environment.items():
        table, sign, key = name.removeprefix(PREFIX).lower().partition("__")
        if not name.startswith(PREFIX) or not sign:
            continue
        if table not in TABLES:
            raise unknown(name, [f"{PREFIX}{known.upper()}__KEY" for known in TABLES], "environment")
        if key not in TABLES[table]:
            raise unknown(name, [f"{PREFIX}{table.upper()}__{known.upper()}" for known in TABLES[table]], "environment")
        _put(source, f"{table}.{key}", value, name)
    texts = [text for text in environment.get("RADIXKV_POOL", "").split(";") if text.strip()]
    made = tuple(pools.build(pools.split(text, "RADIXKV_POOL"), "RADIXKV_POOL", Path()) for text in texts)
    return Source(source.values, source.names, made)


def from_file(path: Path) -> Source:
    """Errors: ConfigError when the file is not there, is no TOML or has a table or key that is none."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config = {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"config = {str(path)!r} is not TOML: {error}") from None
    source = Source()
    for table, keys in content.items():
        if table == "pool":
            continue
        if table not in TABLES:
            raise unknown(table, [*TABLES, "pool"], str(path))
        if not isinstance(keys, dict):
            raise refuse(table, keys, f"a table, written [{table}] (from {path})")
        for key, value in keys.items():
            if key not in TABLES[table]:
                raise unknown(f"{table}.{key}", [f"{table}.{known}" for known in TABLES[table]], str(path))
            _put(source, f"{table}.{key}", value, str(path))
    return Source(source.values, source.names, _file_pools(content.get("pool", []), path))


def _file_pools(tables: object, path: Path) -> tuple[PoolConfig, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise refuse("pool", tables, f"tables, each written [[pool]] (from {path})")
    return tuple(pools.build(table, str(path), path.parent) for table in tables)


def _put(source: Source, key: str, value: object, name: str) -> None:
    source.values[key] = value
    source.names[key] = name


def merge(sources: Sequence[Source]) -> Config:
    """One configuration; the first source that has a key wins."""
    values: dict[str, object] = {}
    names: dict[str, str] = {}
    for source in reversed(sources):
        values |= source.values
        names |= source.names
    try:
        return Config(
            server=ServerConfig(**_of("server", values)),
            limits=Limits(**_of("limits", values)),
            pools=next((source.pools for source in sources if source.pools), (PoolConfig(),)),
            events=EventsConfig(**_of("events", values)),
        )
    except ConfigError as error:
        raise _with_origin(error, names) from None


def _of(table: str, values: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of one dataclass; it checks the values itself."""
    chosen = {key: read(key, value) for key, value in values.items() if key.startswith(f"{table}.")}
    if "server.endpoint" in chosen:
        _check_endpoint(chosen["server.endpoint"])
    return {key.partition(".")[2]: value for key, value in chosen.items()}


def _check_endpoint(value: object) -> None:
    if not isinstance(value, str):
        raise refuse("server.endpoint", value, "ipc:// and an absolute path")
    try:
        endpoint.resolve(value, {})
    except ConfigError as error:
        raise ConfigError(f"server.{error.message}") from None


def _with_origin(error: ConfigError, names: Mapping[str, str]) -> ConfigError:
    key = error.message.partition(" = ")[0]
    return ConfigError(f"{error.message} (from {names[key]})") if key in names else error
