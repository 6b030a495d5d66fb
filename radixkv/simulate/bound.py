"""The most blocks that any policy could have found: Belady's rule, with the right not to keep a block at all.

Whoever knows the future keeps, of the blocks at hand and the new one, those that are asked for again soonest. For
blocks of one size that is the best there is (Belady, 1966; with bypass: McFarling, 1992). It may keep a block without
those before it and counts its hit; a prefix cache may not. So it is a bound, not a goal.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

from radixkv.simulate.trace import Trace

Uses = tuple["array[int]", "array[int]"]
"""All blocks in the order in which they are asked for, and for each when it is asked for again (-1: never)."""


def next_uses(trace: Trace) -> Uses:
    blocks = array("I", b"".join(trace.prompts))
    following = array("q", bytes(8 * len(blocks)))
    seen = array("q", [-1]) * trace.unique_blocks
    for at in range(len(blocks) - 1, -1, -1):
        block = blocks[at]
        following[at] = seen[block]
        seen[block] = at
    return blocks, following


def belady_hits(trace: Trace, capacity: int, uses: Uses | None = None) -> int:
    """Hit blocks with room for ``capacity`` blocks. ``uses``: what ``next_uses`` gave, to be computed once."""
    blocks, following = uses or next_uses(trace)
    kept = bytearray(trace.unique_blocks)
    held = hits = 0
    latest: list[tuple[int, int]] = []
    """Heap of (minus the next use, block); of a block that was used meanwhile the older entries are of the past."""
    for now, block in enumerate(blocks):
        then = following[now]
        if kept[block]:
            hits += 1
            held -= 1
            kept[block] = 0
        if then < 0:
            continue
        heappush(latest, (-then, block))
        kept[block] = 1
        held += 1
        if held > capacity:
            _, farthest = heappop(latest)
            kept[farthest] = 0
            held -= 1
    return hits
