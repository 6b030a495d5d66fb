"""From what was written to what was meant: text of flags, environment and files becomes numbers and sizes.

What cannot be read stays as it is: the dataclass it goes into then refuses it and says what is allowed, so that every
wrong value of one key is answered in the same words, wherever it came from.
"""

from __future__ import annotations

from radixkv.cli import sizes
from radixkv.cli.keys import BYTE_KEYS, TYPES
from radixkv.errors import ConfigError


def read(key: str, value: object) -> object:
    """``value`` of the setting ``key`` (``server.lease_s``): its text read as the key's type, if that can be done."""
    if not isinstance(value, str):
        return value
    kind = TYPES.get(key, "str")
    if key.partition(".")[2] in BYTE_KEYS:
        size = sizes.parse(value)
        return value if size is None else size
    if kind == "str":
        return value
    try:
        return int(value) if kind == "int" else float(value)
    except ValueError:
        return value


def refuse(key: str, value: object, allowed: str) -> ConfigError:
    """The error for a value that no setting of this name can have."""
    return ConfigError(f"{key} = {value!r} is not allowed; allowed: {allowed}")
