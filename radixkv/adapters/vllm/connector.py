"""``RadixKVConnector``: what vLLM 0.32 calls, in its scheduler and in its worker. The only file that imports vLLM.

Loads are asynchronous in vLLM's sense: a request waits, outside the batch, for the step in which its blocks are copied.
vLLM caches blocks of such a request only after the load is known to have ended well, and a failed one makes it compute
them; with synchronous loads the step would already run on what was not loaded.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.parallel_state import get_tp_group

from radixkv.adapters.vllm.blocks import Load, Save
from radixkv.adapters.vllm.door import Door, DoorSettings, door_settings
from radixkv.adapters.vllm.engine import check_engine, engine_settings, page_spec
from radixkv.adapters.vllm.namespace import Namespaces
from radixkv.adapters.vllm.ranks import Alone, Follower, Leader, Side, Together
from radixkv.adapters.vllm.scheduler import SchedulerHalf
from radixkv.adapters.vllm.worker import WorkerHalf

Closable = TypeVar("Closable", Door, Follower)


@dataclass
class RadixKVMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What one step's worker has to do."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class RadixKVConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Settings (kv_connector_extra_config): endpoint, pool, deadline_s, pause_first_s, pause_max_s."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Errors: ValueError for an engine that it cannot serve, with what is allowed."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        spec = page_spec(kv_cache_config)
        ranks = vllm_config.parallel_config.tensor_parallel_size
        settings = door_settings(spec, ranks, self._kv_transfer_config.kv_connector_extra_config)
        self._closing = contextlib.ExitStack()
        self._local_tokens: dict[str, int] = {}
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            about = engine_settings(vllm_config, kv_cache_config, vllm.__version__)
            namespaces = Namespaces(vllm_config.model_config.model, about)
            self._scheduler = SchedulerHalf(self._closed_at_end(Door(settings)), namespaces, spec.page_size)
        else:
            self._worker = WorkerHalf(self._side(settings), spec)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    # -- in the scheduler ---------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self._scheduling.matched(request, num_computed_tokens)
        self._local_tokens[request.request_id] = num_computed_tokens
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        local = self._local_tokens.pop(request.request_id, 0)
        if num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            self._scheduling.allocated(request, block_ids, num_external_tokens, local)

    def build_connector_meta(self, scheduler_output: Any) -> RadixKVMetadata:
        state = scheduler_output.kv_connector_block_state
        return RadixKVMetadata(
            *self._scheduling.plan(scheduler_output.num_scheduled_tokens, lambda name: state.get_block_ids(name)[0])
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ARG002 - vLLM's
        self._local_tokens.pop(request.request_id, None)
        self._scheduling.finished(request.request_id)
        return False, None

    # -- in the worker ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._working.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        self._working.load(self._get_connector_metadata().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is not computed before its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are saved together, after the step."""

    def wait_for_save(self) -> None:
        self._working.save(self._get_connector_metadata().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:  # noqa: ARG002 - vLLM's signature
        return None, self._working.loaded()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.failed()

    # -- both ---------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self._closing.close()

    def _side(self, settings: DoorSettings) -> Side:
        """This worker's part, by its rank among those that hold the model together."""
        if settings.ranks == 1:
            return Leader(self._closed_at_end(Door(settings)), Alone())
        group = get_tp_group()
        ranks = Together(group.cpu_group)
        if group.rank_in_group == 0:
            return Leader(self._closed_at_end(Door(settings)), ranks)
        return self._closed_at_end(Follower(settings, ranks, group.rank_in_group))

    def _closed_at_end(self, what: Closable) -> Closable:
        self._closing.callback(what.close)
        return what

    @property
    def _scheduling(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _working(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker
