"""docs/configuration.md against the settings themselves: every key, its default, what is allowed."""

import re
from pathlib import Path

import pytest

from radixkv.cli import settings
from radixkv.cli.keys import EVENTS, LIMITS, POOL, SERVER, default_of
from radixkv.config import Config
from radixkv.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
TABLES = {"server": SERVER, "limits": LIMITS, "events": EVENTS, "pool": POOL}
NUMBERS = re.compile(r"^([0-9.,]+) to ([0-9.,]+)")


def rows(heading: str) -> dict[str, tuple[str, str, str]]:
    """The table under a heading: default, allowed and meaning by key."""
    section = PAGE.partition(f"## `{heading}`\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cell[0].strip("`"): (cell[1].strip("`"), cell[2], cell[3]) for cell in cells}


WRITTEN = {"server": rows("[server]"), "limits": rows("[limits]"), "events": rows("[events]"), "pool": rows("[[pool]]")}
KEYS = [f"{table}.{key}" for table, keys in TABLES.items() for key in keys]
BOUNDED = [
    (f"{table}.{key}", written[1])
    for table in ("server", "limits")
    for key, written in WRITTEN[table].items()
    if NUMBERS.match(written[1])
]


@pytest.mark.parametrize("table", TABLES)
def test_every_key_has_its_row_and_every_row_its_key(table: str) -> None:
    assert list(WRITTEN[table]) == list(TABLES[table])


@pytest.mark.parametrize("key", KEYS)
def test_the_default_is_the_real_one(key: str) -> None:
    table, _, name = key.partition(".")
    default, _, meaning = WRITTEN[table][name]
    value = default_of(key)
    assert default == ("" if value is None else str(value))
    assert len(meaning) > 10


def test_every_server_key_and_limit_has_bounds_but_the_endpoint() -> None:
    assert len(BOUNDED) == len(SERVER) + len(LIMITS) - 1


@pytest.mark.parametrize(("key", "allowed"), BOUNDED)
def test_the_bounds_are_the_real_ones(tmp_path: Path, key: str, allowed: str) -> None:
    found = NUMBERS.match(allowed)
    assert found is not None
    low, high = (float(bound.replace(",", "")) for bound in found.groups())
    companion = {"server.lease_s": {"server.heartbeat_s": "0.01"}, "server.heartbeat_s": {"server.lease_s": "86400"}}

    def load(value: float) -> Config:
        flags = {**companion.get(key, {}), key: f"{value:.12g}"}
        return settings.load(flags, [], {}, system_file=tmp_path / "none")

    step = 1 if key.startswith("limits.") or key == "server.keep_replies" else 0.001
    for value in (low, high):
        table, _, name = key.partition(".")
        assert getattr(getattr(load(value), table), name) == value
    for value in (low - step, high + step):
        with pytest.raises(ConfigError, match=key):
            load(value)


def test_the_example_file_is_right(tmp_path: Path) -> None:
    example = PAGE.partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "llama").mkdir()
    model = '{"num_hidden_layers": 32, "num_attention_heads": 8, "hidden_size": 1024, "dtype": "bfloat16"}'
    (tmp_path / "llama" / "config.json").write_text(model)
    path = tmp_path / "radixkv.toml"
    path.write_text(example)
    config = settings.load({}, [], {}, config=path, system_file=tmp_path / "none")
    assert config.server.lease_s == 30
    assert config.limits.message_bytes == 8 * 2**20
    assert [pool.name for pool in config.pools] == ["default", "small"]
    assert config.pools[0].spec.layers == 32


def test_the_example_refusal_is_the_real_one(tmp_path: Path) -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith("radixkv: "))
    with pytest.raises(ConfigError) as caught:
        settings.load({"server.lease_s": "abc"}, [], {}, system_file=tmp_path / "none")
    assert line == f"radixkv: {caught.value}"
