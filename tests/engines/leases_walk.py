"""A random walk over leases with vLLM's real cache manager and a real daemon, but no model. Runs in .venv-vllm.

``leases_walk.py ENDPOINT SEED STEPS``. What a model would compute for a block is a number that follows from the tokens
up to its end; it is written where the block lies, and read again wherever the block is used. Meanwhile another client
takes pages and gives them back, and invalidates. Half way, within a step, it prints "half" and waits for a line, so
that the daemon can be replaced, or the session lapse; at the end it prints how often what happened.
"""

import json
import logging
import random
import sys
import zlib
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

import radixkv
from radixkv.adapters.vllm.door import Door, DoorSettings
from radixkv.adapters.vllm.leases import Leases, Place
from radixkv.adapters.vllm.namespace import Namespaces
from radixkv.adapters.vllm.region import put, region

BLOCK = 4
OWN = 64
RUNNING_MAX = 6


class Walk:
    def __init__(self, endpoint: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.other = radixkv.connect(endpoint)
        self.others: list[Any] = []
        pool = self.other.pool()
        settings = DoorSettings(endpoint, "default", pool.spec, deadline_s=30.0)
        self.door = Door(settings)
        memory = self.door.ask("start", lambda own: own)
        assert memory is not None
        first = memory.keys(0)
        self.page_bytes = first.stride(0) * first.element_size()
        # The system's page is larger than one of these pages: the engine's own part is made whole.
        flat, own_bytes = region(OWN * self.page_bytes, first), OWN * self.page_bytes
        self.memory = flat.view(torch.int64).view(OWN + pool.total_pages, -1)
        self.manager = cache_manager(OWN + pool.total_pages)
        self.namespaces = Namespaces("toy", {})
        place = Place(memory.memory, OWN, lambda other: put(flat, own_bytes, other.keys(0)))
        self.leases = Leases(self.door, self.namespaces, place, self.manager)
        self.hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.made = 0
        self.pause = False
        self.hits_before = 0
        self.told = {"hits": 0, "preempted": 0, "private": 0, "lost": 0, "waited": 0, "finished": 0}

    def step(self) -> None:
        act = self.random.choices(
            (self.arrive, self.schedule, self.finish, self.preempt, self.take, self.invalidate), (4, 12, 2, 1, 2, 0.2)
        )[0]
        act()
        self.check()

    # -- what vLLM's scheduler does -----------------------------------------------------------------------------------

    def arrive(self) -> None:
        if len(self.waiting) + len(self.running) >= RUNNING_MAX:
            return
        document = random.Random(self.random.randrange(4))
        tokens = [document.randrange(100) for _ in range(self.random.randrange(1, 30))]
        tokens += [self.random.randrange(100) for _ in range(self.random.randrange(1, 6))]
        self.made += 1
        salt = self.random.choice([None, None, "x"])
        sampling = SamplingParams(max_tokens=20)
        self.waiting.append(Request(str(self.made), tokens, sampling, None, cache_salt=salt, block_hasher=self.hasher))

    def schedule(self) -> None:
        """One step: each running request goes on, one that waits is let in; then all is computed."""
        computed: list[tuple[Any, int]] = []
        for request in list(self.running):
            if request.num_output_tokens > 12:
                self.finish_one(self.running, request)
                continue
            new = min(self.random.randrange(1, 12), request.num_tokens - request.num_computed_tokens)
            if self.manager.allocate_slots(request, new) is None:
                self.preempt_one(request)
                continue
            computed.append((request, new))
        if self.waiting:
            computed += self.admit(self.waiting[0])
        self.leases.begin_step()
        if self.pause and any(request.num_computed_tokens >= BLOCK for request, _ in computed):
            self.wait()
        lost = self.leases.lost_blocks()
        for request, new in computed:
            if lost.isdisjoint(self.manager.get_block_ids(request.request_id)[0]):
                self.compute(request, new)
            else:  # vLLM drops what came of it, and the next step preempts it
                self.told["lost"] += 1

    def wait(self) -> None:
        self.pause = False
        print("half", flush=True)
        sys.stdin.readline()
        self.others.clear()  # of a session that is no more
        self.hits_before = self.told["hits"]

    def admit(self, request: Any) -> list[tuple[Any, int]]:
        blocks, hits, _ = self.manager.get_computed_blocks(request)
        if self.leases.waits(request):
            self.told["waited"] += 1
            self.waiting.append(self.waiting.pop(0))
            return []
        new = min(self.random.randrange(1, 12), request.num_tokens - hits)
        given = self.manager.allocate_slots(request, new, num_new_computed_tokens=hits, new_computed_blocks=blocks)
        if given is None:
            return []
        request.num_computed_tokens = hits
        self.told["hits"] += hits // BLOCK
        self.told["private"] += request.request_id not in self.leases._leases
        self.running.append(self.waiting.pop(0))
        return [(request, new)]

    def compute(self, request: Any, new: int) -> None:
        """Read all that comes before, write what is new; a request that is computed says another token."""
        (table,) = self.manager.get_block_ids(request.request_id)
        before, after = request.num_computed_tokens, request.num_computed_tokens + new
        for index in range(before // BLOCK):
            assert self.memory[table[index], 0] == content(request, index), (request.request_id, index)
        for index in range(before // BLOCK, -(-after // BLOCK)):
            whole = (index + 1) * BLOCK <= after
            self.memory[table[index]] = content(request, index) if whole else -1
        request.num_computed_tokens = after
        if after == request.num_tokens:
            request.append_output_token_ids(self.random.randrange(100))

    def finish(self) -> None:
        """Also of one that waits: it is aborted."""
        for requests in self.random.sample([self.running, self.waiting], 2):
            if requests:
                self.finish_one(requests, self.random.choice(requests))
                return

    def finish_one(self, requests: list[Any], request: Any) -> None:
        requests.remove(request)
        self.leases.finished(request.request_id)
        self.manager.free(request)
        self.told["finished"] += 1

    def preempt(self) -> None:
        if self.running:
            self.preempt_one(self.random.choice(self.running))

    def preempt_one(self, request: Any) -> None:
        self.running.remove(request)
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self.told["preempted"] += 1

    # -- what others do -----------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Another worker's pages, scribbled on."""
        if self.others and self.random.random() < 0.5:
            self.others.pop().free()
            return
        pool = self.other.pool()
        try:
            seq = pool.reserve([self.random.randrange(9) for _ in range(self.random.randrange(1, 60))])
        except radixkv.OutOfPages:
            return
        pages = torch.tensor(seq.page_table[seq.writable_from_tokens // BLOCK :].tolist(), dtype=torch.long)
        for tensor in (pool.keys(0), pool.values(0)):
            tensor[pages] = 7.0
        seq.commit(seq.length)
        self.others.append(seq)

    def invalidate(self) -> None:
        request = next(iter(self.running + self.waiting), None)
        if request is not None:
            self.other.pool().invalidate(self.namespaces.of(request))

    # -- what must be true --------------------------------------------------------------------------------------------

    def check(self) -> None:
        pool = self.manager.block_pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        assert max(free, default=0) < OWN, "a page in vLLM's queue"
        assert len(set(free)) == len(free) == pool.get_num_free_blocks()
        leased = {block.block_id for lease in self.leases._leases.values() for block in lease.blocks}
        assert all(block.block_id in leased for block in pool.blocks[OWN:] if block.ref_cnt), "used, and not leased"
        written: list[int] = []
        for request in self.running:
            (table,) = self.manager.get_block_ids(request.request_id)
            lease = self.leases._leases.get(request.request_id)
            written += table[lease.shared if lease is not None else request.num_computed_tokens // BLOCK :]
        assert len(set(written)) == len(written), "two requests write to one block"

    def end(self) -> None:
        while self.running or self.waiting:
            self.finish()
        self.check()
        self.leases.begin_step()
        assert not any(block.ref_cnt for block in self.manager.block_pool.blocks[1:])
        assert self.manager.block_pool.get_num_free_blocks() == OWN - 1
        for seq in self.others:
            seq.free()
        found = self.other.stats().pools["default"]
        assert found["sequences"] == found["pages"]["private"] == found["pages"]["shadow"] == 0, found


def content(request: Any, index: int) -> int:
    """Of the block number ``index``: it follows from the salt and all tokens up to its end."""
    tokens = list(request.all_token_ids)[: (index + 1) * BLOCK]
    return zlib.crc32(json.dumps([request.cache_salt, tokens]).encode()) + 1


def cache_manager(blocks: int) -> Any:
    init_none_hash(get_hash_fn_by_name("sha256"))
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float16)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=BLOCK)
    return KVCacheManager(
        config, max_model_len=4096, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
    )


def main() -> None:
    endpoint, seed, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    logging.disable(logging.WARNING)
    walk = Walk(endpoint, seed)
    for _ in range(steps):
        walk.step()
    walk.pause = True
    for _ in range(steps):
        walk.step()
    assert not walk.pause
    walk.end()
    print(json.dumps({**walk.told, "hits_after": walk.told["hits"] - walk.hits_before}))


if __name__ == "__main__":
    main()
