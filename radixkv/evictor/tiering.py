"""When it pays to load from the host tier what could be computed again."""

from __future__ import annotations


def worth_loading(
    tokens: int, load_bytes: int, bytes_per_s: float, prefill_tokens_per_s: float, minimum_tokens: int
) -> bool:
    """Is it quicker to copy the KV of ``tokens`` tokens, ``load_bytes`` in all, than to compute it?

    ``bytes_per_s``: measured of earlier loads, 0: none yet. ``prefill_tokens_per_s``: what the worker says of itself,
    0: nothing. While either is not known, loading is: a prefix cache exists since it nearly always is. Fewer than
    ``minimum_tokens`` are never loaded.
    """
    if tokens < max(1, minimum_tokens):
        return False
    if bytes_per_s <= 0 or prefill_tokens_per_s <= 0:
        return True
    return load_bytes / bytes_per_s < tokens / prefill_tokens_per_s
