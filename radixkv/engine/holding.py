"""Letting go: of a path in the tree, and of the page whose rows a sequence has yet to copy.

A sequence lets go of pages when it is freed or truncated, when its rows are copied, and when its worker dies: always
by ``let_go``, which is one release and one use of each page, whatever way it was held.
"""

from __future__ import annotations

from array import array

from radixkv.commands import Stamp
from radixkv.engine import retention
from radixkv.engine.pool import LAST_ID, Pool
from radixkv.engine.sequence import Sequence
from radixkv.tree.node import Node


def let_go(pool: Pool, seq: Sequence, depth: int, quarantine: list[int] | None = None) -> None:
    """The source of copy_rows and the path beyond its first ``depth`` pages: one release, one use of each page."""
    if seq.retain:
        retention.say(pool, seq, depth)
    if pool.order.counts_uses:
        kept = pool.tree.node_at(seq.node, seq.depth - depth) if seq.depth > depth else seq.node
        pool.order.used(_path_to_source(pool, seq) + pool.tree.path(seq.node, above=kept))
    if seq.source >= 0:
        _let_go_of_source(pool, seq, quarantine)
    elif seq.depth > depth:
        pool.stamp += 1
    if seq.depth > depth:
        _stamp_for_copies(pool, seq.node)
        if depth:
            seq.node, idle = pool.tree.lift(seq.node, seq.depth - depth, pool.stamp)
        else:
            idle, seq.node = pool.tree.unpin(seq.node, pool.stamp)
        seq.depth = depth
        if idle:
            pool.fallen_idle(idle, seq.root.retired)


def release_source(pool: Pool, seq: Sequence) -> None:
    """The rows have been copied, or never will be."""
    if seq.source >= 0:
        let_go(pool, seq, min(seq.depth, seq.published))
        if pool.flights is not None:
            pool.flights.note(seq)


def _let_go_of_source(pool: Pool, seq: Sequence, quarantine: list[int] | None) -> None:
    """Under a new stamp. Where the path reaches over the source, that is let go of next, under the same one."""
    pool.stamp += 1
    source = seq.source
    if seq.counts_source:
        sharers = pool.copying.get(source)
        if sharers is not None:
            sharers.remove(seq)
            if not sharers:
                del pool.copying[source]
        pool.drop(array("i", (source,)), pool.pages.states[source], quarantine)
    elif seq.source_node is not None:
        _stamp_for_copies(pool, seq.source_node)
        idle, root = pool.tree.unpin(seq.source_node, pool.stamp)
        pool.fallen_idle(idle, root.retired)
        seq.source_node = None
    seq.source = -1


def _path_to_source(pool: Pool, seq: Sequence) -> list[Node]:
    """The nodes that the sequence holds by its second pin alone, leaf to root."""
    if seq.source_node is None:
        return []
    own = set(pool.tree.path(seq.node))
    return [node for node in pool.tree.path(seq.source_node) if node not in own]


def counts_hold_of(pool: Pool, seq: Sequence) -> bool:
    """Is a private page of this sequence, or one it copies from, held by count across sequences?"""
    return seq.counts_source or any(page in pool.copying for page in seq.pages[seq.published :])


def _stamp_for_copies(pool: Pool, end: Node) -> None:
    """What a copy holds does not fall idle when it is let go of; its place is that of now all the same, and stays
    so when what is behind it leaves."""
    host = pool.host
    if host is not None and host.copies:
        ends = b"".join([node.pages[LAST_ID] if node.pages else host.end(node) for node in pool.tree.path(end)])
        pool.writes.append(Stamp(pool.name, ends, pool.stamp))
