"""What an eviction policy is: an order among runs of pages that nobody holds.

A run is a node of the tree: pages that follow one another. Its life, as a policy sees it:

1. Somebody computes and holds it. The policy does not know it yet: its ``mark`` is ``()``.
2. A holder lets go of a path: ``used``, with all its runs, whether others still hold them or not. Only policies that
   count uses are told.
3. Nobody holds it any longer: ``add``.
4. It is held again, or an invalidated tree is cleared away: ``remove``. Or its turn has come: ``victim``.

Three hooks (``used``, ``add``, ``remove``) and one question (``victim``). A run that is held is never known to a policy
as one that could go, and only leaves go: what continues a page leaves before it.

What a policy remembers of pages beyond their time as idle ones is the run's ``mark``, the same for all pages of a run:
a split copies it, runs with different marks are never merged, and pages that are new are not appended to a run that has
one. So a policy gives each page the place that it would have if every page had a number of its own.

(The shape of this, numbered steps and few hooks over one cache, is that of the generic cache in Hypothesis.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Protocol, Self, TypeVar

Mark = tuple[int, ...]
Rank = tuple[int, ...]


class Run(Protocol):
    """What a policy may know of a node of the tree. It changes nothing of it but the mark."""

    mark: Mark

    @property
    def stamp(self) -> int:
        """The order in which last holders let go; equal for runs of one path that fell idle together."""

    @property
    def pages(self) -> bytes | bytearray:
        """Packed page ids on the device; empty: on the host tier alone."""

    @property
    def page_count(self) -> int: ...

    @property
    def tokens(self) -> bytes | bytearray:
        """Packed tokens of all its pages; none of a root."""

    @property
    def parent(self) -> Self | None: ...

    @property
    def children(self) -> Mapping[bytes, Self] | None:
        """None for a leaf."""


R = TypeVar("R", bound=Run)


class Policy(Protocol[R]):
    counts_uses: ClassVar[bool]

    def used(self, path: list[R]) -> None:
        """A holder lets go of these runs, leaf to root. None of them is idle yet."""

    def add(self, run: R) -> None:
        """The last holder of ``run`` let go. Runs of one path come leaf to root."""

    def remove(self, run: R) -> None:
        """``run`` is held again, or about to leave the tree."""

    def victim(self, pages: int) -> R:
        """The leaf that goes next; there is one. The caller takes its last ``pages`` pages, or all if it has fewer,
        out of the tree right away; in that case it is known no longer.
        """

    def check(self) -> None:
        """Count again from the ground. Errors: BrokenInvariant."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[R]:
        """All idle runs. In an order of eviction only where a policy says so."""
        ...
