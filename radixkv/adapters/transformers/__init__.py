"""A Llama-like Transformers model that decodes from radixkv pages.

::

    ids = generate(model, **inputs, pool=pool, max_new_tokens=64)   # as model.generate; pool: client.pool("default")

    paged = PagedModel(model, pool, namespace)          # AutoModelForCausalLM, pool, radixkv.Namespace
    answer = paged.greedy(tokens, max_new_tokens=64)    # one sequence; prefill computes only what is not cached

How it hangs together:

* ``pages.py``: one sequence's pages, shared through the daemon or local to this process.
* ``cache.py``: the ``Cache`` that Transformers fills. It appends keys and values to the pages and keeps none itself.
* ``attention.py``: the attention function that reads the pages by page table.
* ``sequence.py``: tokens in, logits out; computes what is missing, publishes full pages, recovers from a lost daemon.
* ``batch_cache.py``, ``batch.py``: the same for several sequences, one token of each in one forward.
* ``model.py``: ``PagedModel``, which joins them.
* ``decoding.py``: the loop that ``model.generate`` runs in place of its own; ``generation.py``: ``generate``.
* ``weights.py``: a namespace named by the weights themselves. ``refusals.py``: what ``generate`` does not do.

What it cannot do is refused by name: beams, sliding windows, soft caps, attention sinks, encoders, and models that do
not hand what the cache gave them to Transformers' attention interface as it is.
"""

from __future__ import annotations

from radixkv.adapters.transformers.batch import PagedBatch
from radixkv.adapters.transformers.cache import PagedCache
from radixkv.adapters.transformers.generation import generate
from radixkv.adapters.transformers.model import Generation, PagedModel
from radixkv.adapters.transformers.sequence import PagedSequence
from radixkv.adapters.transformers.weights import namespace_of

__all__ = ["Generation", "PagedBatch", "PagedCache", "PagedModel", "PagedSequence", "generate", "namespace_of"]
