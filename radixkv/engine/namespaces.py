"""Namespaces of one pool: canonical bytes to a root, with ids that fit the descriptor table's bounded section.

An id is used again when nothing refers to it: no page in its trees, no sequence. Epochs come from one counter for the
whole pool, so that (id, epoch) never returns. How often a namespace was invalidated is counted by itself: with the
canonical bytes it seeds the names of blocks in events (``hashing.py``), which are the same in every daemon.
"""

from __future__ import annotations

from radixkv.errors import LimitExceeded
from radixkv.image import NamespaceImage
from radixkv.tree.node import Root


class Namespace:
    """``root`` is the current epoch's tree; older ones live until their last page leaves."""

    __slots__ = ("canonical", "id", "invalidations", "root", "users")

    def __init__(self, identity: int, canonical: bytes, root: Root) -> None:
        self.id = identity
        self.canonical = canonical
        self.root = root
        self.invalidations = 0
        self.users = 0
        """Sequences of any epoch, plus retired trees that still have nodes."""


class Namespaces:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_bytes: dict[bytes, Namespace] = {}
        self._by_id: dict[int, Namespace] = {}
        self._free = list(range(limit - 1, -1, -1))
        self._unused: dict[int, None] = {}
        """Ids that nothing referred to when last looked at, oldest first."""
        self._epoch = 0
        self.kept = False
        """No id may be used again: pages that nobody has claimed yet refer to them."""

    def __len__(self) -> int:
        return len(self._by_bytes)

    def all(self) -> list[Namespace]:
        return list(self._by_bytes.values())

    def find(self, canonical: bytes) -> Namespace | None:
        return self._by_bytes.get(canonical)

    def open(self, canonical: bytes) -> tuple[Namespace, bool]:
        """The namespace, made if it is new (second value). Errors: LimitExceeded when all ids are in use."""
        found = self._by_bytes.get(canonical)
        if found is not None:
            return found, False
        if not self._free:
            victim = self._reusable()
            if victim is None:
                raise LimitExceeded("too many namespaces are in use", namespaces=len(self), limit=self._limit)
            self._forget(victim)
        identity = self._free.pop()
        made = Namespace(identity, canonical, self._root(identity))
        self._by_bytes[canonical] = made
        self._by_id[identity] = made
        return made, True

    def ids(self) -> set[int]:
        return set(self._by_id)

    def restore(self, images: list[NamespaceImage], newest_epoch: int) -> list[Namespace]:
        """Begin with namespaces found after a restart. No epoch up to ``newest_epoch`` is given again."""
        for image in images:
            made = Namespace(image.id, image.canonical, Root(image.id, image.epoch))
            made.invalidations = image.invalidations
            self._by_bytes[image.canonical] = self._by_id[image.id] = made
            self._unused[image.id] = None
            self._free.remove(image.id)
        self._epoch = max([newest_epoch, *(image.epoch for image in images)])
        return list(self._by_id.values())

    def retired_root(self, identity: int, epoch: int) -> Root:
        """The tree of an earlier epoch, found after a restart; its first node is about to be hung."""
        root = Root(identity, epoch)
        root.retired = True
        self._by_id[identity].users += 1
        return root

    def renew(self, namespace: Namespace) -> Root:
        """Give the namespace a new epoch; returns the retired root."""
        old = namespace.root
        old.retired = True
        namespace.invalidations += 1
        namespace.root = self._root(namespace.id)
        if old.children:
            namespace.users += 1
        return old

    def of(self, root: Root) -> Namespace:
        return self._by_id[root.namespace]

    def emptied(self, root: Root) -> None:
        """The last node below ``root`` has left."""
        namespace = self._by_id[root.namespace]
        if root.retired:
            namespace.users -= 1
        self.note(namespace)

    def note(self, namespace: Namespace) -> None:
        """Remember the namespace as a candidate for giving up its id if nothing refers to it now."""
        if namespace.users == 0 and not namespace.root.children:
            self._unused[namespace.id] = None

    def _reusable(self) -> Namespace | None:
        if self.kept:
            return None
        for identity in list(self._unused):
            namespace = self._by_id[identity]
            if namespace.users == 0 and not namespace.root.children:
                return namespace
            del self._unused[identity]
        return None

    def _forget(self, namespace: Namespace) -> None:
        del self._by_bytes[namespace.canonical]
        del self._by_id[namespace.id]
        self._unused.pop(namespace.id, None)
        self._free.append(namespace.id)

    def _root(self, identity: int) -> Root:
        self._epoch += 1
        return Root(identity, self._epoch)
