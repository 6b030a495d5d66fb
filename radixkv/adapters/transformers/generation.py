"""``generate``: ``model.generate`` with the keys and values in radixkv pages.

::

    model.generate(**inputs, max_new_tokens=64)
    generate(model, **inputs, max_new_tokens=64, pool=pool)     # the same tokens; what is cached is not computed
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from transformers import StoppingCriteriaList, StopStringCriteria

from radixkv.adapters.transformers.decoding import OnToken
from radixkv.adapters.transformers.model import PagedModel
from radixkv.adapters.transformers.refusals import refuse_keywords, refuse_settings
from radixkv.adapters.transformers.weights import namespace_of


def generate(  # noqa: PLR0913 - keywords with defaults
    model: Any,
    inputs: Any = None,
    *,
    pool: Any,
    namespace: Any = None,
    on_lost: str = "recompute",
    timeout_s: float | None = None,
    streamer: Any = None,
    on_token: OnToken | None = None,
    **kwargs: Any,
) -> Any:
    """What ``model.generate(inputs, **kwargs)`` returns.

    The rows of a batch share their common prefix with each other and with everybody else in the namespace; each step
    is one forward for all rows that are not over yet. Loss of the daemon, of the session or of pages, and with
    on_lost="recompute" a full pool too, cost time and change nothing in the output.

    Args:
        model: as for ``PagedModel``. Afterwards its attention implementation is "radixkv".
        pool: ``client.pool(...)``, or None to compute in local pages.
        namespace: ``radixkv.Namespace`` of these weights; by default their digest (``namespace_of``).
        on_lost: "recompute" or "raise".
        timeout_s: how long a reserve may wait in a full pool.
        streamer: Transformers' protocol: ``put`` the prompt, then each token, ``end``.
        on_token: called with (row, token) as soon as a token is known.
        kwargs: those of ``model.generate``: input_ids, attention_mask, generation_config, logits_processor,
            stopping_criteria, max_new_tokens, do_sample, temperature, eos_token_id, stop_strings with tokenizer,
            num_return_sequences, return_dict_in_generate with output_scores or output_logits, ...

    Raises ValueError for what it does not do, by name (beams, assistants, a cache or embeddings of your own), and as
    ``model.generate`` and ``PagedModel`` do; with on_lost="raise" what the client raises, OutOfPages among it.
    """
    refuse_keywords(kwargs)
    refuse_settings(kwargs)
    if kwargs.get("generation_config") is not None:
        refuse_settings(vars(kwargs["generation_config"]))
    if pool is not None and namespace is None:
        namespace = namespace_of(model)
    paged = PagedModel(model, pool, namespace, on_lost=on_lost, on_full=on_lost, timeout_s=timeout_s)
    loop = partial(paged.decode, streamer=streamer, on_token=on_token)
    return model.generate(inputs, custom_generate=loop, **_with_stop_strings(kwargs))


def _with_stop_strings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Stop strings as a criterion: with a loop of one's own ``model.generate`` (5.19) loses the tokenizer for them."""
    tokenizer = kwargs.pop("tokenizer", None)
    config = kwargs.get("generation_config")
    strings = kwargs.pop("stop_strings", None)
    if config is not None and config.stop_strings is not None:
        strings = config.stop_strings if strings is None else strings
        kwargs["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    if strings is None:
        return kwargs
    if tokenizer is None:
        raise ValueError("stop_strings need the tokenizer: tokenizer=...")
    criteria = kwargs.get("stopping_criteria") or []
    kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])
    return kwargs
