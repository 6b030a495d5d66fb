"""What an eviction policy is: an order among nodes that nobody holds, with three hooks.

The life of a key: (1) it falls idle: ``add``; (2) it is ``front`` when it is next to be evicted; (3) it is held
again or has left the tree: ``remove``. A policy never sees a held key, and ``front`` must be a key whose descendants
have all been removed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Policy(Protocol[K]):
    def add(self, key: K) -> None:
        """The last holder of ``key`` let go. Keys of one release come leaf to root."""

    def remove(self, key: K) -> None:
        """``key`` is held again or gone."""

    def front(self) -> K:
        """The next victim. There is one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[K]:
        """All keys, next victim first."""
        ...
