"""A refused configuration is said once: a keeper that tries again and again tells its daemons what has been said.

::

    keeper ── exec ──> daemon    RADIXKV_KEEPER: where the keeper hears it; RADIXKV_REFUSED: what was said last, hashed
           <── X_RADIXKV_REFUSED=hash ──    by datagram, before the daemon says it (or not) and ends with 2
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Mapping

KEEPER, REFUSED = "RADIXKV_KEEPER", "RADIXKV_REFUSED"
FIELD = "X_RADIXKV_REFUSED"
"""Of the datagram. Other stores ignore what begins with X_."""


def is_known(error: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the daemon before us ended with the same error and has said it. Our keeper, if there is one, hears it."""
    address = environ.get(KEEPER, "")
    if not address:
        return False
    hashed = hashlib.sha256(error.encode(errors="replace")).hexdigest()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.setblocking(False)
        notify.sendto(f"{FIELD}={hashed}".encode(), address)
    return hashed == environ.get(REFUSED, "")
