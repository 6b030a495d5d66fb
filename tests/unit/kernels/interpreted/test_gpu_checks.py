"""The checks that a GPU will run, made small: so that the script is right before it meets one."""

import pytest
import torch

from bench import gpu
from bench.gpu import CHECKS, Check, _random_case
from bench.kernel_cases import Shape, assert_near
from bench.stopwatch import summarize
from radixkv.kernels import decode_attention


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_small(check: Check) -> None:
    torch.manual_seed(0)
    check("cpu", True)


def test_what_is_timed_is_right() -> None:
    case = _random_case(Shape([64, 64]), "cpu")
    assert_near(
        decode_attention(*case.arguments, return_lse=True, impl="triton"),
        decode_attention(*case.arguments, return_lse=True, impl="torch"),
        torch.float32,
    )


def test_each_timed_shape_gives_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    monkeypatch.setattr(gpu, "TIMED", {"small": Shape([64, 64])})
    monkeypatch.setattr(gpu, "_time", lambda launch: launches.append(launch()) or summarize([2.0]))  # no clock here
    rows = list(gpu.timings("cpu"))
    assert [(row.name, row.value) for row in rows] == [
        ("gpu.decode_small_us", 2.0),
        ("gpu.decode_small_gbps", 2 * 128 * 2 * 64 * 4 / 2.0 / 1e3),
    ]
    dense, mine = launches
    torch.testing.assert_close(dense[:, :, 0], mine, atol=2e-5, rtol=2e-5)
