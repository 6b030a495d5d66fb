"""``PagedModel``: a Transformers model, a pool and a namespace, and greedy decoding over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.adapters.transformers import attention
from radixkv.adapters.transformers.pages import Reservation, SharedPages
from radixkv.adapters.transformers.sequence import OnPrefill, PagedSequence, Settings
from radixkv.config import KVSpec

ON_LOST = ("recompute", "raise")
CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Generation:
    """What ``greedy`` gives. Times are seconds from the call on.

    tokens: the new ones, a stop token included. cached_tokens + computed_tokens = prompt_tokens, unless pages were lost
    and computed again before the first token came. shared: False when it ended in local pages.
    """

    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    page_table: list[int]
    ttft_s: float
    total_s: float
    recoveries: int
    shared: bool


class PagedModel:
    """A Llama-like causal language model whose keys and values live in a pool's pages.

    Args:
        model: what ``AutoModelForCausalLM.from_pretrained`` gives, on the CPU. Its attention implementation is set to
            "radixkv", which with any other cache is Transformers' ``sdpa``.
        pool: ``client.pool(...)``, or None to compute in local pages.
        namespace: ``radixkv.Namespace`` of these weights. Needed with a pool.
        on_lost: "recompute" goes on after the loss of pages, session or daemon; "raise" hands the error on.
        timeout_s: how long a reserve may wait in a full pool.
        chunk_tokens: most tokens that one forward sees; a prompt is committed chunk by chunk.

    Raises ValueError when the pool's KV spec is not the model's, and for models whose attention pages do not know.
    """

    def __init__(  # noqa: PLR0913 - keywords with defaults
        self,
        model: Any,
        pool: Any = None,
        namespace: Any = None,
        *,
        on_lost: str = "recompute",
        timeout_s: float | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        if on_lost not in ON_LOST:
            raise ValueError(f"on_lost = {on_lost!r} is not allowed; allowed: {', '.join(ON_LOST)}")
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens = {chunk_tokens} is not allowed; allowed: 1 or more")
        if pool is not None and namespace is None:
            raise ValueError("a pool needs a namespace: what must be equal before pages may be shared")
        spec = spec_of(model)
        if pool is not None:
            if pool.ranks > 1:
                raise ValueError(f"a pool of {pool.ranks} ranks is not supported; allowed: 1 (a model in one process)")
            _check_spec(pool.spec, spec)
            spec = pool.spec
        attention.register()
        model.set_attn_implementation(attention.NAME)
        reservation = None if pool is None else Reservation(pool, namespace, timeout_s)
        self.model = model
        self._settings = Settings(model, spec, reservation, on_lost, chunk_tokens)

    def open(self, tokens: Sequence[int], max_new_tokens: int = 0) -> PagedSequence:
        """Reserve pages for a prompt and at most ``max_new_tokens`` more. Use it in a ``with`` block."""
        return PagedSequence(self._settings, tokens, max_new_tokens)

    def adopt(self, ticket: bytes, max_new_tokens: int = 0) -> PagedSequence:
        """Go on with a sequence that ``PagedSequence.handoff`` gave up, here or in another process: a prefill worker
        computes the prompt, a decode worker the rest, and no keys or values move. Use it in a ``with`` block.

        Raises ValueError without a pool; StaleHandle (used, over its time, unknown to this daemon), SessionLost,
        Unavailable, Timeout: then ``open`` the tokens instead.
        """
        reservation = self._settings.reservation
        if reservation is None:
            raise ValueError("there is no pool to adopt from")
        pages = SharedPages.adopt(reservation, ticket)
        return PagedSequence(self._settings, pages.tokens, max_new_tokens, pages)

    def greedy(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        *,
        stop: Collection[int] | None = None,
        on_token: Callable[[int], None] | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> Generation:
        """Continue a prompt with the most probable tokens.

        stop: token ids after which to end (None: the model's own end-of-text ids). on_token: called with each token as
        soon as it is known. Raises what ``PagedSequence`` raises.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {max_new_tokens} is not allowed; allowed: 1 or more")
        started = time.monotonic()
        stop = end_of_text(self.model) if stop is None else stop
        output: list[int] = []
        with self.open(tokens, max_new_tokens) as sequence:
            token = int(sequence.logits(on_prefill).argmax())
            ttft_s, computed = time.monotonic() - started, sequence.computed_tokens
            while True:
                output.append(token)
                if on_token is not None:
                    on_token(token)
                if token in stop or len(output) == max_new_tokens:
                    break
                sequence.append(token)
                token = int(sequence.logits().argmax())
        return Generation(
            tokens=output,
            prompt_tokens=len(tokens),
            cached_tokens=sequence.cached_tokens,
            computed_tokens=computed,
            page_table=sequence.page_table,
            ttft_s=ttft_s,
            total_s=time.monotonic() - started,
            recoveries=sequence.recoveries,
            shared=sequence.shared,
        )


def spec_of(model: Any) -> KVSpec:
    """The KV spec that a model's configuration asks for, page size 16.

    Raises ValueError for attention that differs by layer (sliding windows and the like) or is scaled by soft caps.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    # Some configurations carry a window that is switched off beside it.
    if kinds != {"full_attention"} or (window is not None and getattr(config, "use_sliding_window", True)):
        raise ValueError(f"attention kinds {sorted(kinds)}, sliding_window {window} are not supported; allowed: full")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError("attn_logit_softcapping is not supported; allowed: None")
    heads = config.num_attention_heads
    return KVSpec(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def end_of_text(model: Any) -> frozenset[int]:
    """The token ids with which the model ends a text."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _check_spec(pool: KVSpec, model: KVSpec) -> None:
    for key in ("layers", "kv_heads", "head_dim", "dtype"):
        if getattr(pool, key) != getattr(model, key):
            raise ValueError(f"the pool has {key} = {getattr(pool, key)!r}, the model needs {getattr(model, key)!r}")
