"""What must be equal before tokens may be compared.

The same tokens give the same keys and values only under the same weights, adapter, rope and quantization settings. All
of these go into a namespace; two namespaces share nothing. The canonical bytes are what the daemon compares::

    b"radixkv namespace 1"  then for each field, sorted by (section, name):
    section byte, length and bytes of the name, kind byte (0 None, 1 str, 2 bytes), length and bytes of the value

Lengths are 4 bytes little-endian, so that no two different namespaces have the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from radixkv.errors import BadRequest, LimitExceeded

CANONICAL_MAX_BYTES = 1024
_DOMAIN = b"radixkv namespace 1"
_FIELD, _EXTRA = b"\x01", b"\x02"


class Canonical(NamedTuple):
    """A namespace of which only the canonical bytes are known."""

    canonical: bytes


class Namespace:
    """Frozen and hashable; equal when all fields are equal.

    Args:
        model: id of the weights, as exact as correctness needs it (name and revision, or a checksum).
        lora: id of the adapter, or None for the plain model. None differs from "" and from b"".
        salt: anything that keeps one tenant's cache apart from another's, or None.
        extra: further settings that change keys and values (rope scaling, KV quantization, ...), str to str.

    Errors: BadRequest for other types; LimitExceeded when the canonical bytes are over 1 KiB.
    """

    __slots__ = ("canonical", "extra", "lora", "model", "salt")

    model: str
    lora: str | bytes | None
    salt: str | bytes | None
    extra: Mapping[str, str]
    canonical: bytes

    def __init__(
        self,
        model: str = "",
        lora: str | bytes | None = None,
        salt: str | bytes | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        fields = dict(extra or {})
        set_once = object.__setattr__
        set_once(self, "model", model)
        set_once(self, "lora", lora)
        set_once(self, "salt", salt)
        set_once(self, "extra", MappingProxyType(fields))
        set_once(self, "canonical", _canonical(model, lora, salt, fields))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Namespace is frozen; make another one with {name} = {value!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Namespace is frozen; {name} cannot be removed")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.canonical == other.canonical

    def __hash__(self) -> int:
        return hash(self.canonical)

    def __repr__(self) -> str:
        return f"Namespace(model={self.model!r}, lora={self.lora!r}, salt={self.salt!r}, extra={dict(self.extra)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Namespace, (self.model, self.lora, self.salt, dict(self.extra)))


def _canonical(model: Any, lora: str | bytes | None, salt: str | bytes | None, extra: Mapping[Any, Any]) -> bytes:
    if not isinstance(model, str):
        raise BadRequest(f"model is a str, not {type(model).__name__}")
    parts = [_DOMAIN]
    parts += [_field(_FIELD, name, value) for name, value in (("lora", lora), ("model", model), ("salt", salt))]
    for name, value in extra.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise BadRequest(f"extra is a dict of str to str: {name!r}: {value!r}")
    parts += [_field(_EXTRA, name, extra[name]) for name in sorted(extra)]
    canonical = b"".join(parts)
    if len(canonical) > CANONICAL_MAX_BYTES:
        raise LimitExceeded("the namespace is too long", bytes=len(canonical), limit=CANONICAL_MAX_BYTES)
    return canonical


def _field(section: bytes, name: str, value: str | bytes | None) -> bytes:
    return section + _sized(_utf8(name)) + _value(name, value)


def _value(name: str, value: str | bytes | None) -> bytes:
    if value is None:
        return b"\x00" + _sized(b"")
    if isinstance(value, str):
        return b"\x01" + _sized(_utf8(value))
    if isinstance(value, bytes):
        return b"\x02" + _sized(value)
    raise BadRequest(f"{name} is a str, bytes or None, not {type(value).__name__}")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{text!r} has no UTF-8 form") from None


def _sized(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value
