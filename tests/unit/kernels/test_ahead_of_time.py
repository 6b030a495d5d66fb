"""The kernels compile for sm_90 (H100, H200), keep everything in registers and read widely. Needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.compiled import TARGETS
from bench.kernel_budgets import least_warps, resident_warps
from bench.kernels_report import FEW, REPORT, configs, sources_hash

ROOT = Path(__file__).parents[3]


def test_the_kernels_compile_for_sm_90_and_spill_nothing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.kernels_report", "--few"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = [json.loads(line) for line in done.stdout.splitlines()]

    canary = built.pop()
    assert canary["name"] == "canary"
    assert canary["spilled"] > 0, "a kernel that must spill was not seen to"

    assert tuple(each["name"] for each in built) == FEW
    assert {configs()[name].pick for name in FEW} == {
        "plan", "attend", "merge", "append_tokens", "append_quantized", "copy_page_rows", "move_pages",
    }  # fmt: skip
    assert [each for each in built if each["faults"]] == []
    wide = {each["name"]: each["wide_loads"] for each in built}
    assert wide["decode bf16 32/8 d128"] >= 8, "pages are read 16 bytes at a time"
    assert wide["gather fp32 d128"] >= 2


def test_the_report_in_the_docs_is_of_these_sources_and_clean() -> None:
    report = REPORT.read_text()
    assert f"`{sources_hash()}`" in report, "the kernels have changed: make kernels-report"
    rows = [
        row for row in (line.split("|") for line in report.splitlines()) if len(row) == 11 and row[2].strip() in TARGETS
    ]
    assert len(rows) == sum(len(config.targets) for config in configs().values())
    assert {row[6].strip() for row in rows} == {"0"}
    for row in rows:
        name, target, block, warps, registers, _, shared_kib, *_ = (cell.strip() for cell in row[1:-1])
        if block:
            fit = resident_warps(target, int(warps), int(registers), int(shared_kib) * 1024)
            assert fit >= least_warps(name), (name, target)


def test_the_budget_counts_what_fits_on_a_processor() -> None:
    assert resident_warps("sm_90", 4, 128, 0) == 16
    assert resident_warps("sm_90", 4, 129, 0) == 12
    assert resident_warps("sm_90", 4, 16, 75 * 1024) == 12, "shared memory for three"
    assert resident_warps("sm_90", 8, 255, 0) == 8
    assert resident_warps("sm_90", 16, 129, 0) == 0
    assert resident_warps("gfx942", 4, 128, 16 * 1024) == 16
