"""bench.gpu as it will run on the day: everything but the device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench import gpu
from bench.gpu_checks import CHECKS, name_of
from bench.rows import Row, single

ROOT = Path(__file__).parents[3]


def test_it_needs_torch_and_triton_alone() -> None:
    """As on a machine without the packages of the daemon and the client."""
    absent = ("zmq", "msgspec", "msgpack", "xxhash", "structlog", "rich", "cyclopts", "transformers", "hypothesis")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); sys.argv = ['bench.gpu', '--json']\n"
    code += "import bench.gpu_checks, runpy; runpy.run_module('bench.gpu', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "skipped: no CUDA device\n")


def test_each_check_is_a_process_and_none_stops_the_others() -> None:
    codes = {
        "right": "pass",
        "wrong": "import sys; sys.exit('0.3 is not 0.4')",
        "dead": "import os; os.abort()",
        "slow": "import threading; threading.Event().wait(60)",
    }
    found = dict(gpu.checked(list(codes), 2.0, lambda name: [sys.executable, "-c", codes[name]]))
    assert found == {
        "right": "ok",
        "wrong": "0.3 is not 0.4",
        "dead": "exit code -6",
        "slow": "not done within the limit of 2 s",
    }
    assert dict(gpu.checked(["late"], 0.0, lambda name: [])) == {"late": "not run: over the limit of 0 s"}


def test_names_are_unique_and_lead_to_their_check() -> None:
    names = [name_of(check) for check in CHECKS]
    assert len(set(names)) == len(names)
    assert gpu.check_command(names[0])[-1] == names[0]


def test_the_report_is_one_document_with_its_bars() -> None:
    report = gpu.Report({"name": "a device"}, {"append": "ok"})
    rows = [single("copy", "GB/s", 3000.0), Row("share", 0.9, "x", bar=0.85, at_least=True), single("late", "us", 1.0)]

    def slow() -> Iterator[Row]:
        yield from rows[:2]

    assert list(gpu.timed(slow(), report)) == rows[:2]
    read = json.loads(report.as_json())
    assert read["ok"]
    assert read["bars"] == [{"name": "share", "value": 0.9, "bar": 0.85, "at_least": True, "ok": True}]
    assert [row["name"] for row in read["rows"]] == ["copy", "share"]
    report.rows.append(Row("bytes", 1.2, "x", bar=1.1))
    assert not report.ok


def test_times_end_at_their_limit_and_with_an_error_of_the_device() -> None:
    report = gpu.Report({})
    rows = [single("first", "us", 1.0), single("second", "us", 1.0)]
    assert list(gpu.timed(iter(rows), report, 0.0)) == rows[:1]
    assert report.left_out == ["rows behind first: over the limit of 0 s"]
    assert report.ok

    def failing() -> Iterator[Row]:
        yield rows[0]
        raise RuntimeError("out of memory")

    report = gpu.Report({})
    assert list(gpu.timed(failing(), report)) == rows[:1]
    assert report.left_out == ["rows behind first: out of memory"]
    assert not report.ok
