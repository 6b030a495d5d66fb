"""What commands ask a running daemon. It takes no session: it is answered also by one that is full, or drains."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from radixkv.commands import Statistics, Stats
from radixkv.errors import Unavailable
from radixkv.ipc.endpoint import Endpoint, check_directory, is_claimed, is_listening
from radixkv.ipc.question import ask

HINT = "; start one with `radixkv serve`, or name its address with --endpoint or $RADIXKV_ENDPOINT"


def stats(where: Endpoint, timeout_s: float) -> dict[str, Any]:
    """The daemon's snapshot. Where nobody listens nobody is waited for. Root may ask any user's daemon.

    Errors: Unavailable, which says what to do about it; PermissionDenied.
    """
    if os.getuid() != 0:
        with contextlib.suppress(FileNotFoundError):
            check_directory(where)
    if not is_listening(where.path):
        raise Unavailable(silence(where) or f"no daemon at {where.address}{HINT}")
    try:
        reply = ask(where, Stats(), timeout_s)
    except Unavailable as error:
        raise Unavailable(silence(where) or f"{error}{HINT}") from error
    assert isinstance(reply, Statistics)
    return reply.snapshot


def silence(where: Endpoint) -> str:
    """Of a daemon that is there and has not answered: what is known. Empty: none is there, and one can be started."""
    if is_listening(where.path):
        return (
            f"a daemon is at {where.address} and does not answer: it starts, hangs or is stopped, or its keeper waits "
            "for the next one; see its log"
        )
    if is_claimed(where):
        return (
            f"a daemon has {where.lock_path} and does not listen at {where.address}: it starts or ends, or its socket "
            "was removed; see its log, and end it if it stays so"
        )
    return ""
