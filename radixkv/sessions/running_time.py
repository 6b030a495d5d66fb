"""The time a daemon has been running, by a clock that it reads now and then. Pure: the readings come in."""

from __future__ import annotations


class RunningTime:
    """Seconds of running time: between two readings no more than ``step_s`` count.

    A loop that reads the clock at least that often has been stopped when more than that has passed: by a signal, a
    debugger, a machine without memory. Workers could not be heard meanwhile, so that time is held against nobody.
    """

    __slots__ = ("now", "seconds", "step_s")

    def __init__(self, step_s: float, now: float) -> None:
        self.step_s = step_s
        self.now = now
        """The last reading, monotonic seconds."""
        self.seconds = 0.0

    def advance(self, now: float) -> None:
        self.seconds += min(now - self.now, self.step_s)
        self.now = now
