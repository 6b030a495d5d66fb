"""Lines on stdout and stderr that never make the daemon wait: what nobody reads is dropped."""

from __future__ import annotations

import os
import select
from typing import Any

import structlog

_STDOUT, _STDERR = 1, 2
LINE_MAX = 4096
"""Bytes of a log line. A pipe that is ready takes this much without blocking (PIPE_BUF)."""
ANNOUNCEMENT_MAX = 64 * 1024
"""Bytes of a line for machines, which is nothing when it is cut. An empty pipe takes this much."""


class Lines:
    """A file of lines over a descriptor. ``patience_ms``: how long to wait for a reader, for a line."""

    def __init__(self, fd: int, longest: int = LINE_MAX) -> None:
        self._fd = fd
        self._longest = longest
        self.patience_ms = 0
        self.dropped = 0

    def write(self, line: str) -> None:
        ready = select.poll()
        ready.register(self._fd, select.POLLOUT)
        try:
            if not any(event & select.POLLOUT for _, event in ready.poll(self.patience_ms)):
                raise BlockingIOError
            os.write(self._fd, line.encode(errors="replace")[: self._longest - 1].rstrip(b"\n") + b"\n")
        except OSError:
            self.dropped += 1

    def flush(self) -> None:
        """Nothing is held back."""


def announce(line: str) -> None:
    """For whoever started the daemon and reads stdout; under a keeper, one line a daemon, read or not."""
    Lines(_STDOUT, ANNOUNCEMENT_MAX).write(line)


def open_log() -> tuple[Any, Lines]:
    """A logger of key=value lines, and the lines themselves."""
    lines = Lines(_STDERR)
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(),
        structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
    ]
    log = structlog.wrap_logger(
        structlog.WriteLogger(lines),  # type: ignore[arg-type]
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger("info"),
    )
    return log, lines
