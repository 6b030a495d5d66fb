"""SmolLM2 through the kernels as the example engine calls them, against Transformers' own decoding.

As a program (``ENDPOINT ROWS GUESSES``), under TRITON_INTERPRET=1: one decode step through the Triton kernels;
prints the worst difference of a logit. test_through_kernels.py runs it.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

import radixkv
from radixkv.adapters import smollm2
from radixkv.kernels import append, decode_attention
from tests.examples import as_module

PROMPTS = (
    "The harbour of Skerrow has a long quay, a light, and a",
    "The harbour of Skerrow has a long quay, a light, and no",
)


def load_engine(impl: str, guesses: int) -> Any:
    """The example as a module of its own, that decodes by ``impl``."""
    module: Any = as_module("custom_engine.py", f"custom_engine_{impl}")
    module.decode_attention = partial(decode_attention, impl=impl)
    module.GUESSES, module.STEP = guesses, 1 + guesses
    return module


@torch.inference_mode()
def worst_difference(loaded: tuple[Any, Any], pool: Any, impl: str, size: tuple[int, int, int]) -> tuple[float, int]:
    """(the largest difference of a logit, decode steps in which rows shared pages), the prompts in one batch.

    ``size``: rows, guesses, steps. Each step is fed the next tokens of Transformers' answer, as if all guesses had been
    right.
    """
    (hf, tokenizer), (prompts, guesses, steps) = loaded, size
    module = load_engine(impl, guesses)
    model = module.Llama(hf.state_dict(), hf.config.head_dim, hf.model.rotary_emb.inv_freq)
    engine = module.Engine(model, pool, radixkv.Namespace(**smollm2.namespace_fields(), salt=impl))
    ids = torch.tensor([tokenizer(prompt)["input_ids"] for prompt in PROMPTS[:prompts]])
    length, count = ids.shape[1], steps * module.STEP + 1
    limits = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 2}
    kept = {"return_dict_in_generate": True, "output_logits": True}
    answers = hf.generate(ids, attention_mask=torch.ones_like(ids), **limits, **kept)
    differences: list[torch.Tensor] = []

    def compare(hidden: torch.Tensor, row: int, first: int) -> None:
        """``hidden`` of some tokens of a row, the ``first``-th new one follows the first of them."""
        logits = linear(model.norm(hidden, "norm"), model.weights["model.embed_tokens.weight"])
        wanted = torch.stack(answers.logits[first : first + len(hidden)], 1)[row]
        differences.append((logits - wanted).abs().max())

    rows = [module.Request(prompt, length + count) for prompt in ids.tolist()]
    for number, row in enumerate(rows):
        row.seq = pool.reserve(row.tokens, namespace=engine.namespace, headroom_tokens=count)
        cached = row.seq.cached_tokens
        compare(engine.forward([row], [cached], [row.tokens[cached:]], decode=False)[-1:], number, 0)
        row.seq.commit(length)
    module.append = partial(append, impl=impl)
    for done in range(0, steps * module.STEP, module.STEP):
        news = [answer[length + done :][: module.STEP].tolist() for answer in answers.sequences]
        hidden = engine.forward(rows, [length + done] * len(rows), news, decode=True)
        for number, part in enumerate(hidden.split(module.STEP)):
            compare(part, number, done + 1)
    for row in rows:
        row.seq.free()
    return float(max(differences)), engine.counts["steps that share pages"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with radixkv.connect(sys.argv[1]) as client:
        print(*worst_difference(smollm2.load(), client.pool(), "triton", (int(sys.argv[2]), int(sys.argv[3]), 1)))
