"""Load the converted model and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from radixkv.adapters.smollm2 import source
from radixkv.adapters.smollm2.fetch import fetch


def load(directory: Path | None = None) -> tuple[Any, Any]:
    """Give (model, tokenizer), fp32, in eval mode; fetches the model first if it is not there. Raises ModelError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    directory = directory or fetch()
    # Both would otherwise write bars and advice to stderr, over our own progress display.
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return model.eval(), tokenizer


def namespace_fields() -> dict[str, Any]:
    """Keyword arguments for ``radixkv.Namespace``: what must be equal before KV of this model may be shared."""
    return {
        "model": "smollm2-135m-instruct",
        "extra": {"weights": source.GGUF_SHA256, "dtype": "float32"},
    }
