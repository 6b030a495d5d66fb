"""radixkv: a daemon owns the KV-cache pages of a machine; workers share them by prefix.

Everything here is loaded when it is first used: ``import radixkv`` costs neither torch nor zmq nor msgspec.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from radixkv.version import VERSION as __version__

if TYPE_CHECKING:
    from radixkv import aio
    from radixkv.client.namespace import Namespace
    from radixkv.client.ranks import attach
    from radixkv.client.retain import Retain
    from radixkv.client.sync import Client, Pool, Sequence, connect
    from radixkv.errors import (
        BadRequest,
        CopyFailed,
        Draining,
        Forked,
        LimitExceeded,
        OutOfPages,
        PermissionDenied,
        RadixKVError,
        SessionLost,
        StaleHandle,
        Timeout,
        Unavailable,
        VersionMismatch,
    )

_ERRORS = (
    "RadixKVError", "OutOfPages", "Timeout", "StaleHandle", "SessionLost", "BadRequest", "LimitExceeded",
    "Unavailable", "PermissionDenied", "Draining", "CopyFailed", "VersionMismatch", "Forked",
)  # fmt: skip
_HOMES = {
    "connect": "radixkv.client.sync",
    "attach": "radixkv.client.ranks",
    "Client": "radixkv.client.sync",
    "Pool": "radixkv.client.sync",
    "Sequence": "radixkv.client.sync",
    "Namespace": "radixkv.client.namespace",
    "Retain": "radixkv.client.retain",
    **dict.fromkeys(_ERRORS, "radixkv.errors"),
}

__all__ = [
    "connect", "attach", "aio", "Client", "Pool", "Sequence", "Namespace", "Retain", "__version__",
    "RadixKVError", "OutOfPages", "Timeout", "StaleHandle", "SessionLost", "BadRequest", "LimitExceeded",
    "Unavailable", "PermissionDenied", "Draining", "CopyFailed", "VersionMismatch", "Forked",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "aio":
        return import_module("radixkv.aio")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
