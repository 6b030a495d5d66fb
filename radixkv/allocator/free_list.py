"""Free page ids as a stack in one int32 array: taking or giving n pages moves n * 4 bytes and makes no objects."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from radixkv.types import PAGE_ID_BYTES


class FreeList:
    """Last in, first out. Does not know what a page is; that nothing is in it twice is the state table's work."""

    def __init__(self, pages: Sequence[int]) -> None:
        """The first of ``pages`` is handed out first."""
        self._ids = array("i", reversed(pages))
        assert self._ids.itemsize == PAGE_ID_BYTES

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, count: int) -> array[int]:
        """``count`` ids (at most ``len``), in an array of int32."""
        if count == 0:
            return array("i")
        taken = self._ids[-count:]
        del self._ids[-count:]
        taken.reverse()
        return taken

    def give(self, packed: bytes) -> None:
        self._ids.frombytes(packed)

    def ids(self) -> list[int]:
        return self._ids.tolist()
