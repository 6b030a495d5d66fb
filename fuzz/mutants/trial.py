"""One mutant: a copy of the tree with one bug more, and what the pure part says to it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fuzz.mutants.patching import DoesNotApply, about, apply, is_empty


@dataclass(frozen=True)
class Trial:
    """``outcome``: caught, survived, passed (of what changes nothing), failed (the same), unusable.

    ``by``: the test that failed, or why the patch cannot be used. ``patch``: its file's name, "" for the tree as it is.
    """

    patch: str
    about: str
    outcome: str
    by: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.outcome in ("caught", "passed")

    def line(self) -> str:
        name = self.patch.rpartition(".")[0] or self.patch or "(no mutant)"
        return f"{'ok' if self.good else 'BAD':<4}{name:<38}{self.outcome:<9}{self.seconds:6.1f} s  {self.by}"


class Way(NamedTuple):
    """How each is tried: what takes longer hangs; only these files of the pure part (none: all of them)."""

    timeout_s: float
    tests: tuple[str, ...] = ()


def try_none(tree: Path, how: Way) -> Trial:
    """The tree as it is: the pure part has to pass. Leaves compiled files behind that copies of the tree can use."""
    started = time.monotonic()
    found = _first_failure(tree, how)
    return Trial("", "the tree as it is", "failed" if found else "passed", found, _since(started))


def try_one(patch: Path, original: Path, how: Way) -> Trial:
    """One patch in a copy of ``original``. Of one that changes nothing the pure part has to pass."""
    name, what = patch.name, about(patch)
    harmless = is_empty(patch)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(original, tree)
        if not harmless:
            try:
                apply(patch, tree)
            except DoesNotApply as error:
                return Trial(name, what, "unusable", str(error), 0.0)
        found = _first_failure(tree, how)
    if harmless:
        return Trial(name, what, "failed" if found else "passed", found, _since(started))
    return Trial(name, what, "caught" if found else "survived", found, _since(started))


def _since(started: float) -> float:
    return round(time.monotonic() - started, 1)


def _first_failure(tree: Path, way: Way) -> str:
    """The test that failed, "" if none did."""
    report = tree / "report"
    command = [sys.executable, "-m", "fuzz.mutants.pure", "--report", str(report), *way.tests]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "HYPOTHESIS_PROFILE"):
        surroundings.pop(name, None)
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=surroundings,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    hung = ""
    try:
        process.wait(way.timeout_s)
    except subprocess.TimeoutExpired:
        hung = f" (no end within {way.timeout_s:g} s)"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0:
        return ""
    test = report.read_text(encoding="utf-8") if report.exists() else "(before the first test)"
    return test + hung
