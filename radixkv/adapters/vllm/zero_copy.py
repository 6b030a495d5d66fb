"""``RadixKVZeroCopyConnector``: vLLM computes in radixkv's pages. The other file that imports vLLM.

vLLM asks a connector for the memory that its KV cache is allocated in (``get_mem_pool_context``) and for the order of
that memory (``get_required_kvcache_layout``), and gives it its cache manager (``bind_kv_cache_manager``). What it has
not for a CPU: a memory pool that takes a ``torch.zeros`` elsewhere, and a layout with blocks outermost. See
``Elsewhere`` and ``allow_block_outermost``. What becomes of a request is ``leases.py``.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import vllm
from torch.overrides import TorchFunctionMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from radixkv.adapters.vllm.door import Door, door_settings
from radixkv.adapters.vllm.engine import check_engine, check_zero_copy, engine_settings, page_spec
from radixkv.adapters.vllm.leases import Leases, Place
from radixkv.adapters.vllm.namespace import Namespaces
from radixkv.adapters.vllm.region import put, region
from radixkv.errors import ConfigError

LAYOUT = KVCacheLayout.BLHNC
_log = logging.getLogger("radixkv.adapters.vllm")


def allow_block_outermost() -> None:
    """vLLM's CPU backend names one layout, layers outermost (cpu_attn.py, line 75), though its kernels go by strides. A
    page has all layers of a block, so that here blocks are outermost. It comes second: nobody else's choice changes."""
    named = CPUAttentionBackend.supported_kv_cache_layouts()
    if LAYOUT not in named:
        CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: (*named, LAYOUT))  # noqa: ARG005


allow_block_outermost()  # vLLM asks the backends before it asks the connector, and imports this before both


class Elsewhere(TorchFunctionMode):
    """While entered, ``torch.zeros`` of exactly this many int8 is this tensor."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and args == (len(self._memory),) and kwargs.get("dtype") is torch.int8:
            return self._memory
        return func(*args, **kwargs)


class Shared:
    """What the two halves of one engine have in common: both are in one process."""

    door: Door | None = None
    place: Place | None = None
    leases: Leases | None = None


class RadixKVZeroCopyConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Settings as of RadixKVConnector."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Errors: ValueError for an engine that it cannot serve, or without a daemon whose pool fits."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        check_zero_copy(vllm_config, kv_cache_config)
        self._is_scheduler = role is KVConnectorRole.SCHEDULER
        if self._is_scheduler:
            return
        spec = page_spec(kv_cache_config)
        Shared.door = Door(door_settings(spec, 1, self._kv_transfer_config.kv_connector_extra_config))
        self._memory = self._placed(Shared.door)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:  # noqa: ARG003 - vLLM's signature
        return cast("str", LAYOUT.name)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # -- in the worker ------------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any]:
        return Elsewhere(self._memory)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Errors: ValueError when vLLM's blocks are not where, or not in the order, that they have to be."""
        spec = page_spec(self._kv_cache_config)
        page_bytes = self._memory.numel() // self._kv_cache_config.num_blocks
        start, end = self._memory.data_ptr(), self._memory.data_ptr() + self._memory.numel()
        for name, cache in kv_caches.items():
            if not start <= cache.data_ptr() < end or cache.stride(0) * cache.element_size() != page_bytes:
                raise ValueError(f"vLLM has put {name} elsewhere; zero copy is for vLLM {vllm.__version__} on a CPU")
        _log.info("%d of vLLM's blocks are radixkv's pages (%s)", self._kv_cache_config.num_blocks, spec)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return Shared.leases.lost_blocks() if Shared.leases is not None else set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved: it is there."""

    def wait_for_save(self) -> None:
        """Nothing is saved: it is there."""

    def _placed(self, door: Door) -> torch.Tensor:
        """vLLM's KV cache: blocks of its own, then the arena. Errors: ValueError."""
        pool = door.ask("start", lambda pool: pool)
        if pool is None:
            raise ValueError("zero copy needs a daemon whose pool fits when the engine starts; see the log")
        blocks = self._kv_cache_config.num_blocks
        own = blocks - pool.total_pages
        needed = math.ceil(self._vllm_config.model_config.max_model_len / pool.page_size) + 2
        if own < needed:
            raise ValueError(
                f"a KV cache of {blocks} blocks for a pool of {pool.total_pages} pages; allowed: {needed} blocks more "
                "than pages, for one request of the longest kind (--kv-cache-memory-bytes)"
            )
        first = cast("torch.Tensor", pool.keys(0))  # the pool fits, and ``page_spec`` asks for plain pages
        page_bytes = first.stride(0) * first.element_size()
        memory = region(own * page_bytes, first)
        if memory.numel() != blocks * page_bytes:
            raise ConfigError(f"an arena of {memory.numel() - own * page_bytes} bytes is not {pool.total_pages} pages")
        Shared.place = Place(pool.memory, own, lambda other: put(memory, own * page_bytes, other.keys(0)))
        return memory

    # -- in the scheduler ---------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if Shared.door is None or Shared.place is None:
            raise ValueError("zero copy needs vLLM's worker in the process of its scheduler: one worker, executor uni")
        about = engine_settings(self._vllm_config, self._kv_cache_config, vllm.__version__)
        namespaces = Namespaces(self._vllm_config.model_config.model, about)
        Shared.leases = Leases(Shared.door, namespaces, Shared.place, kv_cache_manager)

    def get_num_new_matched_tokens(
        self,
        request: Any,
        num_computed_tokens: int,  # noqa: ARG002 - vLLM's signature
    ) -> tuple[int | None, bool]:
        """Hits are computed blocks to vLLM (``Leases.computed_blocks``). None: it asks again before the next step."""
        return None if self._leases.waits(request) else 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to load."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002 - vLLM's signature
        self._leases.begin_step()
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ARG002 - vLLM's
        self._leases.finished(request.request_id)
        return False, None

    def shutdown(self) -> None:
        if not self._is_scheduler and Shared.door is not None:
            Shared.door.close()

    @property
    def _leases(self) -> Leases:
        assert Shared.leases is not None
        return Shared.leases
