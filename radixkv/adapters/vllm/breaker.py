"""A circuit breaker: whoever failed is not asked again for a while. Pure: the time comes in as an argument.

::

    closed ──failed──> open ──pause is over──> on trial ──succeeded──> closed
                        ^                          │
                        └────failed, twice as long─┘

On trial one question is let through; while it has no answer yet, all others are refused.
"""

from __future__ import annotations

PAUSE_FIRST_S, PAUSE_MAX_S = 1.0, 30.0


class Breaker:
    """Times are seconds of any monotonic clock."""

    def __init__(self, pause_first_s: float = PAUSE_FIRST_S, pause_max_s: float = PAUSE_MAX_S) -> None:
        self._first = pause_first_s
        self._max = pause_max_s
        self._pause = 0.0
        self._closed_again = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the last question failed."""
        return self._pause > 0

    def lets_through(self, now: float) -> bool:
        """May a question be asked? If the pause is over, this one is on trial: the next ones wait another pause."""
        if not self.is_open:
            return True
        if now < self._closed_again:
            return False
        self._closed_again = now + self._pause
        return True

    def failed(self, now: float) -> None:
        self._pause = min(2 * self._pause, self._max) if self._pause else self._first
        self._closed_again = now + self._pause

    def succeeded(self) -> None:
        self._pause = 0.0
