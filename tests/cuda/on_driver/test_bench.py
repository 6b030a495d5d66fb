"""``bench.gpu_memory`` as it will run on a device: that it does what it says. Its times are none here."""

from __future__ import annotations

from typing import Any

import pytest

from bench import gpu_memory
from radixkv.device import cuda_driver


@pytest.mark.long
def test_checks_and_rows(control: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "WINDOW_BYTES", 16 * 2**20)
    device = cuda_driver.devices()[0]
    assert set(gpu_memory.checks(device).values()) == {"ok"} and len(gpu_memory.checks(device)) == 4
    rows = {row.name.removeprefix("gpu.memory."): row for row in gpu_memory.rows(device)}
    assert {"create", "map", "save_ratio.0.7MB", "load_ratio.4.2MB"} <= set(rows)
    assert rows["save_ratio.4.2MB"].at_least and rows["save_ratio.4.2MB"].bar == gpu_memory.OFFLOAD_BAR
    kill = {what: rows[f"kill.{what}"].value for what in ("pidfd", "eof", "driver", "last_write")}
    assert max(kill.values()) < gpu_memory.LIMIT_S * 1e3, "all of it was seen"
    assert rows["kill.written_words"].value > 0
