"""Known bugs, planted one at a time: a fuzzer that does not find them, and by the right name, is blind.

Each is a bug that a comparable system has had. Without the bug the same run must be clean.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from fuzz.registry import Failed, run
from fuzz.simulator import bugs
from fuzz.targets.catalogue import FUZZERS
from radixkv.allocator.free_list import FreeList
from radixkv.allocator.page_states import State
from radixkv.engine import commit
from radixkv.engine.pool import Pool
from radixkv.sessions.window import ReplyWindow
from radixkv.tree import walk
from radixkv.tree.node import Node, Packed
from radixkv.tree.prefix_tree import PrefixTree

SEED, STEPS = 0, 20_000
WORLD = ("I1", "I3", "I4", "I5", "I13", "I14", "I15", "I28")
"""What a world may show first of one and the same bug."""
SLOW = 1_000_000
"""For bugs that need several rare things at once; only `python -m fuzz canary` looks for these."""


@dataclass(frozen=True)
class Canary:
    """``plant`` puts the bug in; ``finds`` are the invariants by which it may be found, in whatever order it shows."""

    name: str
    about: str
    plant: Callable[[], AbstractContextManager[Any]]
    finds: tuple[str, ...]
    fuzzer: str = "engine"
    steps: int = STEPS


def _double_free() -> AbstractContextManager[Any]:
    right = FreeList.give

    def give(self: FreeList, packed: bytes) -> None:
        right(self, packed + packed[:4])

    return patch.object(FreeList, "give", give)


def _split_forgets_holders() -> AbstractContextManager[Any]:
    right = PrefixTree._split

    def split(self: PrefixTree, node: Node, pages: int) -> Node:
        head = right(self, node, pages)
        head.holders = min(head.holders, 1)
        return head

    return patch.object(PrefixTree, "_split", split)


def _roots_first() -> AbstractContextManager[Any]:
    right = Pool.fallen_idle

    def fallen_idle(self: Pool, nodes: list[Node], retired: bool) -> None:
        right(self, nodes[::-1], retired)

    return patch.object(Pool, "fallen_idle", fallen_idle)


def _first_page_is_enough() -> AbstractContextManager[Any]:
    def common(tokens: Packed, at: int, edge: Packed, limit: int, step: int) -> int:
        return limit

    return patch.object(walk, "_common", common)


def _tail_leaks() -> AbstractContextManager[Any]:
    def cut(pool: Pool, seq: Any, kept: int) -> None:
        dropped = seq.pages[kept + 1 :].tolist()
        del seq.pages[kept:]
        pool.drop(dropped, State.PRIVATE, None)

    return patch.object(commit, "_cut_private", cut)


def _repeats_act_again() -> AbstractContextManager[Any]:
    def admit(self: ReplyWindow[Any], request: int) -> None:
        return None

    return patch.object(ReplyWindow, "admit", admit)


CANARIES = [
    Canary("double-free", "a page given back goes into the free list twice", _double_free, ("I1", "I3")),
    Canary("split-holders", "a split forgets that several hold the head", _split_forgets_holders, ("I2", "I7")),
    Canary("parents-first", "a path is put into the order of eviction root first", _roots_first, ("I7",)),
    Canary("trusting", "of an edge only the first page is compared", _first_page_is_enough, ("I6",), "tree"),
    Canary("truncate-leak", "truncate forgets to give one page back", _tail_leaks, ("I1",)),
    Canary("acts-twice", "a repeated request is carried out again", _repeats_act_again, ("I18", "I28")),
    Canary("fence-ignored", "what a fence holds back goes out at once", bugs.fence_ignored, WORLD, "simulator"),
    Canary("returns-early", "pages of the dead return while heirs may write", bugs.returns_early, WORLD, "simulator"),
    Canary("same-generation", "pages keep their generation", bugs.same_generation, WORLD, "simulator"),
    Canary("reply-first", "a reply leaves before its descriptors", bugs.reply_first, WORLD, "simulator", SLOW),
    Canary("resumes-unproven", "generations of claims do not matter", bugs.unproven, WORLD, "simulator", SLOW),
    Canary("early-unnamed", "who is early is not told what loads", bugs.nothing_is_loading, WORLD, "simulator", SLOW),
    Canary("layers-too-soon", "more layers are told than are there", bugs.layers_too_soon, WORLD, "simulator", SLOW),
    Canary("tiers-unnamed", "the same, with two tiers and no world", bugs.nothing_is_loading, ("I4", "I11"), "tiers"),
    Canary("tiers-too-soon", "the same, with two tiers and no world", bugs.layers_too_soon, ("I4", "I11"), "tiers"),
    Canary("any-epoch", "requests outlive the daemon they were for", bugs.any_epoch, WORLD, "simulator", SLOW),
]


def canary() -> bool:
    """Run all canaries. Prints what was found; True if each bug was, by its name, and nothing without one."""
    good = True
    for fuzzer in sorted({bird.fuzzer for bird in CANARIES}):
        good &= _verdict(Canary(f"no bug, {fuzzer}", "none is planted", nullcontext, (), fuzzer))
    for bird in CANARIES:
        good &= _verdict(bird)
    return good


def _verdict(bird: Canary) -> bool:
    found, step = found_by(bird)
    good = found in bird.finds if bird.finds else found is None
    says = f"found as {found} at step {step}" if found else f"nothing found in {bird.steps} steps"
    print(f"{'ok' if good else 'WRONG':<6}{bird.name:<18}{says:<32}{bird.about}")
    return good


def found_by(bird: Canary) -> tuple[str | None, int]:
    """The invariant that the fuzzer names with this bug in, and the step."""
    with bird.plant():
        try:
            run(FUZZERS[bird.fuzzer], SEED, bird.steps)
        except Failed as failed:
            return failed.invariant, failed.step
    return None, bird.steps
