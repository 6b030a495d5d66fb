"""``PagedModel``: a Transformers model, a pool and a namespace, and greedy decoding over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from radixkv.adapters.transformers import attention
from radixkv.adapters.transformers.batch import PagedBatch
from radixkv.adapters.transformers.decoding import Loop, OnToken, prompts_of, run
from radixkv.adapters.transformers.pages import Reservation, SharedPages
from radixkv.adapters.transformers.refusals import refuse_inputs, refuse_settings
from radixkv.adapters.transformers.sequence import LOST, OnPrefill, PagedSequence, Settings
from radixkv.config import KVSpec
from radixkv.errors import OutOfPages, RadixKVError

SURVIVES: dict[str, tuple[type[RadixKVError], ...]] = {"recompute": LOST, "raise": ()}
"""What on_lost and on_full may be, and the errors that a sequence outlives then."""
FULL: dict[str, tuple[type[RadixKVError], ...]] = {"recompute": (OutOfPages,), "raise": ()}
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
        on_full: "raise" is OutOfPages where the pool has no room; "recompute" goes on in local pages.
        timeout_s: how long a reserve may wait in a full pool.
        chunk_tokens: most tokens that one forward sees; a prompt is committed chunk by chunk.
        kv_dtype: what local pages hold, perhaps quantized: see ``radixkv.config.QUANTIZED``. With a pool its spec says
            it, for local pages too; otherwise the model's dtype.

    Raises ValueError when the pool's KV spec is not the model's, and for models whose attention pages do not know.
    """

    def __init__(  # noqa: PLR0913 - keywords with defaults
        self,
        model: Any,
        pool: Any = None,
        namespace: Any = None,
        *,
        on_lost: str = "recompute",
        on_full: str = "raise",
        timeout_s: float | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        kv_dtype: str | None = None,
    ) -> None:
        for name, given in (("on_lost", on_lost), ("on_full", on_full)):
            if given not in SURVIVES:
                raise ValueError(f"{name} = {given!r} is not allowed; allowed: {', '.join(SURVIVES)}")
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens = {chunk_tokens} is not allowed; allowed: 1 or more")
        if pool is not None and namespace is None:
            raise ValueError("a pool needs a namespace: what must be equal before pages may be shared")
        if hasattr(model, "_orig_mod"):
            raise ValueError("a model of torch.compile is not supported; allowed: the model that it was made of")
        spec = spec_of(model)
        if pool is not None:
            if pool.ranks > 1:
                raise ValueError(f"a pool of {pool.ranks} ranks is not supported; allowed: 1 (a model in one process)")
            _check_spec(pool.spec, spec)
            spec = pool.spec
        if kv_dtype not in {None, spec.dtype}:
            if pool is not None:
                raise ValueError(f"kv_dtype = {kv_dtype!r}, but the pool has {spec.dtype!r}")
            spec = replace(spec, dtype=str(kv_dtype))
            _check_spec(spec, spec_of(model))
        attention.register()
        model.set_attn_implementation(attention.NAME)
        if model.config.get_text_config()._attn_implementation != attention.NAME:  # it only says so in the log
            raise ValueError(
                f"{type(model).__name__} is not supported; allowed: models that use Transformers' attention interface"
            )
        reservation = None if pool is None else Reservation(pool, namespace, timeout_s)
        self.model = model
        self._settings = Settings(model, spec, reservation, SURVIVES[on_lost] + FULL[on_full], chunk_tokens)

    def open(self, tokens: Sequence[int], max_new_tokens: int = 0) -> PagedSequence:
        """Reserve pages for a prompt and at most ``max_new_tokens`` more. Use it in a ``with`` block."""
        return PagedSequence(self._settings, tokens, max_new_tokens)

    def batch(self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 0) -> PagedBatch:
        """Several prompts, which share what they have in common, and at most ``max_new_tokens`` more for each. Pages
        are reserved prompt by prompt, by its ``prefill``. Use it in a ``with`` block."""
        return PagedBatch(self._settings, prompts, max_new_tokens)

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

    def decode(  # noqa: PLR0913, PLR0917 - the signature is Transformers'
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        on_token: OnToken | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """What ``model.generate(..., custom_generate=paged.decode)`` calls in place of its own loop.

        Raises ValueError for what pages cannot do, by name, and what ``PagedBatch`` raises. Transformers 5.19 keeps a
        ``streamer`` to itself on this way (it gets the prompt and nothing more): use ``generate``, which does not.
        """
        if model is not self.model and all(model is not part for part in self.model.modules()):
            raise ValueError("the model is another one than that of these pages")
        refuse_settings(vars(generation_config))
        refuse_inputs(model_kwargs)
        prompts = prompts_of(input_ids, model_kwargs.get("attention_mask"))
        loop = Loop(input_ids, generation_config, logits_processor, stopping_criteria)
        batch = self.batch(prompts, stopping_criteria.max_length - input_ids.shape[1])
        return run(batch, loop, streamer, on_token)

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

    Raises ValueError for attention that differs by layer (sliding windows and the like) or is scaled by soft caps, and
    for models that are no decoders, or have no attention.
    """
    if model.config.is_encoder_decoder:
        raise ValueError("is_encoder_decoder = True is not supported; allowed: False")
    config = model.config.get_text_config()
    if not getattr(config, "num_attention_heads", None):
        raise ValueError(f"{type(config).__name__} has no num_attention_heads; allowed: models with attention")
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
    """A quantized pool fits a model of any dtype."""
    keys = ("layers", "kv_heads", "head_dim", "dtype")
    for key in keys if pool.quantization is None else keys[:3]:
        if getattr(pool, key) != getattr(model, key):
            raise ValueError(f"the pool has {key} = {getattr(pool, key)!r}, the model needs {getattr(model, key)!r}")
