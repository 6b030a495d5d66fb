"""An engine's own blocks and an arena in one range of addresses."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from radixkv.adapters.vllm.region import put, region
from radixkv.device import arena

OWN = 2 * mmap.PAGESIZE
SIZE = 4 * mmap.PAGESIZE


def an_arena() -> torch.Tensor:
    """As a worker has it: a view of all of it that begins somewhere."""
    descriptor = arena.create("test", SIZE)
    try:
        return torch.frombuffer(arena.map_shared(descriptor, SIZE), dtype=torch.int8)[64:]
    finally:
        os.close(descriptor)


def test_what_is_written_in_one_mapping_is_read_in_the_other() -> None:
    pages = an_arena()
    memory = region(OWN, pages)
    assert memory.numel() == OWN + SIZE
    assert not memory.any()
    pages[0] = 7
    assert memory[OWN + 64] == 7
    memory[-1] = 9
    assert pages[-1] == 9


def test_another_arena_takes_the_place_of_the_first_and_the_own_part_stays() -> None:
    first, second = an_arena(), an_arena()
    memory = region(OWN, first)
    memory[0], first[1], second[1] = 1, 2, 3
    put(memory, OWN, second)
    assert [int(memory[0]), int(memory[OWN + 65])] == [1, 3]
    memory[OWN + 65] = 4
    assert [int(first[1]), int(second[1])] == [2, 4]


def test_blocks_that_are_not_whole_pages_of_the_system_are_refused() -> None:
    with pytest.raises(ValueError, match="not whole pages"):
        region(OWN + 1, an_arena())
