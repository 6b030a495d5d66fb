"""One edge of the radix tree with the node at its end: a run of full pages that follow one another.

Tokens and page ids are packed and run in parallel: no object and no dict entry per page. They begin as ``bytes`` (a
one-page node shares its tokens with its key in the parent) and become ``bytearray`` when they first grow or shrink, so
that appending and trimming cost what is appended or trimmed.

A run lies on the device (``pages``), in the host tier (``host``) or in both; all its pages alike. Below a run that is
only in the host tier there are only such runs.
"""

from __future__ import annotations

from radixkv.types import PAGE_ID_BYTES

Packed = bytes | bytearray


class Node:
    """``holders`` counts the sequences whose pinned path contains this node: 0 means evictable.

    ``stamp`` is the order in which its last holder let go. ``mark`` is what the policy of eviction remembers of these
    pages, the same for all of them; ``()``: nothing yet. ``children`` is None for a leaf; keys are the tokens of a
    child's first page. ``parent`` is None for a root and for a node that has left the tree.
    """

    __slots__ = ("children", "holders", "host", "mark", "pages", "parent", "stamp", "tokens")

    def __init__(self, parent: Node | None, tokens: Packed, pages: Packed) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.host: Packed = b""
        self.children: dict[bytes, Node] | None = None
        self.holders = 0
        self.stamp = 0
        self.mark: tuple[int, ...] = ()

    @property
    def page_count(self) -> int:
        return len(self.pages or self.host) // PAGE_ID_BYTES

    def append(self, tokens: Packed, pages: Packed) -> None:
        if isinstance(self.tokens, bytes):
            self._thaw()
        self.tokens += tokens
        self.pages += pages

    def cut_tail(self, pages: int, page_token_bytes: int) -> bytes:
        """Forget the last ``pages`` pages and return their packed ids on the device."""
        if isinstance(self.tokens, bytes):
            self._thaw()
        gone = bytes(self.pages[-pages * PAGE_ID_BYTES :])
        del self.tokens[-pages * page_token_bytes :]  # type: ignore[union-attr]
        if gone:
            del self.pages[-pages * PAGE_ID_BYTES :]  # type: ignore[union-attr]
        if self.host:
            self.host = self.host[: -pages * PAGE_ID_BYTES]
        return gone

    def _thaw(self) -> None:
        self.tokens = bytearray(self.tokens)
        self.pages = bytearray(self.pages)


class Root(Node):
    """Where a namespace's first pages hang. Retired by ``invalidate``: nothing is matched below it any more."""

    __slots__ = ("epoch", "namespace", "retired")

    def __init__(self, namespace: int, epoch: int) -> None:
        super().__init__(None, b"", b"")
        self.namespace = namespace
        self.epoch = epoch
        self.retired = False
