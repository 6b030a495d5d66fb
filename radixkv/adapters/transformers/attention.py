"""The attention function behind ``attn_implementation="radixkv"``: it reads keys and values from pages.

One query token: decode attention over the page table. Several (a prefill): the pages of a cached prefix are gathered,
of a quantized pool those of the new tokens too, and torch's attention does the rest. With any other cache it is
Transformers' own ``sdpa``, so that a prepared model can still be used without pages.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from radixkv.adapters.transformers.batch_cache import BatchLayer
from radixkv.adapters.transformers.cache import PagedLayer

NAME = "radixkv"
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "indices", "block_indices")
"""Keyword arguments with which some models change what attention means. The page kernels do not know them."""


def register() -> None:
    """Make the name known to Transformers. Doing it again changes nothing."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def paged_attention(  # noqa: PLR0913, PLR0917 -- the signature is Transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, heads, tokens, head_dim]; key, value as the cache gave them back; out [B, tokens, heads, head_dim].

    B is 1, or with a ``BatchCache`` and one token a row, the rows of the batch.

    Raises ValueError for attention the page kernels do not know, for keys or values that are not as they are in the
    pages, and for padded sequences.
    """
    layer: PagedLayer | BatchLayer | None = getattr(key, "radixkv_layer", None)
    if layer is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} = {kwargs[name]!r} is not supported with radixkv pages; allowed: None")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ValueError("is_causal = False is not supported with radixkv pages; allowed: True")
    of_values: object = getattr(value, "radixkv_layer", None)
    if of_values is not layer:
        raise ValueError(
            f"{type(module).__name__} is not supported with radixkv pages: it changes values behind the cache; "
            "allowed: attention over the values that the cache gave back"
        )
    layer.answered = True
    if query.shape[2] == 1:
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("a padded or masked sequence is not supported with radixkv pages; allowed: no padding")
        return layer.decode(query[:, :, 0], scaling).unsqueeze(1), None
    if isinstance(layer, BatchLayer):
        raise TypeError("a batch computes one token a row")
    if layer.in_pages:
        key, value = layer.gather(query.dtype)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return output, None
