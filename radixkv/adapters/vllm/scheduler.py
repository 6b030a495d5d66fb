"""The half in vLLM's scheduler: what is cached of a prompt, what is to be loaded, and when a prompt is to be saved.

A lookup pins nothing. Pages are reserved by the worker, within the step that copies them and gives them back, so a
request that is aborted or preempted at any moment has nothing to lose. vLLM's requests are used by their attributes,
which is why this file runs without vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.adapters.vllm.blocks import TOKEN_BYTES, Load, Save, full_blocks, loadable_tokens, usable_blocks
from radixkv.adapters.vllm.door import Door
from radixkv.adapters.vllm.namespace import Namespaces
from radixkv.client.namespace import Namespace
from radixkv.client.tokens import pack


@dataclass(slots=True)
class Prompt:
    """One request's prompt. tokens: packed, its full blocks. saved: nothing is left to be saved. loads: so far."""

    request: Any
    namespace: Namespace
    tokens: bytes
    blocks: int
    saved: bool = False
    loads: int = 0


class SchedulerHalf:
    def __init__(self, door: Door, namespaces: Namespaces, block_size: int) -> None:
        self._door = door
        self._namespaces = namespaces
        self._block_size = block_size
        self._prompts: dict[str, Prompt] = {}
        self._loads: list[Load] = []

    def matched(self, request: Any, local_tokens: int) -> int:
        """Tokens beyond ``local_tokens`` that can be loaded. vLLM may ask several times."""
        prompt = self._prompt(request)
        if prompt is None or request.skip_reading_prefix_cache or prompt.loads > request.num_preemptions:
            # A load that failed leads here again: what failed once is computed.
            return 0
        usable = usable_blocks(request.num_prompt_tokens, self._block_size) * self._block_size
        if usable <= local_tokens:
            return 0
        found = self._door.ask("lookup", lambda pool: pool.lookup(prompt.tokens, namespace=prompt.namespace))
        if found is None:
            return 0
        prompt.saved = full_blocks(found.device_tokens, self._block_size) >= prompt.blocks
        return loadable_tokens(found.device_tokens, local_tokens, request.num_prompt_tokens, self._block_size)

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int, local_tokens: int) -> None:
        """vLLM has blocks for ``external_tokens`` that follow ``local_tokens``: they are loaded in this step."""
        prompt = self._prompt(request)
        if prompt is None or not external_tokens:
            return
        first, end = local_tokens // self._block_size, (local_tokens + external_tokens) // self._block_size
        tokens = prompt.tokens[: end * self._block_size * TOKEN_BYTES]
        prompt.loads += 1
        self._loads.append(Load(request.request_id, prompt.namespace, tokens, tuple(block_ids[first:end])))

    def plan(
        self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]
    ) -> tuple[list[Load], list[Save]]:
        """Loads and saves of the step that computes so many tokens of each request. Called once a step."""
        loads, self._loads = self._loads, []
        saves = [
            Save(prompt.namespace, prompt.tokens, tuple(blocks_of(request_id)[: prompt.blocks]))
            for request_id, tokens in scheduled.items()
            if (prompt := self._complete(request_id, tokens)) is not None
        ]
        return loads, saves

    def finished(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)

    def _complete(self, request_id: str, scheduled: int) -> Prompt | None:
        """The prompt, if this step completes its full blocks and they are still to be saved."""
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.saved:
            return None
        if prompt.request.num_computed_tokens + scheduled < prompt.blocks * self._block_size:
            return None
        prompt.saved = True
        return prompt

    def _prompt(self, request: Any) -> Prompt | None:
        """None for what cannot be cached: less than a block, or embeddings in place of tokens."""
        known = self._prompts.get(request.request_id)
        if known is not None:
            return known
        blocks = full_blocks(request.num_prompt_tokens, self._block_size)
        if not blocks or request.prompt_embeds is not None or request.prompt_token_ids is None:
            return None
        tokens = pack(request.prompt_token_ids[: blocks * self._block_size])
        prompt = Prompt(request, self._namespaces.of(request), tokens, blocks)
        self._prompts[request.request_id] = prompt
        return prompt
