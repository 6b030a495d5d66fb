"""``radixkv plan``: right figures, from flags and from config.json."""

import json
from pathlib import Path

import pytest

from radixkv.cli.app import main

LARGE = ["--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--dtype", "bfloat16"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, int]:
    assert main(["plan", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    figures: dict[str, int] = json.loads(out)
    return figures


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "bytes_per_token"),
    [
        (LARGE, 327_680),
        (["--layers=80", "--kv-heads=64", "--head-dim=128", "--dtype=float16"], 2_621_440),
        (["--layers=61", "--mla-latent-dim=512", "--mla-rope-dim=64", "--dtype=bfloat16"], 70_272),
        (["--layers=30", "--kv-heads=3", "--head-dim=64", "--dtype=float32"], 46_080),
        ([], 46_080),
        (["--dtype=fp8_e4m3"], 11_520),
        (["--dtype=int8"], 30 * 2 * 208),  # 3 * 64 codes, 3 scales of 4 bytes, up to a multiple of 16
        (["--dtype=int4"], 30 * 2 * 112),  # 3 * 32 bytes of codes, 3 * 2 scales of 2 bytes, up to a multiple of 16
        ([*LARGE[:-2], "--dtype=int8"], 80 * 2 * (8 * 128 + 8 * 4)),
        ([*LARGE[:-2], "--dtype=int4"], 80 * 2 * (8 * 64 + 8 * 4 * 2)),
        (["--layers=1", "--kv-heads=1", "--head-dim=80", "--dtype=int4"], 2 * 48),  # groups of 32, 32 and 16
        (["--layers=61", "--mla-latent-dim=512", "--mla-rope-dim=64", "--dtype=fp8_e4m3"], 61 * 576),
    ],
)
def test_bytes_of_a_token(capsys: pytest.CaptureFixture[str], arguments: list[str], bytes_per_token: int) -> None:
    assert planned(capsys, *arguments)["bytes_per_token"] == bytes_per_token


def test_pages_of_quantized_tokens_are_rounded_up_to_256_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "--dtype=int8")["page_bytes"] == 16 * 12_480 == 780 * 256
    figures = planned(capsys, "--dtype=int4", "--page-size=3", "--tokens=4")
    assert figures == {
        "bytes_per_token": 6720,
        "page_bytes": 79 * 256,
        "pages": 2,
        "tokens": 6,
        "pool_bytes": 158 * 256,
    }


def test_memory_for_so_many_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    figures = planned(capsys, *LARGE, "--tokens", "4096")
    assert figures["pool_bytes"] == 1_342_177_280
    assert figures["tokens"] == 4096
    assert planned(capsys, *LARGE, "--tokens", "4097")["tokens"] == 4112


def test_tokens_that_fit_into_so_much_memory(capsys: pytest.CaptureFixture[str]) -> None:
    figures = planned(capsys, *LARGE, "--device-bytes", "1342177280")
    assert figures == {
        "bytes_per_token": 327_680,
        "page_bytes": 5_242_880,
        "pages": 256,
        "tokens": 4096,
        "pool_bytes": 1_342_177_280,
    }
    assert planned(capsys, *LARGE, "--device-bytes", "1342177279")["pages"] == 255


def test_pages_are_rounded_up_to_256_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--layers=1", "--kv-heads=1", "--head-dim=8", "--dtype=float32", "--page-size=5"]
    figures = planned(capsys, *shape, "--device-bytes=1024")
    assert (figures["bytes_per_token"], figures["page_bytes"]) == (64, 512)
    assert (figures["pages"], figures["tokens"]) == (2, 10)


def test_the_default_is_the_default_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys)["pages"] == 728


def test_a_config_file_and_flags_over_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}))
    assert planned(capsys, str(path), "--dtype=float16", "--kv-heads=8")["bytes_per_token"] == 327_680


def test_the_table_has_every_figure_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LARGE, "--tokens", "4096"]) == 0
    out = capsys.readouterr().out
    assert "80 layers, 8 KV heads of dim 128, bfloat16, 16 tokens a page" in out
    assert "327,680 bytes  (320 KiB)" in out
    assert "1,342,177,280 bytes  (1.25 GiB)" in out
    assert "256 pages hold 4,096 tokens." in out


def test_latent_attention_is_planned_though_it_cannot_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--layers=61", "--mla-latent-dim=512", "--mla-rope-dim=64", "--dtype=float16"]) == 0
    out = capsys.readouterr().out
    assert "512 latent + 64 rotary dims" in out
    assert "cannot be served yet" in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ["--layers=80"],
            "missing: --kv-heads, --head-dim; give a config.json or all of --layers, --kv-heads, --head-dim",
        ),
        (["--kv-heads=8", "--head-dim=128"], "missing: --layers;"),
        (["--mla-latent-dim=512"], "missing: --layers;"),
        (["--layers=x", "--kv-heads=8", "--head-dim=128"], "layers = 'x' is not allowed; allowed: a whole number"),
        ([*LARGE, "--device-bytes=5MB"], "radixkv: --device-bytes = '5MB' is not allowed"),
        ([*LARGE, "--device-bytes=24GB"], "did you mean 24GiB?"),
        ([*LARGE, "--device-bytes=5"], "at least one page (5242880)"),
        ([*LARGE, "--tokens=0"], "tokens = '0' is not allowed; allowed: a whole number from 1"),
        ([*LARGE, "--tokens=1", "--device-bytes=1GiB"], "--tokens and --device-bytes exclude each other"),
        (["/no/config.json"], "'/no/config.json' cannot be read: No such file or directory"),
        (
            [*LARGE[:-2], "--dtype=int2"],
            "dtype = 'int2' is not allowed; allowed: float32, float16, bfloat16, fp8_e4m3, int8, int4",
        ),
        (
            ["--layers=1", "--kv-heads=1", "--head-dim=63", "--dtype=int4"],
            "head_dim = 63 is not allowed; allowed: an even",
        ),
        (["--layer=3"], "--layer"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert part in refused(capsys, *arguments)
