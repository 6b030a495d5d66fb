"""Byte counts as people write and read them: ``512 MiB`` in, ``1.25 GiB`` out."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
WRITTEN = re.compile(r"([0-9][0-9_]*)\s*([A-Za-z]*)")


def parse(text: str) -> int | None:
    """Bytes meant by ``"1024"``, ``"512MiB"`` or ``"2 GiB"``; None when the text is no size (``"5 MB"`` is none)."""
    written = WRITTEN.fullmatch(text.strip())
    if written is None or written[2] not in UNITS:
        return None
    return int(written[1].replace("_", "")) * UNITS[written[2]]


def near(text: str) -> str | None:
    """The size that ``"24GB"`` or ``"24g"`` may have meant: ``"24GiB"``; None when the text is nothing of the kind."""
    written = re.fullmatch(r"([0-9][0-9_]*)\s*([KMGT])(i?B)?", text.strip(), re.IGNORECASE)
    return f"{written[1]}{written[2].upper()}iB" if written else None


def show(count: int) -> str:
    """``count`` bytes in the largest unit that leaves at least 1: ``"720 KiB"``, ``"1.25 GiB"``, ``"12 bytes"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= UNITS[unit]:
            return f"{count / UNITS[unit]:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{count} bytes"
