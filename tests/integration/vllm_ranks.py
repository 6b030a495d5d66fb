"""Workers of one tensor-parallel engine that do what they are told by a pipe; each has its part of vLLM's blocks.

``run`` is one process. Orders: ("load", Load), ("save", Save), ("fill", value, blocks), ("read", blocks). The answer to
a load is the set of blocks that failed, to a read the sums of what is in the blocks, to the others None.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

from radixkv.adapters.vllm.door import Door, DoorSettings
from radixkv.adapters.vllm.ranks import Follower, Leader, Together
from radixkv.adapters.vllm.worker import WorkerHalf

VLLM_BLOCKS = 16


class Worker:
    def __init__(self, settings: DoorSettings, rank: int) -> None:
        ranks = Together(torch.distributed.group.WORLD)
        self.door = Door(settings) if rank == 0 else None
        side = Leader(self.door, ranks) if self.door is not None else Follower(settings, ranks, rank)
        self.half = WorkerHalf(side, settings.spec)
        shape = (VLLM_BLOCKS, settings.spec.kv_heads, settings.spec.page_size, 2 * settings.spec.head_dim)
        self.caches = {f"model.layers.{n}.attn": torch.zeros(shape) for n in range(settings.spec.layers)}
        self.half.register(self.caches)

    def load(self, load: Any) -> set[int]:
        self.half.load([load])
        assert self.half.loaded() == {load.request_id}
        return self.half.failed()

    def save(self, save: Any) -> None:
        self.half.save([save])

    def fill(self, value: float, blocks: list[int]) -> None:
        """Every element another number, by block, layer and place."""
        for layer, cache in enumerate(self.caches.values()):
            for block in blocks:
                places = torch.arange(cache[0].numel(), dtype=torch.float32).view(cache.shape[1:])
                cache[block] = value + 1000 * block + 100 * layer + places / 64

    def read(self, blocks: list[int]) -> list[list[float]]:
        return [[cache[block].sum().item() for cache in self.caches.values()] for block in blocks]


def run(settings: DoorSettings, rank: int, count: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    worker = Worker(settings, rank)
    pipe.send("ready")
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(worker, name)(*arguments))
