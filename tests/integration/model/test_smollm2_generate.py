"""``generate`` with the real model, in fp32, against ``model.generate``; and the shipped example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import radixkv
from radixkv.adapters.transformers import generate
from radixkv.demo.options import DOCUMENT
from tests.examples import EXAMPLES, printed

pytestmark = pytest.mark.model

CLEAR = 2 * 2e-3
"""A margin between the two largest logits that no difference of rounding turns (as in test_smollm2.py)."""
POOL = {"layers": 30, "kv_heads": 3, "head_dim": 64, "page_size": 16, "pages": 128}
PAGE = (Path(__file__).parents[3] / "docs" / "own-loop.md").read_text()


@pytest.fixture(scope="module")
def daemon(daemon_factory: Any) -> Any:
    return daemon_factory(pools=[POOL], paranoid=False)


def test_a_padded_batch_equals_model_generate(smollm2_model: Any, daemon: Any) -> None:
    """Each row up to its first token that cannot be told; and the prefix of 48 tokens is computed once."""
    model, tokenizer = smollm2_model
    text = tokenizer(DOCUMENT.read_text())["input_ids"]
    prompts = [text[:48] + text[start : start + count] for start, count in ((300, 5), (400, 17), (500, 1))]
    width = max(map(len, prompts))
    inputs = {
        "input_ids": torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        "max_new_tokens": 16,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    theirs = model.generate(**inputs)
    computed: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _module, _args, given: computed.append(given["input_ids"].numel()), with_kwargs=True
    )
    try:
        with radixkv.connect(daemon.endpoint) as client:
            ours = generate(model, **inputs, pool=client.pool(), namespace=radixkv.Namespace("not the example's"))
    finally:
        hook.remove()
    assert computed[:3] == [53, 17, 1]
    compared = 0
    for row in range(3):
        for step, logits in enumerate(theirs.logits):
            best, second = logits[row].topk(2).values.tolist()
            if best - second <= CLEAR:
                break
            compared += 1
            assert ours.sequences[row, width + step] == theirs.sequences[row, width + step]
            if theirs.sequences[row, width + step] == 2:
                break  # the row is over; the logits of its padding mean nothing
    print(f"{compared} of {3 * len(theirs.logits)} tokens compared")
    assert compared >= 36


@pytest.mark.long
def test_the_example_answers_as_the_page_says(smollm2_files: Any, daemon: Any) -> None:
    lines = printed(daemon.endpoint, EXAMPLES / "generate.py", timeout_s=240.0).splitlines()
    assert lines[0] in PAGE
    assert lines[-1] in PAGE
