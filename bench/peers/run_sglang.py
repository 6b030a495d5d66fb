"""SGLang 0.5.23: ``rust`` (UnifiedRadixCache over its Rust tree, the default) or ``radix`` (RadixCache, Python).

An admission is what its scheduler does with a request: match, lock, evict what is missing, allocate, insert, unlock.
Tokens are array('q'), the type its keys are made of.
"""

from __future__ import annotations

import logging
import sys
import warnings
from array import array
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from bench import workload
from bench.peers import stubs
from bench.peers.worker import Work, serve

stubs.install("compressed_tensors", "partial_json_parser", "torchvision")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

PAGE = workload.PAGE_SIZE


class Cache:
    """A cache of ``pages`` pages with its allocator."""

    def __init__(self, kind: str, pages: int) -> None:
        self.allocator = PagedTokenToKVPoolAllocator(
            size=pages * PAGE, page_size=PAGE, dtype=torch.float16, device="cpu", kvcache=None, need_sort=False
        )
        settings = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=PAGE
        )
        if kind == "radix":
            self.tree = RadixCache(settings)
        else:
            settings.tree_components = (ComponentType.FULL,)
            settings.tree_core_backend = "rust"
            self.tree = UnifiedRadixCache(settings)

    def cached_tokens(self, tokens: array[int]) -> int:
        return int(self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).device_prefix_len)

    def admit(self, tokens: array[int]) -> None:
        tree, allocator = self.tree, self.allocator
        found = tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        cached, node = found.device_prefix_len, found.last_device_node
        prefix_lock = tree.lock(node)
        need = len(tokens) - cached
        short = need - allocator.available_size()
        if short > 0:
            tree.evict(EvictParams(num_tokens=short))
        new = allocator.alloc(need)
        value = torch.cat([tree.path_device_indices(node), new])
        inserted = tree.insert(InsertParams(key=RadixKey(tokens), value=value, prev_prefix_len=cached))
        whole_lock = tree.lock(inserted.last_device_node)
        tree.unlock(prefix_lock)
        tree.unlock(whole_lock)


def convert(tokens: workload.Tokens) -> array[int]:
    return array("q", tokens.astype(np.int64).tobytes())


def churn(kind: str, work: workload.Churn) -> Work:
    cache = Cache(kind, work.pool_pages)
    requests = _requests(work)
    for _ in range(work.fill):
        cache.admit(next(requests))
    if cache.allocator.available_size() >= work.tokens:
        raise RuntimeError("the pool should be full before the clock starts")
    return Work(cache.admit, requests)


def _requests(work: workload.Churn) -> Iterator[Any]:
    return map(convert, workload.stream(work))


def build() -> dict[str, Work]:
    kind = sys.argv[1]
    tree = workload.tree()
    cache = Cache(kind, workload.TREE_POOL_PAGES)
    for tokens in tree.admissions():
        cache.admit(convert(tokens))
    if cache.cached_tokens(convert(tree.long[0])) != workload.LONG_TOKENS:
        raise RuntimeError("a sequence that was admitted should be cached")
    w3 = Work(cache.admit, map(convert, tree.half_cached()))
    return {"W3": w3, "W4": churn(kind, workload.W4), "W4b": churn(kind, workload.W4B)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(version("sglang"), build)
