"""``past_key_values`` of one forward that computes one token for each of several sequences.

It has no pages of its own: it is made of the sequences' caches, writes each row's keys and values where that row's own
cache would have, and reads them by one ragged page table. Rows whose pages lie in one memory, as those of a daemon do,
are one ``RowGroup`` and one attention call; a sequence in local pages is a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from radixkv.adapters.transformers.cache import PagedCache, PagedLayer, check_answered, check_heads
from radixkv.kernels import SharedPrefixes, append, decode_attention, group_prefixes


class RowGroup:
    """Rows of a batch whose pages lie in one memory.

    ``rows`` says which of the batch, ``page_table`` int32 [rows, pages], ``lengths`` int32 [rows] (the new token is
    one of them) and ``slots`` int64 [rows] (where it goes) are those of the forward that ``prepare`` was called for.
    """

    def __init__(self, rows: Sequence[int], caches: Sequence[PagedCache]) -> None:
        self.rows = torch.tensor(rows)
        self.caches = caches
        self._prefixes: SharedPrefixes | None = None

    def prepare(self) -> None:
        """Look at the rows' page tables again, which may have grown. Raises ValueError where a row has no room."""
        tables = [cache.table for cache in self.caches]
        seen = [cache.get_seq_length() for cache in self.caches]
        self.slots = torch.cat([table.slots(start, 1) for table, start in zip(tables, seen, strict=True)])
        self.page_table = torch.nn.utils.rnn.pad_sequence(
            [table.row[0] for table in tables], batch_first=True, padding_value=-1
        )
        self.lengths = torch.tensor(seen, dtype=torch.int32) + 1

    def prefixes(self) -> SharedPrefixes | None:
        """What the rows share, so that it is read once. Found once: rows only grow as long as they are this group."""
        if self._prefixes is None and len(self.caches) > 1:
            self._prefixes = group_prefixes(self.page_table, self.lengths, self.caches[0].table.pages.page_size)
        return self._prefixes

    def layer(self, index: int) -> list[PagedLayer]:
        """This layer of each row's own cache."""
        return [cache.layers[index] for cache in self.caches]


class BatchLayer(CacheLayerMixin):  # type: ignore[misc] # transformers is untyped here
    """One layer of a ``BatchCache``."""

    is_sliding = False

    def __init__(self, groups: Sequence[RowGroup], index: int) -> None:
        super().__init__()
        self.groups = groups
        self.index = index
        self.answered = False
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, both [rows, kv_heads, 1, head_dim], and give them back, as ``PagedLayer`` does."""
        if key_states.shape[2] != 1:
            raise ValueError(f"{key_states.shape[2]} tokens a row are not supported in a batch; allowed: 1")
        for group in self.groups:
            layers = group.layer(self.index)
            check_heads(layers[0].key_pages, key_states, value_states)
            keys, values = key_states[group.rows, :, 0], value_states[group.rows, :, 0]
            append(keys, values, layers[0].key_pages, layers[0].value_pages, group.slots)
            for layer in layers:
                layer.past = layer.seen
                layer.seen += 1
        key_states.radixkv_layer = value_states.radixkv_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def decode(self, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of each row's last token, query and out [rows, heads, head_dim], over all of that row."""
        output = torch.empty_like(query)
        for group in self.groups:
            first = group.layer(self.index)[0]
            output[group.rows] = decode_attention(
                query[group.rows],
                first.key_pages,
                first.value_pages,
                group.page_table,
                group.lengths,
                scale=scale,
                prefixes=group.prefixes(),
            )
        return output

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that a mask must cover, position of the first of them)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Of the longest row. Positions are given to the model beside the tokens, row by row."""
        return max(layer.seen for group in self.groups for layer in group.layer(self.index))

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        raise NotImplementedError("pages are given back by the sequences that hold them, not by reset()")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("beam search needs share(), which this cache does not do")


class BatchCache(Cache):  # type: ignore[misc] # transformers is untyped here
    """The groups of a batch, as Transformers sees them in one forward."""

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        for group in groups:
            group.prepare()
        count = len(groups[0].caches[0].layers)
        super().__init__(layers=[BatchLayer(groups, index) for index in range(count)])

    def check(self) -> None:
        """As ``PagedCache.check``, after the forward."""
        check_answered(layer.answered for layer in self.layers)


def by_memory(caches: Sequence[PagedCache]) -> list[RowGroup]:
    """Rows in groups by the memory that their pages lie in, in the order in which the first of each comes."""
    rows: dict[int, list[int]] = {}
    for row, cache in enumerate(caches):
        rows.setdefault(cache.layers[0].key_pages.data_ptr(), []).append(row)
    return [RowGroup(members, [caches[row] for row in members]) for members in rows.values()]
