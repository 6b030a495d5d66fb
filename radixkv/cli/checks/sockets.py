"""Where the daemon's sockets are or will be, and whether a daemon answers there."""

from __future__ import annotations

import os
from pathlib import Path

from radixkv.cli.ask import silence
from radixkv.cli.checks.check import Check, fail, ok, warn
from radixkv.config import SOCKET_PATH_MAX
from radixkv.errors import PermissionDenied, RadixKVError, Unavailable
from radixkv.ipc.endpoint import Endpoint, check_directory


def directory(endpoint: Endpoint) -> Check:
    """The sockets' directory must be this user's alone; ``serve`` makes it if it is not there."""
    name, where = "runtime directory", endpoint.directory
    try:
        check_directory(endpoint)
    except PermissionDenied as error:
        return fail(name, error.message, f"mend it, or set RADIXKV_ENDPOINT=ipc://PATH outside {where}")
    except FileNotFoundError:
        return _to_be_made(name, where)
    if not os.access(where, os.W_OK | os.X_OK):
        return fail(name, f"{where} cannot be written", f"chmod 700 {where}")
    length = len(os.fsencode(endpoint.attach_path))
    return ok(name, f"{where} is yours; {length} of {SOCKET_PATH_MAX} bytes of a socket's path are used")


def _to_be_made(name: str, where: Path) -> Check:
    above = next(parent for parent in where.parents if parent.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        fix = f"make {where} and give it to this user, or set RADIXKV_ENDPOINT or XDG_RUNTIME_DIR"
        return fail(name, f"{where} does not exist and cannot be made in {above}", fix)
    return ok(name, f"{where} does not exist yet; serve makes it")


def daemon(endpoint: Endpoint, answer: dict[str, object] | RadixKVError) -> Check:
    """``answer``: the daemon's snapshot, or why there is none."""
    if not isinstance(answer, RadixKVError):
        return ok("daemon", f"{answer.get('version')} answers at {endpoint.address}")
    if there := silence(endpoint):
        fix = "see its log on stderr; SIGCONT if it is stopped; SIGTERM, or SIGKILL if it hangs, ends it"
        return fail("daemon", there if isinstance(answer, Unavailable) else f"{there}: {answer.message}", fix)
    return warn("daemon", f"none at {endpoint.address}", "radixkv serve")
