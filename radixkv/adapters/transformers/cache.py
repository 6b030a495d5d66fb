"""The Cache that Transformers fills: it writes keys and values into pages and keeps none itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from radixkv.adapters.transformers.pages import Pages
from radixkv.kernels import Pages as KernelPages
from radixkv.kernels import QuantizedPages, append, decode_attention
from radixkv.kernels.quantized import read


class PageTable:
    """One sequence's page table as tensors, shared by all layers of a cache.

    Attributes: pages (where the memory is), row (int32 [1, pages of the sequence]).
    """

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.refresh()

    def refresh(self) -> None:
        """Take over the page table after the sequence has grown."""
        self._source = self.pages.page_table
        self.row = torch.tensor(self._source, dtype=torch.int32).unsqueeze(0)
        self._span = (-1, -1)
        self._slots = torch.empty(0, dtype=torch.int64)

    def slots(self, start: int, count: int) -> torch.Tensor:
        """Where positions start .. start+count-1 lie: page * page_size + row, int64 [count].

        Raises ValueError below writable_from_tokens (a shared page is never written) and beyond the last page.
        """
        if self._span == (start, count):  # every layer of a forward asks for the same
            return self._slots
        if self.pages.page_table is not self._source:
            self.refresh()
        page_size = self.pages.page_size
        capacity = self.row.shape[1] * page_size
        if start < self.pages.writable_from_tokens or start + count > capacity:
            raise ValueError(
                f"positions {start}..{start + count - 1} are not writable; "
                f"allowed: {self.pages.writable_from_tokens}..{capacity - 1}"
            )
        positions = torch.arange(start, start + count)
        self._slots = self.row[0, positions // page_size].to(torch.int64) * page_size + positions % page_size
        self._span = (start, count)
        return self._slots


class PagedLayer(CacheLayerMixin):  # type: ignore[misc] # transformers is untyped here
    """One layer's keys and values, in pages.

    ``seen`` counts the tokens whose keys and values this layer has, ``past`` those it had before the running forward.
    ``answered``: the attention function has been asked about what the last ``update`` gave back.
    """

    is_sliding = False

    def __init__(self, table: PageTable, layer: int, seen: int) -> None:
        super().__init__()
        self.table = table
        self.key_pages, self.value_pages = table.pages.views(layer)
        self.seen = self.past = seen
        self.answered = False
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys (already rotated) and values, both [1, kv_heads, tokens, head_dim], and give them back.

        Both carry this layer as an attribute: that is how the attention function, which Transformers calls next with
        these very tensors, finds the pages, and sees that they are these very tensors.
        """
        if key_states.shape[0] != 1:
            raise ValueError(f"a batch of {key_states.shape[0]} is not supported; allowed: 1 sequence a cache")
        check_heads(self.key_pages, key_states, value_states)
        count = key_states.shape[2]
        slots = self.table.slots(self.seen, count)
        append(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), self.key_pages, self.value_pages, slots)
        self.past = self.seen
        self.seen += count
        self.answered = False
        key_states.radixkv_layer = value_states.radixkv_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    @property
    def in_pages(self) -> bool:
        """Whether what the running forward needs lies in the pages alone: earlier tokens, or, quantized, its own too.

        So a prompt gives the same whether its beginning was computed just now or found in the cache.
        """
        return self.past > 0 or isinstance(self.key_pages, QuantizedPages)

    def decode(self, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of the last token, query and out [1, heads, head_dim], over all that is in the pages."""
        lengths = torch.tensor([self.seen], dtype=torch.int32)
        return decode_attention(query, self.key_pages, self.value_pages, self.table.row, lengths, scale=scale)

    def gather(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values so far, copied out of the pages: [1, kv_heads, seen, head_dim] each."""
        pages = self.table.row[0].to(torch.int64)[: -(-self.seen // self.table.pages.page_size)]
        return self._rows(self.key_pages, pages, dtype), self._rows(self.value_pages, pages, dtype)

    def _rows(self, memory: KernelPages, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = read(memory, ids).to(dtype) if isinstance(memory, QuantizedPages) else memory[ids].flatten(0, 1)
        return rows[: self.seen].transpose(0, 1).unsqueeze(0)  # of [tokens, kv_heads, head_dim]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that a mask must cover, position of the first of them)."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        raise NotImplementedError("pages are given back by the sequence that holds them, not by reset()")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("beam search needs share(), which this cache does not do")


class PagedCache(Cache):  # type: ignore[misc] # transformers is untyped here
    """``past_key_values`` over the pages of one sequence, of which the first ``seen`` tokens are there already."""

    def __init__(self, pages: Pages, seen: int) -> None:
        self.table = PageTable(pages)
        super().__init__(layers=[PagedLayer(self.table, layer, seen) for layer in range(pages.layers)])

    def check(self, end: int) -> None:
        """Raises ValueError unless a forward has put its tokens up to ``end`` into the pages, and read them there."""
        check_answered(layer.answered and layer.seen == end for layer in self.layers)


def check_heads(pages: KernelPages, *states: torch.Tensor) -> None:
    """Raises ValueError for keys or values [rows, kv_heads, tokens, head_dim] that are not those of the pages."""
    for given in states:
        if (given.shape[1], given.shape[3]) != tuple(pages.shape[2:]):
            raise ValueError(
                f"keys or values of {given.shape[1]} heads of {given.shape[3]} dims are not supported here; "
                f"allowed: {pages.shape[2]} of {pages.shape[3]}"
            )


def check_answered(layers: Iterable[bool]) -> None:
    """Raises ValueError unless the attention of each layer has read the pages: a model may go other ways (an encoder
    used as a decoder has no cache, others change keys behind it), and its logits would mean nothing."""
    silent = [number for number, answered in enumerate(layers) if not answered]
    if silent:
        raise ValueError(
            f"the attention of layers {silent} does not read radixkv pages; allowed: models that give what the cache "
            "gave back to Transformers' attention interface as it is"
        )
