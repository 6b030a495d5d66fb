"""Everything that can go wrong, each with a stable code.

::

    RadixKVError
    ├── OutOfPages          out_of_pages       need and available say why
    ├── Timeout             timeout            also a TimeoutError: no reply within the client's time
    ├── StaleHandle         stale_handle       the sequence or ticket is not (any longer) yours
    ├── SessionLost         session_lost       the daemon does not know this session; nothing was executed
    ├── BadRequest          bad_request        the request can never be right
    ├── LimitExceeded       limit_exceeded     larger than a configured limit
    ├── Unavailable         unavailable        no daemon answers at the endpoint
    ├── PermissionDenied    permission_denied  also a PermissionError
    ├── Draining            draining           the daemon takes nothing new
    ├── CopyFailed          copy_failed        a copy between tiers ended badly
    ├── VersionMismatch     version_mismatch   client and daemon speak different protocol versions
    └── Forked              forked             a client opened before fork() was used in the child

``ConfigError`` is raised at start, before there is a daemon, and never crosses the wire. ``BrokenInvariant`` is a
bug in radixkv itself, not an answer: it ends the daemon. With which code ``serve`` ends is ``Exit``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

Detail = int | float | str | bool


class RadixKVError(Exception):
    """Root of all errors a caller may see. ``details`` holds the numbers that explain it."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str = "", **details: Detail) -> None:
        super().__init__(message or self.code)
        self.message = message or self.code
        self.details: dict[str, Detail] = details

    def __getattr__(self, name: str) -> Any:
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_again, (type(self), self.message, self.details))

    def __str__(self) -> str:
        if not self.details:
            return self.message
        numbers = ", ".join(f"{key}={value}" for key, value in self.details.items())
        return f"{self.message} ({numbers})"


def _again(kind: type[RadixKVError], message: str, details: dict[str, Detail]) -> RadixKVError:
    """The same error in another process."""
    return kind(message, **details)


class OutOfPages(RadixKVError):
    """The pool cannot give what was asked for.

    Attributes: need (pages), available (pages: free + evictable now, under this session's floor and cap), waited_s,
    never_fits (True: no wait can help).
    """

    code = "out_of_pages"
    need: int
    available: int
    waited_s: float
    never_fits: bool

    def __init__(
        self,
        message: str = "not enough pages",
        *,
        need: int = 0,
        available: int = 0,
        waited_s: float = 0.0,
        never_fits: bool = False,
        **details: Detail,
    ) -> None:
        super().__init__(message, need=need, available=available, waited_s=waited_s, never_fits=never_fits, **details)


class Timeout(RadixKVError, TimeoutError):
    code = "timeout"


class StaleHandle(RadixKVError):
    code = "stale_handle"


class SessionLost(RadixKVError):
    code = "session_lost"


class BadRequest(RadixKVError):
    code = "bad_request"


class LimitExceeded(RadixKVError):
    code = "limit_exceeded"


class Unavailable(RadixKVError):
    code = "unavailable"


class PermissionDenied(RadixKVError, PermissionError):
    code = "permission_denied"


class Draining(RadixKVError):
    code = "draining"


class CopyFailed(RadixKVError):
    code = "copy_failed"


class VersionMismatch(RadixKVError):
    code = "version_mismatch"


class Forked(RadixKVError):
    code = "forked"


BY_CODE: dict[str, type[RadixKVError]] = {
    kind.code: kind
    for kind in (
        OutOfPages, Timeout, StaleHandle, SessionLost, BadRequest, LimitExceeded, Unavailable, PermissionDenied,
        Draining, CopyFailed, VersionMismatch, Forked,
    )
}  # fmt: skip


def from_code(code: str, message: str, details: dict[str, Detail]) -> RadixKVError:
    """The exception for an error that arrived by wire; an unknown code (a newer daemon) becomes the root class."""
    return BY_CODE.get(code, RadixKVError)(message, **details)


class ConfigError(RadixKVError):
    """A setting that cannot be used: names the key, the value and what is allowed. Ends ``serve`` with exit 2."""

    code = "config"


class BrokenInvariant(Exception):
    """A bug: the recount does not agree. ``name`` is I1..I28 of ARCHITECTURE.md."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class Exit(IntEnum):
    """With what ``radixkv serve`` ends, whether it is the daemon or its keeper."""

    DRAINED = 0
    NO_STORE = 1
    """A store was announced (NOTIFY_SOCKET) and does not answer."""
    CONFIG = 2
    """Configuration or permissions."""
    IN_USE = 3
    """Somebody else serves the endpoint, or uses the memory."""
    MEMORY = 4
    """There is less than the pools need."""
    BROKEN = 70
    """A broken invariant, or any other bug."""
