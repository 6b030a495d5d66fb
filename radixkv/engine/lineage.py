"""What is known of a pool's pages from an earlier daemon's time, until all who knew them are back or gone."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from radixkv.allocator.page_states import State
from radixkv.image import TableImage
from radixkv.tree.node import Root


class Lineage:
    """The pages of one pool as they were found. ``unclaimed``: by session (0: nobody's), pages that wait for claims.

    A page that is handed out anew gets another generation, here as in the table: nothing said of its former content
    can be proven then.
    """

    def __init__(self, image: TableImage, roots: dict[tuple[int, int], Root]) -> None:
        self.generations: NDArray[np.uint64] = image.generations.copy()
        self.origins = image.states
        """uint8 a page: its state as it was found."""
        self.owners = image.owners.copy()
        """Whose each page was and is: 0 from when it is somebody else's."""
        self.scopes = image.epochs.astype(np.uint64) << np.uint64(32) | image.namespaces.astype(np.uint64)
        self.roots = roots
        """Trees by (namespace id, epoch), those of retired epochs too."""
        self.unclaimed: dict[int, set[int]] = {}

    def handed_out(self, pages: array[int]) -> None:
        ids = np.frombuffer(pages, np.int32)
        self.generations[ids] += np.uint64(1)
        self.owners[ids] = 0

    def wait_for(self, owner: int, pages: list[int]) -> None:
        if pages:
            self.unclaimed.setdefault(owner, set()).update(pages)

    def claimed(self, pages: Iterable[int]) -> None:
        """These wait for nobody any longer."""
        for page in pages:
            self.unclaimed[int(self.owners[page])].discard(page)

    def give_up(self, owner: int) -> tuple[list[int], list[int]]:
        """What this owner will not claim: private pages, and shadows, which others may have shared with him."""
        left = sorted(self.unclaimed.pop(owner, ()))
        shadows = [page for page in left if self.origins[page] == State.SHADOW]
        return [page for page in left if self.origins[page] != State.SHADOW], shadows

    def now_of(self, owner: int, pages: list[int]) -> None:
        """Pages wait for another's claim."""
        for page in pages:
            self.owners[page] = owner
        self.wait_for(owner, pages)
