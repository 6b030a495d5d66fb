"""``radixkv plan``: how many bytes a token of a model takes, and how many tokens fit into so much memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from radixkv.cli import model_config, sizes
from radixkv.cli.flags import JsonFlag, SpecFlags, given
from radixkv.cli.pools import pages_in
from radixkv.cli.values import read, refuse
from radixkv.config import DEFAULT_DEVICE_BYTES, KVSpec
from radixkv.errors import ConfigError


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class RoomFlags:
    device_bytes: Annotated[
        str | None, Parameter(help="memory for pages, as in 24GiB [default: 512MiB]", metavar="BYTES")
    ] = None
    tokens: Annotated[str | None, Parameter(help="instead: how much memory this many tokens take", metavar="COUNT")] = (
        None
    )


def plan(
    config: Annotated[Path | None, Parameter(help="a model's config.json", metavar="CONFIG.json")] = None,
    /,
    *,
    spec: SpecFlags = SpecFlags(),
    room: RoomFlags = RoomFlags(),
    as_json: JsonFlag = False,
) -> int:
    """Say how much memory a model's KV cache takes.

    The model is described by its config.json, by flags, or by both: flags win. Without either, the default pool is
    planned (SmolLM2-135M in float32).
    """
    chosen = spec_of(config, given(spec))
    figures = plan_of(chosen, pages_of(chosen, room))
    print(json.dumps(figures) if as_json else as_table(chosen, figures))
    return 0


def spec_of(config: Path | None, flags: dict[str, str]) -> KVSpec:
    """The KV spec that a config.json and flags describe. Errors: ConfigError names what is missing or wrong."""
    written = {name: read(f"pool.{name}", text) for name, text in flags.items()}
    if config is not None:
        return model_config.spec_of(config, written)
    shape = ("layers",) if written.get("mla_latent_dim") else ("layers", "kv_heads", "head_dim")
    missing = [name for name in shape if name not in written]
    if missing and written.keys() & {"layers", "kv_heads", "head_dim", "mla_latent_dim", "mla_rope_dim"}:
        raise ConfigError(f"missing: {_as_flags(missing)}; give a config.json or all of {_as_flags(shape)}")
    return KVSpec(**written)  # type: ignore[arg-type] # KVSpec itself checks every value


def _as_flags(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def pages_of(spec: KVSpec, room: RoomFlags) -> int:
    """How many pages fit into --device-bytes, or are needed for --tokens. Errors: ConfigError."""
    if room.tokens is None:
        text = room.device_bytes
        size = DEFAULT_DEVICE_BYTES if text is None else read("pool.device_bytes", text)
        return pages_in(size, spec, "--device-bytes")
    if room.device_bytes is not None:
        raise ConfigError("--tokens and --device-bytes exclude each other")
    if not room.tokens.isdecimal() or int(room.tokens) == 0:
        raise refuse("tokens", room.tokens, "a whole number from 1")
    return -(-int(room.tokens) // spec.page_size)


def plan_of(spec: KVSpec, pages: int) -> dict[str, Any]:
    """What is printed: bytes, pages, tokens (= pages * page_size)."""
    return {
        "bytes_per_token": spec.bytes_per_token,
        "page_bytes": spec.page_bytes,
        "pages": pages,
        "tokens": pages * spec.page_size,
        "pool_bytes": pages * spec.page_bytes,
    }


def as_table(spec: KVSpec, figures: dict[str, Any]) -> str:
    """The same for people: the shape, then one figure a line with its unit."""
    attention = (
        f"multi-head latent attention: {spec.mla_latent_dim} latent + {spec.mla_rope_dim} rotary dims"
        if spec.is_mla
        else f"{spec.kv_heads} KV heads of dim {spec.head_dim}"
    )
    lines = [
        f"{spec.layers} layers, {attention}, {spec.dtype}, {spec.page_size} tokens a page",
        "",
        f"  a token   {figures['bytes_per_token']:>16,} bytes  ({sizes.show(figures['bytes_per_token'])})",
        f"  a page    {figures['page_bytes']:>16,} bytes  ({sizes.show(figures['page_bytes'])})",
        f"  the pool  {figures['pool_bytes']:>16,} bytes  ({sizes.show(figures['pool_bytes'])})",
        "",
        f"  {figures['pages']:,} pages hold {figures['tokens']:,} tokens.",
    ]
    if spec.is_mla:
        lines.append("  Pools of latent pages cannot be served yet; the figures are for planning.")
    return "\n".join(lines)
