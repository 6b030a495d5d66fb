"""``radixkv doctor`` where there is a CUDA driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from radixkv.cli.app import main
from radixkv.device import cuda_driver


def doctor_in(environment: dict[str, str], *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "radixkv", "doctor", "--json", *arguments]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    return ran.returncode, {check["name"]: check for check in json.loads(ran.stdout)["checks"]}


def test_devices_and_what_pools_want_of_them(control: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["doctor", "--json", *arguments])
        return code, {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}

    device = cuda_driver.devices()[0]
    code, found = doctor("--pool", f"device=cuda:{device.uuid},pages=16", "--pool", "name=far,device=cuda:9")
    assert code == 1
    assert found["cuda"]["status"] == "ok" and "driver for CUDA 13.0, cuda-bindings" in found["cuda"]["detail"]
    assert found["cuda:0"]["status"] == "ok" and device.uuid in found["cuda:0"]["detail"]
    assert found["pool far"]["status"] == "fail" and "no CUDA device 9" in found["pool far"]["detail"]
    code, found = doctor("--pool", "device=cuda:1,device_bytes=2GiB")
    assert code == 1 and "2.0 GiB" in found["cuda:1 memory"]["detail"]


def test_a_device_without_what_sharing_takes_is_told(control: Any) -> None:
    code, found = doctor_in({"FAKE_CUDA_WITHOUT": "vmm"}, "--pool", "device=cpu,pages=16")
    assert (code, found["cuda:0"]["status"]) == (0, "warn") and "device=cpu" in found["cuda:0"]["fix"]


def test_no_device_at_all(control: Any) -> None:
    code, found = doctor_in({"FAKE_CUDA_DEVICES": "0"}, "--pool", "device=cuda,pages=16")
    assert code == 1 and found["cuda"]["status"] == "fail" and "CUDA_ERROR_NO_DEVICE" in found["cuda"]["detail"]
