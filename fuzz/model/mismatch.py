"""What a fuzzer says when the real thing and the model part ways: an invariant's name and a sentence."""

from __future__ import annotations

from typing import Any


class Mismatch(AssertionError):
    """The real thing did not do what the model says. ``name`` is the invariant (I1..I28) that this breaks."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


def expect(name: str, what: str, actual: Any, expected: Any) -> None:
    """Raise Mismatch unless both are equal."""
    if actual != expected:
        raise Mismatch(name, f"{what}: got {actual!r}, the model says {expected!r}")


def require(name: str, truth: bool, message: str) -> None:
    """Raise Mismatch unless ``truth``."""
    if not truth:
        raise Mismatch(name, message)
