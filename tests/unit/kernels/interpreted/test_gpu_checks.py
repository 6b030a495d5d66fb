"""The checks and timings that a GPU will run, made small: so that the script is right before it meets one."""

from collections.abc import Iterator

import pytest
import torch

from bench import gpu_times
from bench.gpu_checks import CHECKS, Check
from bench.kernel_cases import Shape, assert_near, random_case
from bench.stopwatch import summarize
from radixkv.kernels import decode_attention


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_small(check: Check) -> None:
    torch.manual_seed(0)
    check("cpu", True)


def test_what_is_timed_is_right() -> None:
    case = random_case(Shape([64, 64], queries=2), "cpu")
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
    for other in ("_shared_prefix", "_uneven", "_others"):
        monkeypatch.setattr(gpu_times, other, lambda device: iter(()))
    rows = {row.name: row for row in gpu_times.timings("cpu", 1000)}
    moved = 2 * 128 * 2 * 64 * 4
    assert {name: row.value for name, row in rows.items()} == {
        "gpu.copy_gbps": 1.0,
        "gpu.decode_gqa_b64_4k_us": 2.0,
        "gpu.decode_gqa_b64_4k_gbps": moved / 2.0 / 1e3,
        "gpu.decode_gqa_b64_4k_of_copy": 1e3 / (moved / 2.0),
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
