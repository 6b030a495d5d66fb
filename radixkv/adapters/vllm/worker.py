"""The half in vLLM's worker: copies between radixkv's pages and vLLM's blocks.

A page holds a block of all layers, byte for byte as vLLM's attention backend wrote it. The bytes are not looked into:
on a CPU the backend packs the keys of a block together in an order of its own, so that half a block is not half of its
tokens. Therefore a page is as long as a block, and the backend is part of the namespace.

::

    load   reserve ─> committed pages -> blocks ─> valid? ─> free          what is missing or not valid: failed blocks
    save   reserve ─> blocks -> private pages ─> valid? ─> commit, free
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from radixkv.adapters.vllm.blocks import TOKEN_BYTES, Load, Save
from radixkv.adapters.vllm.door import Door, check
from radixkv.client.sync import Pool, Sequence
from radixkv.config import KVSpec
from radixkv.errors import SessionLost


class WorkerHalf:
    def __init__(self, door: Door, spec: KVSpec) -> None:
        self._door = door
        self._spec = spec
        self._blocks: list[torch.Tensor] = []
        self._loaded: set[str] = set()
        self._failed: set[int] = set()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM's blocks, a tensor [blocks, ...] a layer. Errors: ValueError when they are not what the spec says."""
        self._blocks = [kv_caches[name] for name in sorted(kv_caches, key=layer_number)]
        spec = self._spec
        elements = 2 * spec.page_size * spec.kv_heads * spec.head_dim
        for tensor in self._blocks:
            if tensor[0].numel() != elements or str(tensor.dtype) != f"torch.{spec.dtype}":
                raise ValueError(
                    f"vLLM's block of a layer has {tensor[0].numel()} elements of {tensor.dtype}; "
                    f"allowed: {elements} of torch.{spec.dtype}, [keys, values] of a block's tokens"
                )

    @torch.inference_mode()
    def load(self, loads: Iterable[Load]) -> None:
        """Carry out loads; ``results`` says how they ended."""
        for load in loads:
            loaded = self._door.ask("load", lambda pool, load=load: self._load(pool, load)) or 0  # type: ignore[misc]
            self._failed.update(load.block_ids[loaded:])
            self._loaded.add(load.request_id)

    @torch.inference_mode()
    def save(self, saves: Iterable[Save]) -> None:
        """Publish what can be published; what cannot will be computed by others again."""
        for save in saves:
            self._door.ask("save", lambda pool, save=save: self._save(pool, save))  # type: ignore[misc]

    def loaded(self) -> set[str]:
        """Requests whose load has ended, well or not, since the last call."""
        ended, self._loaded = self._loaded, set()
        return ended

    def failed(self) -> set[int]:
        """vLLM's blocks that were to be loaded and were not, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def _load(self, pool: Pool, load: Load) -> int:
        """How many of the load's blocks are there."""
        pages = len(load.tokens) // TOKEN_BYTES // self._spec.page_size
        first = pages - len(load.block_ids)
        with pool.reserve(load.tokens, namespace=load.namespace, last_page="keep") as seq:
            there = max(0, shared_pages(seq) - first)
            blocks, rows = indices(load.block_ids[:there]), indices(seq.page_table[first : first + there])
            for layer, cached in enumerate(self._pages(seq.memory)):
                target = self._blocks[layer]
                target[blocks] = cached[rows].view(there, *target.shape[1:]).to(target.device)
            # The pages may have been taken from us (a lapsed session, a restarted daemon) while we copied.
            return there if seq.valid() else 0

    def _save(self, pool: Pool, save: Save) -> bool:
        size = self._spec.page_size
        with pool.reserve(save.tokens, namespace=save.namespace, last_page="keep") as seq:
            first = shared_pages(seq)
            if first == len(save.block_ids):
                return True
            blocks, rows = indices(save.block_ids[first:]), indices(seq.page_table[first:])
            for layer, cached in enumerate(self._pages(seq.memory)):
                source = self._blocks[layer]
                cached[rows] = source[blocks].reshape(len(rows), -1).to(cached.device)
            if not seq.valid():
                raise SessionLost("pages of the sequence were given to another one")
            seq.free(commit=len(save.block_ids) * size)
        return True

    def _pages(self, memory: Any) -> list[torch.Tensor]:
        """The arena a sequence was reserved in, as [pages, elements of a layer] for each layer."""
        check(memory.spec, self._spec)
        return [page_rows(memory.keys(layer), memory.values(layer)) for layer in range(self._spec.layers)]


def shared_pages(seq: Sequence) -> int:
    """Pages at the beginning that are complete. ``committed_tokens`` would be one token short of a full hit."""
    return seq.writable_from_tokens // seq.memory.spec.page_size


def indices(numbers: Iterable[int]) -> torch.Tensor:
    """Also of nothing, which torch would take for floats."""
    return torch.tensor([int(number) for number in numbers], dtype=torch.long)


def page_rows(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One layer of all pages as [pages, elements]: keys, then values. Errors: ValueError if they are apart."""
    elements = keys[0].numel()
    apart = values.data_ptr() - keys.data_ptr()
    if apart != elements * keys.element_size() or not keys[0].is_contiguous() or not values[0].is_contiguous():
        raise ValueError("keys and values of a layer do not lie together; allowed: the default layout of a page")
    return torch.as_strided(keys, (len(keys), 2 * elements), (keys.stride(0), 1), keys.storage_offset())


def layer_number(name: str) -> int:
    """Of "model.layers.7.self_attn.attn": 7."""
    numbers = re.findall(r"\.(\d+)\.", name)
    if not numbers:
        raise ValueError(f"no layer number in {name!r}; allowed: names such as model.layers.0.self_attn.attn")
    return int(numbers[0])
