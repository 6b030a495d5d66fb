"""What a daemon says when it finds a bug in itself: the last commands it carried out, and the error."""

from __future__ import annotations

import json
from collections import deque

from radixkv.commands import Command, Request
from radixkv.ipc.log import Lines

COMMANDS_KEPT = 256
WHOLE_BYTES = 2 * 1024
"""Requests larger than this are remembered without their content: most of it would be cut when it is printed, and to
hold on to it makes each request touch memory that no cache has (measured: 7 us a request of 8 KiB)."""

_PRINTED = 2000
"""Characters of a command."""
_PATIENCE_MS = 10
"""How long each line waits for somebody to read stderr."""

_Outline = tuple[int, int, int, type, int]
"""Session, epoch, id, kind and bytes of a large request."""


class LastCommands:
    """A bounded ring; the times are monotonic seconds."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Command | _Outline]] = deque(maxlen=COMMANDS_KEPT)

    def note(self, now: float, command: Command) -> None:
        self._kept.append((now, command))

    def note_request(self, now: float, request: Request, size: int) -> None:
        """``size``: bytes of its frame. Of a large one: who and what, not its content."""
        if size <= WHOLE_BYTES:
            self._kept.append((now, request))
        else:
            outline = (request.session, request.epoch, request.id, type(request.body), size)
            self._kept.append((now, outline))

    def tell(self, lines: Lines) -> None:
        """Write them, oldest first, one JSON object a line."""
        lines.patience_ms = _PATIENCE_MS
        for at, command in self._kept:
            lines.write(json.dumps({"at": at, "command": repr(command)[:_PRINTED]}, ensure_ascii=False))
