"""What the policy of eviction remembers of each cached page, in the engine and in the model."""

from __future__ import annotations

from fuzz.model.mismatch import expect
from fuzz.model.orders import Priorities
from fuzz.model.packing import unpack_pages
from fuzz.model.pool import PoolModel
from radixkv.engine.engine import Engine
from radixkv.tree.node import Node

Marks = dict[int, tuple[int, ...]]


def same_marks(model: PoolModel, engine: Engine) -> None:
    """Raise Mismatch unless each page's mark is the model's, be it idle or held."""
    real = _marks(model.name, engine)
    if isinstance(model.order, Priorities):  # held ones are told that their time is over when nobody holds them
        real = {page: mark if mark and mark[1] > model.order.now else () for page, mark in real.items()}
    expected = {page: model.order.mark(page) for page in model.key_of}
    if engine.pools[model.name].config.policy == "fifo":  # marks are stamps, of which both count in their own way
        real, expected = _ranked(real), _ranked(expected)
    expect("I7", f"marks of the pages of {model.name}", real, expected)


def _marks(name: str, engine: Engine) -> Marks:
    """Every node is idle, or above the end of a path that a sequence holds."""
    marks: Marks = {}
    nodes: list[Node | None] = list(engine.pools[name].order)
    for seq in engine.live_sequences():
        if seq.pool == name:
            nodes += [seq.node, seq.source_node]
    for end in nodes:
        node = end
        while node is not None:
            marks.update(dict.fromkeys(unpack_pages(bytes(node.pages)), node.mark))
            node = node.parent
    return marks


def _ranked(marks: Marks) -> Marks:
    ranks = {mark: (rank,) for rank, mark in enumerate(sorted(set(marks.values()) - {()}))}
    return {page: ranks.get(mark, ()) for page, mark in marks.items()}
