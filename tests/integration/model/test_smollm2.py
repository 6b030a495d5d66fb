"""The real model over radixkv pages against Transformers' own greedy ``generate()``, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import radixkv
from radixkv.adapters import smollm2
from radixkv.adapters.transformers import PagedModel
from radixkv.demo.options import DOCUMENT

pytestmark = pytest.mark.model

NEW_TOKENS = 64
LENGTHS = (24, 33, 48, 79)
"""Prompt tokens: within a page, one into a page, a whole number of pages, one short of it. Five prompts each."""
LOGITS_DIFFER_AT_MOST = 2e-3
POOL = {"layers": 30, "kv_heads": 3, "head_dim": 64, "page_size": 16, "pages": 256}
HEADER = "<|im_start|>system\nYou are a keeper of the light.<|im_end|>\n<|im_start|>user\n"


@pytest.fixture(scope="module")
def client(daemon_factory: Any) -> Any:
    daemon = daemon_factory(pools=[POOL])
    with radixkv.connect(daemon.endpoint) as client:
        yield client


@pytest.fixture(scope="module")
def paged(smollm2_model: Any, client: Any) -> PagedModel:
    model, _ = smollm2_model
    return PagedModel(model, client.pool(), radixkv.Namespace(**smollm2.namespace_fields()))


def prompts(tokenizer: Any, length: int) -> list[list[int]]:
    """Five prompts of one length: a common header, whose first page they share, then each a text of its own."""
    header = tokenizer(HEADER)["input_ids"]
    assert 16 <= len(header) < length
    text = tokenizer(DOCUMENT.read_text())["input_ids"]
    first = LENGTHS.index(length) * 500
    return [(header + text[start : start + 100])[:length] for start in range(first, first + 500, 100)]


def generate(model: Any, group: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' own greedy generate() with its own cache: (new tokens [5, 64], their logits [5, 64, vocabulary]).

    All prompts of a group have one length, so that the batch needs no padding.
    """
    ids = torch.tensor(group)
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=2, return_dict_in_generate=True, output_logits=True
    )
    model.generation_config.eos_token_id, kept = None, model.generation_config.eos_token_id
    try:
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    finally:
        model.generation_config.eos_token_id = kept
    return output.sequences[:, len(group[0]) :], torch.stack(output.logits, dim=1)


@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_of_64_new_tokens_against_generate(smollm2_model: Any, client: Any, length: int) -> None:
    """Fed the reference's tokens one by one: logits within 2e-3, and the same token wherever that can be told."""
    model, tokenizer = smollm2_model
    group = prompts(tokenizer, length)
    tokens, logits = generate(model, group)
    fields = smollm2.namespace_fields()
    paged = PagedModel(model, client.pool(), radixkv.Namespace(**fields, salt=f"prompts of {length}"))
    worst, clear, hits = 0.0, 0, 0
    for prompt, reference_tokens, reference in zip(group, tokens.tolist(), logits, strict=True):
        assert len(reference_tokens) == NEW_TOKENS
        with paged.open(prompt, NEW_TOKENS) as sequence:
            hits += sequence.cached_tokens
            for step, token in enumerate(reference_tokens):
                ours = sequence.logits()
                worst = max(worst, float((ours - reference[step]).abs().max()))
                best, second = reference[step].topk(2).values.tolist()
                if best - second > 2 * LOGITS_DIFFER_AT_MOST:
                    clear += 1
                    assert int(ours.argmax()) == token
                sequence.append(token)
            assert sequence.shared
            assert sequence.recoveries == 0
    print(
        f"length {length}: worst logit difference {worst:.2e}, {clear} of {5 * NEW_TOKENS} margins clear, {hits} hits"
    )
    assert worst <= LOGITS_DIFFER_AT_MOST
    assert clear >= 0.95 * 5 * NEW_TOKENS
    assert hits == 4 * 16  # the header's full page, computed for the first prompt alone
    pages = client.stats()["pools"]["default"]["pages"]
    assert pages["private"] == pages["shadow"] == pages["quarantined"] == 0


def test_forward_sees_only_what_is_not_cached(smollm2_model: Any, paged: PagedModel) -> None:
    model, tokenizer = smollm2_model
    document = tokenizer(DOCUMENT.read_text())["input_ids"][:160]
    questions = [tokenizer(text)["input_ids"] for text in ("Who keeps the light?", "How long is the quay?")]
    paged.greedy([*document, *questions[0]], 1)
    seen: list[list[int]] = []
    hook = model.register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    try:
        answer = paged.greedy([*document, *questions[1]], 3)
    finally:
        hook.remove()
    assert answer.cached_tokens == 160
    assert seen == [questions[1], *[[token] for token in answer.tokens[:-1]]]


def test_poisoning_a_shared_page_changes_the_output(smollm2_model: Any, client: Any, paged: PagedModel) -> None:
    _, tokenizer = smollm2_model
    prompt = tokenizer(DOCUMENT.read_text())["input_ids"][200:280]
    clean = paged.greedy(prompt, 8)
    pool = client.pool()
    with paged.open(prompt) as sequence:
        assert sequence.cached_tokens == 79
        page = sequence.page_table[3]
    memory = [pool.values(layer)[page] for layer in range(30)]
    kept = [values.clone() for values in memory]
    for values in memory:
        values.mul_(-2.0)
    poisoned = paged.greedy(prompt, 8)
    for values, before in zip(memory, kept, strict=True):
        values.copy_(before)
    assert poisoned.cached_tokens == 79
    assert poisoned.tokens != clean.tokens
    assert paged.greedy(prompt, 8).tokens == clean.tokens


def test_the_answer_goes_on_through_the_daemons_death(smollm2_model: Any, daemon_factory: Any) -> None:
    """Killed in the middle of it, under a keeper: nothing is computed twice, the text is the model's own."""
    model, tokenizer = smollm2_model
    tokens = prompts(tokenizer, 33)[0]
    settings = GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=2)
    ids = torch.tensor([tokens])
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[0, 33:].tolist()
    daemon = daemon_factory(pools=[{**POOL, "pages": 16}], supervised=True)
    said: list[int] = []

    def on_token(token: int) -> None:
        said.append(token)
        if len(said) == 5:
            daemon.kill_daemon()

    with radixkv.connect(daemon.endpoint, timeout=20.0) as client:
        paged = PagedModel(model, client.pool(), radixkv.Namespace(**smollm2.namespace_fields()))
        answer = paged.greedy(tokens, 20, stop=set(), on_token=on_token)
        assert answer.tokens[: len(plain)] == plain
        assert (answer.recoveries, answer.shared, answer.computed_tokens) == (0, True, 33)
        assert client.stats().boot_id != daemon.boot_ids[0]
        assert paged.greedy(tokens + answer.tokens[:4], 1).cached_tokens == 32
