"""The half in vLLM's worker: copies between radixkv's pages and vLLM's blocks.

A page holds a block of all layers, byte for byte as vLLM's attention backend wrote it. The bytes are not looked into:
on a CPU the backend packs the keys of a block together in an order of its own, so that half a block is not half of its
tokens. Therefore a page is as long as a block, and the backend is part of the namespace.

::

    load   reserve ─> committed pages -> blocks ─> valid? ─> free          what is missing or not valid: failed blocks
    save   reserve ─> blocks -> private pages ─> valid? ─> commit, free

``ranks.py`` is who reserves and who copies when several workers hold a model together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from radixkv.adapters.vllm.blocks import TOKEN_BYTES, Load, Save
from radixkv.adapters.vllm.ranks import Held, Side, indices
from radixkv.client.sync import Sequence
from radixkv.config import KVSpec
from radixkv.errors import RadixKVError


class WorkerHalf:
    def __init__(self, side: Side, spec: KVSpec) -> None:
        """``spec``: what this worker holds of a page."""
        self._side = side
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
        """Carry out loads; ``loaded`` and ``failed`` say how they ended."""
        for load in loads:
            self._failed.update(load.block_ids[self._load(load) :])
            self._loaded.add(load.request_id)

    @torch.inference_mode()
    def save(self, saves: Iterable[Save]) -> None:
        """Publish what can be published; what cannot will be computed by others again."""
        for save in saves:
            self._save(save)

    def loaded(self) -> set[str]:
        """Requests whose load has ended, well or not, since the last call."""
        ended, self._loaded = self._loaded, set()
        return ended

    def failed(self) -> set[int]:
        """vLLM's blocks that were to be loaded and were not, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def _load(self, load: Load) -> int:
        """How many of the load's blocks are there."""
        first = len(load.tokens) // TOKEN_BYTES // self._spec.page_size - len(load.block_ids)
        held = self._side.hold(
            "load",
            load.namespace,
            load.tokens,
            lambda seq: seq.page_table[first : max(first, shared_pages(seq))].tolist(),
        )
        if held is None:
            return 0
        there = len(held.pages)
        return there if self._side.done(self._copy(held, load.block_ids[:there], to_pages=False)) else 0

    def _save(self, save: Save) -> None:
        held = self._side.hold(
            "save", save.namespace, save.tokens, lambda seq: seq.page_table[shared_pages(seq) :].tolist()
        )
        if held is None:
            return
        new = len(held.pages)
        well = self._copy(held, save.block_ids[len(save.block_ids) - new :], to_pages=True)
        self._side.done(well, commit_tokens=len(save.block_ids) * self._spec.page_size if new else 0)

    def _copy(self, held: Held, block_ids: Iterable[int], *, to_pages: bool) -> bool:
        """Between vLLM's blocks and this rank's pages. False: they cannot be reached."""
        if held.memory is None:
            return False
        blocks, rows = indices(block_ids), held.pages
        try:
            layers = self._pages(held.memory)
        except RadixKVError:  # a rank whose session has just ended
            return False
        for ours, theirs in zip(self._blocks, layers, strict=True):
            if to_pages:
                theirs[rows] = ours[blocks].flatten(1).to(theirs.device)
            else:
                ours[blocks] = theirs[rows].view(len(rows), *ours.shape[1:]).to(ours.device)
        return True

    def _pages(self, memory: Any) -> list[torch.Tensor]:
        """An arena as [pages, elements of a layer] for each layer. Errors: SessionLost of a rank."""
        return [page_rows(memory.keys(layer), memory.values(layer)) for layer in range(self._spec.layers)]


def shared_pages(seq: Sequence) -> int:
    """Pages at the beginning that are complete. ``committed_tokens`` would be one token short of a full hit."""
    return seq.writable_from_tokens // seq.memory.spec.page_size


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
