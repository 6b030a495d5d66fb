"""The checks and timings that a GPU will run, made small: so that the script is right before it meets one."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from bench import gpu_checks, gpu_times
from bench.gpu_checks import CHECKS, Check, main, name_of
from bench.gpu_peers import peers
from bench.kernel_cases import Shape, assert_near, random_case
from bench.stopwatch import summarize
from radixkv.kernels import decode_attention

ALIKE = {f"random_problems_from_{first}" for first in range(10, 80, 10)} | {"decode_kinds_float16"}
"""Parts of a check whose code others of its parts run already."""


@pytest.mark.parametrize("check", [check for check in CHECKS if name_of(check) not in ALIKE], ids=name_of)
def test_small(check: Check) -> None:
    torch.manual_seed(0)
    check("cpu", True)


def test_a_check_by_itself_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["copy_rows", "cpu"]) == 0
    monkeypatch.setattr(gpu_checks, "copy_rows", lambda pages, rows, impl: pages.fill_(1.0 if impl == "torch" else 2.0))
    assert main(["copy_rows", "cpu"]) == 1
    assert "AssertionError" in capsys.readouterr().err


def test_what_is_timed_is_right() -> None:
    for quantized in ("", "int8"):
        case = random_case(Shape([64, 64], queries=2, quantized=quantized), "cpu")
        assert_near(
            decode_attention(*case.arguments, return_lse=True, impl="triton"),
            decode_attention(*case.arguments, return_lse=True, impl="torch"),
            torch.float32,
        )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """What the timed launches gave back. There is no device's clock here: each takes 2 microseconds."""
    results: list[torch.Tensor] = []
    monkeypatch.setattr(gpu_times, "_time", lambda launch: results.append(launch()) or summarize([2.0]))
    return results


def test_each_timed_shape_gives_its_rows(monkeypatch: pytest.MonkeyPatch, launched: list[torch.Tensor]) -> None:
    monkeypatch.setattr(gpu_times, "TIMED", {"gqa_b64_4k": Shape([64, 64])})
    for other in ("_shared_prefix", "_uneven", "_latent", "_others", "_layouts"):
        monkeypatch.setattr(gpu_times, other, lambda device: iter(()))
    left_out: list[str] = []
    rows = {row.name: row for row in gpu_times.timings("cpu", left_out, 1000)}
    assert [each.split(":")[0] for each in left_out] == ["flashinfer", "flash_attention"]
    moved = 2 * 128 * 2 * 64 * 4
    assert {name: row.value for name, row in rows.items()} == {
        "gpu.copy_gbps": 1.0,
        "gpu.decode_gqa_b64_4k_us": 2.0,
        "gpu.decode_gqa_b64_4k_gbps": moved / 2.0 / 1e3,
        "gpu.decode_gqa_b64_4k_of_copy": moved / 2.0 / 1e3,
    }
    assert rows["gpu.decode_gqa_b64_4k_of_copy"].ok
    _, mine, dense = launched
    torch.testing.assert_close(dense[:, :, 0], mine, atol=2e-5, rtol=2e-5)


def test_the_other_timed_launches_are_right(launched: list[torch.Tensor]) -> None:
    assert [row.name for row in gpu_times._shared_prefix("cpu", Shape([40] * 3), 2)] == ["gpu.decode_shared_prefix_us"]
    torch.testing.assert_close(launched[1], launched[0], atol=2e-5, rtol=2e-5)
    assert len(list(gpu_times._uneven("cpu", Shape([100], 1, 1), 20, 3))) == 1
    torch.testing.assert_close(launched[3][0], launched[2][0], atol=2e-5, rtol=2e-5)
    assert len(list(gpu_times._others("cpu", 8))) == 3
    assert [row.name for row in gpu_times._latent("cpu", 2, 32, 16)] == [
        "gpu.decode_latent_us",
        "gpu.decode_latent_gbps",
    ]


def test_both_layouts_hold_the_same_problem(launched: list[torch.Tensor]) -> None:
    shape = Shape([40, 40], 2, 1, 64, 16, torch.float32)
    rows = list(gpu_times._layouts("cpu", shape, 2))
    assert [row.name for row in rows] == ["gpu.decode_2_layers_page_major_us", "gpu.gather_page_major_us"]
    decoded = launched[::2]
    assert decoded[0].shape == decoded[1].shape == (2, 2, 64)
    assert not torch.equal(decoded[0], decoded[1]), "the same memory means other pages in each layout"


def test_peers_are_given_the_same_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the signatures that the projects document, which compute what those say by the torch reference."""

    def flash(q, keys, values, *, cache_seqlens, block_table):  # type: ignore[no-untyped-def]
        return decode_attention(q[:, 0], keys, values, block_table, cache_seqlens, impl="torch")[:, None]

    class Wrapper:
        def __init__(self, workspace, layout, use_tensor_cores):  # type: ignore[no-untyped-def]
            assert layout == "NHD"

        def plan(self, indptr, indices, last, heads, kv_heads, dim, page_size, *, q_data_type, kv_data_type):  # type: ignore[no-untyped-def]
            self.table = indices.view(len(last), -1)
            self.lengths = (indptr.diff() - 1) * page_size + last

        def run(self, q, cache):  # type: ignore[no-untyped-def]
            return decode_attention(q, *cache, self.table, self.lengths.int(), impl="torch")

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=flash))
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper))
    shape = Shape([300, 300], 4, 2, 64, 16, torch.float32)
    case = random_case(shape, "cpu")
    wanted = decode_attention(*case.arguments, impl="torch")
    left_out: list[str] = []
    made = dict(peers(case, shape, left_out))
    assert (list(made), left_out) == (["flashinfer", "flash_attention"], [])
    for launch in made.values():
        torch.testing.assert_close(launch().view_as(wanted), wanted)

    def refuses(*arguments: object, **named: object) -> None:
        raise ValueError("not on this device")

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_with_kvcache=refuses))
    assert [name for name, _ in peers(case, shape, left_out)] == ["flashinfer"]
    assert left_out == ["flash_attention: ValueError: not on this device"]
