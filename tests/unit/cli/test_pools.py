"""One pool from its keys."""

import json
from pathlib import Path

import pytest

from radixkv.cli import pools
from radixkv.cli.keys import POOL
from radixkv.config import KVSpec, PoolConfig
from radixkv.errors import ConfigError

HERE = Path()


def made(text: str, folder: Path = HERE) -> PoolConfig:
    return pools.build(pools.split(text, "--pool"), "--pool", folder)


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        made(text)
    return str(caught.value)


def test_a_pool_with_every_spec_key() -> None:
    pool = made("name=small,layers=1,kv_heads=2,head_dim=8,dtype=float16,page_size=4,pages=8")
    assert pool.name == "small"
    assert pool.pages == 8
    assert pool.spec == KVSpec(layers=1, kv_heads=2, head_dim=8, dtype="float16", page_size=4)


def test_what_is_not_said_has_its_default() -> None:
    assert made("name=default") == PoolConfig()
    assert made("pages=5") == PoolConfig(pages=5)


def test_reserves_floors_and_caps() -> None:
    text = "pages=100,decode_reserve_pages=10,session_floor_pages=5,session_cap_pages=50,namespaces=7"
    expected = PoolConfig(pages=100, decode_reserve_pages=10, session_floor_pages=5, session_cap_pages=50, namespaces=7)
    assert made(text) == expected


@pytest.mark.parametrize(
    ("size", "pages"), [("737280", 1), ("1474559", 1), ("1MiB", 1), ("512MiB", 728), ("1 GiB", 1456)]
)
def test_device_bytes_are_rounded_down_to_pages(size: str, pages: int) -> None:
    assert made(f"device_bytes={size}").pages == pages


def test_one_rank_and_no_host_tier_may_be_written() -> None:
    assert made("ranks=1,host_pages=0,reclaim_pages=0,pages=2") == PoolConfig(pages=2)


def test_a_host_tier_in_pages_or_bytes() -> None:
    pool = made("pages=16,host_pages=32,host_staging_pages=2,reclaim_pages=3")
    assert pool == PoolConfig(pages=16, host_pages=32, host_staging_pages=2, reclaim_pages=3)
    assert made("pages=16,host_bytes=1474559").host_pages == 1
    assert made("pages=16,host_bytes=1474560").host_pages == 2


def test_memory_of_both_tiers_is_counted_for_every_rank() -> None:
    shape = "layers=1,kv_heads=1,head_dim=8,page_size=4"
    pool = made(f"ranks=2,{shape},device_bytes=1KiB,host_bytes=2KiB,host_staging_pages=1")
    assert (pool.pages, pool.host_pages, pool.host_arena_bytes) == (4, 8, 9 * 256)
    assert pool.machine_bytes == 2 * (1024 + 9 * 256)


@pytest.mark.parametrize(("text", "pages"), [("host_pages=9", 2), ("host_pages=9,reclaim_pages=-1", 2), ("", 0)])
def test_with_a_host_tier_an_eighth_of_the_pages_is_kept_ahead(text: str, pages: int) -> None:
    assert made(f"pages=16,{text}".strip(",")).reclaim_pages == pages


def test_ranks_hold_as_many_pages_each() -> None:
    pool = made("ranks=4,layers=1,kv_heads=1,head_dim=8,page_size=4,device_bytes=1KiB")
    assert (pool.ranks, pool.pages, pool.arena_bytes, pool.machine_bytes) == (4, 4, 1024, 4096)


@pytest.mark.parametrize(("heads", "ranks", "each"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (2, 4, 1), (3, 3, 1)])
def test_a_models_heads_are_shared_out_among_ranks(tmp_path: Path, heads: int, ranks: int, each: int) -> None:
    model = {"num_hidden_layers": 2, "num_attention_heads": 24, "num_key_value_heads": heads, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(model | {"dtype": "float16"}))
    assert made(f"model_config=config.json,ranks={ranks}", tmp_path).spec.kv_heads == each
    assert made(f"model_config=config.json,kv_heads=7,ranks={ranks}", tmp_path).spec.kv_heads == 7, "written: of a rank"


def test_heads_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    model = {"num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 8, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(ConfigError, match=r"pool.ranks = 4 .* 6 KV heads"):
        made("model_config=config.json,ranks=4", tmp_path)


def test_a_model_config_says_the_spec_and_written_keys_win(tmp_path: Path) -> None:
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(model))
    pool = made("model_config=config.json,pages=3", tmp_path)
    assert pool.spec == KVSpec(layers=2, kv_heads=4, head_dim=8, dtype="bfloat16")
    assert made("model_config=config.json,dtype=float32,page_size=32", tmp_path).spec.dtype == "float32"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["pool = ''", "keys and values as in name=default,layers=30"]),
        ("pages", ["keys and values as in"]),
        ("pages=1,pages=2", ["pages is written twice"]),
        ("pags=1", ["'pags' (from --pool) is not a known key", "did you mean pages", "session_cap_pages"]),
        ("pages=0", ["pool.pages = 0", "a whole number from 1"]),
        ("pages=-1", ["pool.pages = -1", "a whole number from 1"]),
        ("pages=many", ["pool.pages = 'many'", "a whole number from 1"]),
        ("pages=", ["pool.pages = ''", "a whole number from 1"]),
        ("name=,pages=1", ["pool.name = ''", "1 to 64 printable characters"]),
        ("layers=0", ["pool.layers = 0", "a whole number from 1 to 4096"]),
        ("dtype=fp8", ["pool.dtype = 'fp8'", "float32, float16, bfloat16, fp8_e4m3, int8, int4"]),
        ("device_bytes=1", ["pool.device_bytes = 1 ", "at least one page (737280)"]),
        ("device_bytes=5MB", ["pool.device_bytes = '5MB'", "a size as in 512MiB"]),
        ("device_bytes=1GiB,pages=1", ["pool.device_bytes", "pages or device_bytes, not both"]),
        ("ranks=0", ["pool.ranks = 0", "a whole number from 1 to 64"]),
        ("ranks=two", ["pool.ranks = 'two'", "a whole number from 1 to 64"]),
        ("host_bytes=1", ["pool.host_bytes = 1 ", "at least one page (737280)"]),
        ("host_bytes=0", ["pool.host_bytes = 0 ", "at least one page (737280)"]),
        ("host_bytes=5MB", ["pool.host_bytes = '5MB'", "a size as in 512MiB"]),
        ("host_bytes=1GiB,host_pages=1", ["pool.host_bytes", "host_pages or host_bytes, not both"]),
        ("host_pages=-1", ["pool.host_pages = -1 ", "a whole number from 0 to 2147482919"]),
        ("host_pages=1,policy=lfu", ["pool.policy = 'lfu'", "lru with a host tier"]),
        ("host_staging_pages=-1", ["pool.host_staging_pages = -1 ", "a whole number from 0"]),
        ("pages=4,reclaim_pages=5", ["pool.reclaim_pages = 5 ", "a whole number from -1 to 4"]),
        ("mla_latent_dim=512", ["pool.mla_latent_dim = 512", "latent pages are not supported yet"]),
        ("pages=4,session_cap_pages=5", ["pool.session_cap_pages = 5", "from 0 to 4"]),
        ("pages=4,decode_reserve_pages=4", ["pool.decode_reserve_pages = 4", "from 0 to 3"]),
        ("name=x,model_config=/no/config.json", ["'/no/config.json' cannot be read", "pool 'x'"]),
        ("model_config=", ["pool.model_config = ''", "the path of a model's config.json"]),
    ],
)
def test_a_wrong_key_is_refused_by_name(text: str, parts: list[str]) -> None:
    message = refusal(text)
    assert "--pool" in message
    for part in parts:
        assert part in message


def test_an_error_says_which_pool_it_was() -> None:
    assert refusal("name=big,pages=0").endswith("(pool 'big', from --pool)")


def test_every_key_is_either_used_or_refused() -> None:
    """No key of the table is silently ignored: writing nonsense to any of them is an error."""
    for key in POOL:
        text = "name=" + "x" * 65 if key == "name" else f"{key}=nonsense"
        assert key in refusal(text)
