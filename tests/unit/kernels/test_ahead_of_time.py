"""The kernels compile for sm_90 (H100, H200), keep everything in registers and read widely. Needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def test_the_kernels_compile_for_sm_90_and_spill_nothing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "ahead_of_time.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = [json.loads(line) for line in done.stdout.splitlines()]

    canary = built.pop()
    assert canary["shape"] == "canary"
    assert canary["STACK"] > 0, "a kernel that must spill was not seen to"

    assert {each["kernel"] for each in built} == {"attend", "merge", "append_tokens", "copy_page_rows"}
    assert sum(each["kernel"] == "attend" for each in built) == 15
    for each in built:
        assert each["STACK"] == each["LOCAL"] == 0, each
        assert each["dynamic_shared"] <= 227 * 1024, each  # what a program may have there
        assert each["kernel"] != "attend" or each["wide_loads"] >= 8, each  # pages are read 16 bytes at a time
