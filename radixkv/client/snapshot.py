"""``client.stats()``: a snapshot of the daemon that nothing can change any more.

A mapping whose string keys can also be read as attributes: ``stats.pools["default"].pages.free``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Snapshot(Mapping[str, Any]):
    """Frozen, nested: dicts inside are Snapshots, lists are tuples. ``as_dict`` gives plain JSON-able data."""

    __slots__ = ("_fields",)

    _fields: dict[str, Any]

    def __init__(self, fields: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_fields", {key: _freeze(value) for key, value in fields.items()})

    def __getitem__(self, key: str) -> Any:
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._fields[name]
        except KeyError:
            raise AttributeError(f"the snapshot has no {name!r}; it has {', '.join(self._fields)}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a snapshot is frozen; {name} cannot become {value!r}")

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._fields.items(), key=lambda item: item[0])))

    def __repr__(self) -> str:
        return f"Snapshot({self.as_dict()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Snapshot, (self.as_dict(),))

    def as_dict(self) -> dict[str, Any]:
        return {key: _thaw(value) for key, value in self._fields.items()}


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Snapshot(value)
    if isinstance(value, list | tuple):
        return tuple(_freeze(item) for item in value)
    return value


def _thaw(value: Any) -> Any:
    if isinstance(value, Snapshot):
        return value.as_dict()
    if isinstance(value, tuple):
        return [_thaw(item) for item in value]
    return value
