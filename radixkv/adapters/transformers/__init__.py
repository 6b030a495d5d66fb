"""A Llama-like Transformers model that decodes from radixkv pages.

::

    paged = PagedModel(model, pool, namespace)          # AutoModelForCausalLM, client.pool("default"), Namespace
    answer = paged.greedy(tokens, max_new_tokens=64)    # prefill computes only what is not cached

How it hangs together:

* ``pages.py``: one sequence's pages, shared through the daemon or local to this process.
* ``cache.py``: the ``Cache`` that Transformers fills. It appends keys and values to the pages and keeps none itself.
* ``attention.py``: the attention function that reads the pages by page table.
* ``sequence.py``: tokens in, logits out; computes what is missing, publishes full pages, recovers from a lost daemon.
* ``model.py``: ``PagedModel``, which joins them.

What it cannot do is refused by name: batches, sliding windows, soft caps, attention sinks.
"""

from __future__ import annotations

from radixkv.adapters.transformers.cache import PagedCache
from radixkv.adapters.transformers.model import Generation, PagedModel
from radixkv.adapters.transformers.sequence import PagedSequence

__all__ = ["Generation", "PagedCache", "PagedModel", "PagedSequence"]
