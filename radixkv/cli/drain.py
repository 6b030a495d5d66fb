"""``radixkv drain``: end the daemon in good order; under a keeper the next one goes on with everything."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Annotated, Any

from cyclopts import Parameter

from radixkv.cli import ask
from radixkv.cli.flags import EndpointFlag, JsonFlag
from radixkv.cli.values import refuse
from radixkv.commands import Shutdown
from radixkv.errors import Unavailable
from radixkv.ipc import question
from radixkv.ipc.endpoint import Endpoint, is_claimed, is_listening, resolve

ANSWER_S = 2.0
"""How long one question may take."""
LOOK_AGAIN_S = 0.02
GAVE_UP = "its keeper (or systemd) has given up as well; the log says why"


def drain(
    *,
    endpoint: EndpointFlag = None,
    as_json: JsonFlag = False,
    timeout: Annotated[float, Parameter(help="seconds to wait for the end of it", metavar="SECONDS")] = 60.0,
) -> int:
    """End the daemon in good order, and wait until it is done.

    Under a keeper (`serve --supervised`, or systemd's store) the next daemon, of whatever version is installed by then,
    goes on with all pages and sessions: this is how radixkv is upgraded. Without one it is as SIGTERM: nothing new is
    taken, what runs has drain_s seconds, the pages are gone. Exit code 1 if the next daemon, or the end, does not come.

    With --json one object: `old_boot_id`; `boot_id`, of the daemon that goes on (null: none does); `same_cache`,
    whether it has kept the pages; `seconds`.
    """
    if not 0.1 <= timeout <= 86400:
        raise refuse("timeout", timeout, "seconds from 0.1 to 86400")
    begin = time.monotonic()
    where = resolve(endpoint)
    old = ask.stats(where, ANSWER_S)
    question.ask(where, Shutdown(), ANSWER_S)
    new = _await_change(where, old, begin + timeout)
    found = {
        "old_boot_id": old["boot_id"],
        "boot_id": None if new is None else new["boot_id"],
        "same_cache": new is not None and new["cache_id"] == old["cache_id"],
        "seconds": round(time.monotonic() - begin, 3),
    }
    print(json.dumps(found) if as_json else _as_text(where, found))
    return 0


def _await_change(where: Endpoint, old: dict[str, Any], until: float) -> dict[str, Any] | None:
    """What the next daemon says of itself; None when there is to be none.

    Errors: Unavailable when time is up, or when the one that was to go on does not.
    """
    kept, boot_id = old.get("kept", False), old["boot_id"]
    while time.monotonic() < until:
        if not is_listening(where.path) and not is_claimed(where):
            if kept:
                raise Unavailable(f"the daemon at {where.address} has ended and no next one goes on: {GAVE_UP}")
            return None
        with contextlib.suppress(Unavailable):
            found = ask.stats(where, min(ANSWER_S, max(LOOK_AGAIN_S, until - time.monotonic())))
            if found["boot_id"] != boot_id:
                return found
        time.sleep(LOOK_AGAIN_S)
    state = "no next one serves yet: its keeper's log says why" if kept else "is not done yet"
    raise Unavailable(f"the daemon at {where.address} has been asked to end and {state}")


def _as_text(where: Endpoint, found: dict[str, Any]) -> str:
    if found["boot_id"] is None:
        return f"the daemon at {where.address} has ended, after {found['seconds']:.1f} s"
    kept = "all pages and sessions" if found["same_cache"] else "empty pools"
    return f"another daemon goes on at {where.address} with {kept}, after {found['seconds']:.1f} s"
