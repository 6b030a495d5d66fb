"""The one way down the tree. Lookup, reserve and commit all use it; it only reads.

Tokens are compared, never hashes: a child is found by the bytes of its first page, the rest of its edge by one
memcmp (``startswith`` at an offset, which copies nothing). Where an edge differs inside, the place is found by
galloping and bisecting over compared slices.
"""

from __future__ import annotations

from msgspec import Struct

from radixkv.tree.node import Node, Packed
from radixkv.types import PAGE_ID_BYTES


class Match(Struct, frozen=True):
    """How far tokens agree with the tree.

    ``node`` is the last node that matched as a whole (or where the walk began), ``inside`` the child that matched in
    part with its first ``inside_pages`` pages, or None. ``pages`` counts all matched pages below the start, ``parts``
    are their packed ids, a piece a node.
    """

    node: Node
    pages: int
    inside: Node | None
    inside_pages: int
    parts: list[Packed]


def walk(start: Node, tokens: bytes, offset: int, end: int, page_token_bytes: int) -> Match:
    """Match ``tokens[offset:end]`` (bytes; only full pages count) against what hangs below ``start`` on the device."""
    node = start
    at = offset
    end -= (end - at) % page_token_bytes
    parts: list[Packed] = []
    while at < end:
        children = node.children
        if not children:
            break
        child = children.get(tokens[at : at + page_token_bytes])
        if child is None:
            break
        ids = child.pages
        if not ids:
            break
        edge = child.tokens
        if at + len(edge) <= end and tokens.startswith(edge, at):
            parts.append(ids)
            at += len(edge)
            node = child
            continue
        pages = _common(tokens, at, edge, min(len(edge), end - at), page_token_bytes) // page_token_bytes
        parts.append(ids[: pages * PAGE_ID_BYTES])
        return Match(node, (at - offset) // page_token_bytes + pages, child, pages, parts)
    return Match(node, (at - offset) // page_token_bytes, None, 0, parts)


def walk_host(start: Node, tokens: bytes, offset: int, page_token_bytes: int) -> Match:
    """The same for ``tokens[offset:]`` and what is in the host tier alone, where the device's part of a path has ended.

    Seldom asked and short of speed: it goes by ``walk``'s cases without its care for every microsecond.
    """
    node, at = start, offset
    parts: list[Packed] = []
    while child := (node.children or {}).get(tokens[at : at + page_token_bytes]):
        if child.pages:
            break
        edge = child.tokens
        limit = min(len(edge), (len(tokens) - at) // page_token_bytes * page_token_bytes)
        pages = _common(tokens, at, edge, limit, page_token_bytes) // page_token_bytes
        parts.append(child.host[: pages * PAGE_ID_BYTES])
        at += pages * page_token_bytes
        if pages < child.page_count:
            return Match(node, (at - offset) // page_token_bytes, child, pages, parts)
        node = child
    return Match(node, (at - offset) // page_token_bytes, None, 0, parts)


def _common(tokens: bytes, at: int, edge: Packed, limit: int, step: int) -> int:
    """Bytes, a multiple of ``step``, in which ``tokens[at:]`` and ``edge`` agree; the first step is known to."""
    low = step
    size = step
    high = limit
    while low < limit:
        probe = min(low + size, limit)
        if edge[low:probe] != tokens[at + low : at + probe]:
            high = probe
            break
        low = probe
        size *= 4
    else:
        return limit
    while high - low > step:
        middle = (low + high) // 2 // step * step
        if edge[low:middle] == tokens[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low
