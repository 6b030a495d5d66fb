"""The one rule that says whether to load or to compute again, as a table."""

from __future__ import annotations

import pytest

from radixkv.evictor.tiering import worth_loading

GB = 10**9


@pytest.mark.parametrize(
    ("tokens", "load_bytes", "bytes_per_s", "prefill_tokens_per_s", "minimum_tokens", "loads"),
    [
        (0, 0, 0, 0, 0, False),  # nothing to load
        (16, 16, 0, 0, 0, True),  # nothing is known: load
        (16, 16, 1, 0, 0, True),  # of the worker nothing is known
        (16, 16, 0, 1, 0, True),  # nothing has been loaded yet
        (15, 1, 0, 0, 16, False),  # too few
        (16, 1, 0, 0, 16, True),
        (1000, 1 * GB, 1 * GB, 2000.0, 0, False),  # 1 s to load, 0.5 s to compute
        (1000, 1 * GB, 1 * GB, 500.0, 0, True),  # 1 s to load, 2 s to compute
        (1000, 1 * GB, 1 * GB, 1000.0, 0, False),  # as quick: what needs no copy
        (4096, 4096 * 327_680, 25 * GB, 8000.0, 0, True),  # a 70B model over PCIe: 54 ms against 0.5 s
        (4096, 4096 * 46_080, 0.02 * GB, 8000.0, 0, False),  # a slow copy of a small model
        (999, 1, 1e12, 1e-3, 1000, False),  # the minimum stands above everything
    ],
)
def test_loading_is_weighed_against_computing(
    tokens: int, load_bytes: int, bytes_per_s: float, prefill_tokens_per_s: float, minimum_tokens: int, loads: bool
) -> None:
    assert worth_loading(tokens, load_bytes, bytes_per_s, prefill_tokens_per_s, minimum_tokens) is loads
