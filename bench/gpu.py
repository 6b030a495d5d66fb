"""``python -m bench.gpu``: on a machine with a CUDA device, every kernel checked, then timed, in under five minutes.

Needs torch and Triton alone, and cuda-bindings for the rows of ``bench.gpu_memory``. ``--json``: one document, bars
included; without, lines for people. Exit 1 if a check failed or did not get its turn, or a bar is missed. Without a
CUDA device it says so and ends well. The rows are explained in docs/kernels.md and docs/cuda.md.

Each check is a process of its own, several at once: Triton compiles for seconds before a kernel runs, and a kernel that
faults takes its process's device context with it, so the others still tell what they find. Times are taken afterwards,
by one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton

from bench.gpu_checks import CHECKS, name_of
from bench.gpu_times import timings
from bench.rows import Row, as_text, wants_json

CHECKS_S, TIMES_S, MEMORY_S = 140.0, 100.0, 55.0
"""Limits: what is not done by then is reported as not done, so that one visit is never longer than five minutes."""
AT_ONCE = min(8, os.cpu_count() or 1)
ROOT = Path(__file__).parents[1]


@dataclass
class Report:
    """What one visit to a device found. ``checks``: "ok", or what is wrong. ``left_out``: what was not measured."""

    device: dict[str, str]
    checks: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return set(self.checks.values()) <= {"ok"} and all(each.ok for each in self.rows)

    def as_json(self) -> str:
        rows = [json.loads(each.as_json()) | {"at_least": each.at_least} for each in self.rows]
        bars = [{key: row[key] for key in ("name", "value", "bar", "at_least", "ok")} for row in rows if row["bar"]]
        return json.dumps(asdict(self) | {"rows": rows, "bars": bars, "ok": self.ok}, indent=1)


def check_command(name: str) -> list[str]:
    return [sys.executable, "-m", "bench.gpu_checks", name]


def checked(
    names: Sequence[str], limit_s: float = CHECKS_S, command: Callable[[str], list[str]] = check_command
) -> Iterator[tuple[str, str]]:
    """(name, "ok" or what is wrong) of each check, in their order."""
    end = time.monotonic() + limit_s

    def result(name: str) -> str:
        left = end - time.monotonic()
        if left <= 0:
            return f"not run: over the limit of {limit_s:.0f} s"
        try:
            done = subprocess.run(command(name), cwd=ROOT, capture_output=True, text=True, check=False, timeout=left)
        except subprocess.TimeoutExpired:
            return f"not done within the limit of {limit_s:.0f} s"
        return "ok" if done.returncode == 0 else done.stderr.strip()[-2000:] or f"exit code {done.returncode}"

    with ThreadPoolExecutor(AT_ONCE) as several:
        yield from zip(names, several.map(result, names), strict=True)


def timed(rows: Iterator[Row], report: Report, limit_s: float = TIMES_S) -> Iterator[Row]:
    """The rows as they come, until the time is over. One that cannot be measured here ends them, and is named."""
    end = time.monotonic() + limit_s
    try:
        for made in rows:
            report.rows.append(made)
            yield made
            if time.monotonic() > end:
                report.left_out.append(f"rows behind {made.name}: over the limit of {limit_s:.0f} s")
                return
    except RuntimeError as error:  # of the device: out of memory, a fault
        report.left_out.append(f"rows behind {report.rows[-1].name if report.rows else 'none'}: {error}")
        report.checks["timings"] = f"{type(error).__name__}: {error}"


def with_memory(report: Report, limit_s: float = MEMORY_S) -> None:
    """What ``bench.gpu_memory`` finds, in a process of its own; it needs cuda-bindings beside torch and Triton."""
    command = [sys.executable, "-m", "bench.gpu_memory", "--json"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        report.checks["memory"] = f"not done within the limit of {limit_s:.0f} s"
        return
    if done.stdout:
        found = json.loads(done.stdout)
        report.checks |= found["checks"]
        report.rows += [Row.from_json(json.dumps(row)) for row in found["rows"]]
    elif done.returncode:
        report.checks["memory"] = done.stderr.strip()[-2000:] or f"exit code {done.returncode}"
    else:
        report.left_out.append(f"memory: {done.stderr.strip()[-300:]}")


def about(device: str) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name, "memory_gib": f"{properties.total_memory / 2**30:.0f}",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))), "torch": torch.__version__,
        "triton": triton.__version__, "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }  # fmt: skip


def main() -> None:
    as_json = wants_json(sys.argv[1:])
    if not torch.cuda.is_available():
        print("skipped: no CUDA device", file=sys.stderr)
        return
    torch.manual_seed(0)
    began = time.monotonic()
    report = Report(about("cuda"))
    print(f"{report.device}; {len(CHECKS)} checks, {AT_ONCE} at once", file=sys.stderr, flush=True)
    for name, found in checked([name_of(check) for check in CHECKS]):
        report.checks[name] = found
        print(f"{'ok' if found == 'ok' else 'FAILED'} {name}{'' if found == 'ok' else ': ' + found}", file=sys.stderr)
    for made in timed(timings("cuda", report.left_out), report):
        print(as_text(made), file=sys.stderr if as_json else sys.stdout, flush=True)
    with_memory(report)
    report.seconds = round(time.monotonic() - began, 1)
    if as_json:
        print(report.as_json())
    if not report.ok:
        failed = [name for name, found in report.checks.items() if found != "ok"]
        missed = [each.name for each in report.rows if not each.ok]
        sys.exit(f"failed: {', '.join(failed) or 'no check'}; bars missed: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
