"""What a descriptor table says, as arrays: the input of recovery. ``device/descriptors.py`` makes it."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

NO_PAGE = -1
"""Parent of a page that begins a prompt."""


class NamespaceImage(NamedTuple):
    """One namespace in use. ``epoch`` is its current one; ``invalidations``: how often it got a new one."""

    id: int
    epoch: int
    invalidations: int
    canonical: bytes


class SessionImage(NamedTuple):
    """One session that is not over (``epoch`` > 0)."""

    slot: int
    id: int
    epoch: int
    token: bytes


class TableImage(NamedTuple):
    """One pool's table. All arrays have one entry a place: ``pages`` of the device, behind those the host tier's.

    They are copies, or a memory that nobody writes meanwhile.

    states: uint8, the numbers of ``allocator.page_states.State``; sound: bool, the record's check agrees;
    generations, owners, stamps: uint64; namespaces, epochs: uint32; serials, parent_serials: uint64, of the content and
    of what comes before it (0: nothing); tokens: page_size * 4 bytes.
    """

    pages: int
    states: NDArray[Any]
    sound: NDArray[Any]
    generations: NDArray[Any]
    owners: NDArray[Any]
    stamps: NDArray[Any]
    namespaces: NDArray[Any]
    epochs: NDArray[Any]
    serials: NDArray[Any]
    parent_serials: NDArray[Any]
    tokens: NDArray[Any]
    names: list[NamespaceImage]
