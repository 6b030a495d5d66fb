"""A daemon killed between any two stores into its descriptor tables, also in the middle of a numpy store.

The writer's lines are its stores: a trace function ends the command at a chosen line of ``device/writer.py``. Then some
of the words that this very line would have changed are stored all the same, as a kill inside of it would leave them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np

from radixkv.device import writer
from radixkv.device.writer import TableWriter

_FILE = writer.__file__
_WORD = 8


class Killed(BaseException):
    """SIGKILL, as far as Python can show it: no handler may catch this."""


class _Lines:
    """Counts the writer's lines; raises Killed before line number ``limit``."""

    def __init__(self, limit: int | None) -> None:
        self.count = 0
        self._limit = limit

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename == _FILE else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            if self.count == self._limit:
                raise Killed
            self.count += 1
        return self._line


def _run(action: Callable[[], None], limit: int | None) -> int:
    """Lines executed before the end, or before the kill."""
    lines = _Lines(limit)
    before = sys.gettrace()
    sys.settrace(lines)
    try:
        action()
    except Killed:
        pass
    finally:
        sys.settrace(before)
    return lines.count


def _image(tables: Mapping[str, TableWriter]) -> list[bytes]:
    return [table._memory[:] for table in tables.values()]


def _restore(tables: Mapping[str, TableWriter], images: list[bytes]) -> None:
    for table, image in zip(tables.values(), images, strict=True):
        table._memory[:] = image


def kill_during(rng: random.Random, tables: Mapping[str, TableWriter], action: Callable[[], None]) -> str:
    """Let ``action`` write into the tables and die somewhere in it. Says where, for the report."""
    before = _image(tables)
    total = _run(action, None)
    last = rng.randint(0, total)
    _restore(tables, before)
    _run(action, last)
    torn = 0
    if last < total and rng.random() < 0.5:
        here = _image(tables)
        _restore(tables, before)
        _run(action, last + 1)
        beyond = _image(tables)
        _restore(tables, here)
        torn = sum(_mix(rng, table, old, new) for table, old, new in zip(tables.values(), here, beyond, strict=True))
    return f"killed after {last} of {total} lines of the writer" + (f" and {torn} words" if torn else "")


def _mix(rng: random.Random, table: TableWriter, old: bytes, new: bytes) -> int:
    """Store some of the words in which both differ. Returns how many."""
    words = np.frombuffer(new, np.uint64)
    changed = np.nonzero(np.frombuffer(old, np.uint64) != words)[0].tolist()
    some = rng.sample(changed, rng.randint(0, len(changed)))
    for word in some:
        at = word * _WORD
        table._memory[at : at + _WORD] = new[at : at + _WORD]
    return len(some)
