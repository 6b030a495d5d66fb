"""Questions to a running daemon, through the client library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import radixkv

START = "; start one with `radixkv serve`"
ELSE = ", or name its address with --endpoint or $RADIXKV_ENDPOINT"


@contextmanager
def connected(endpoint: str | None, timeout_s: float) -> Iterator[radixkv.Client]:
    """A client; each answer may take ``timeout_s``. Errors: Unavailable, which says what to do about it."""
    try:
        with radixkv.connect(endpoint, timeout=timeout_s) as client:
            yield client
    except radixkv.Unavailable as error:
        said = str(error).removesuffix(START)  # the client library says it when there is no daemon at all
        raise radixkv.Unavailable(f"{said}{START}{ELSE}") from error


def stats(client: radixkv.Client) -> dict[str, Any]:
    """The daemon's snapshot as plain data."""
    snapshot: dict[str, Any] = client.stats().as_dict()
    return snapshot
