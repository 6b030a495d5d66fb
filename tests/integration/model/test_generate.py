"""``generate`` over a real daemon, with a tiny random Llama: what ``model.generate`` gives, whatever happens."""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import radixkv
from radixkv.adapters.transformers import PagedModel, generate, namespace_of

PAGE = 4
PAD = 96
TINY_POOL = {"layers": 3, "kv_heads": 2, "head_dim": 8, "page_size": PAGE, "pages": 96}
NAMESPACE = radixkv.Namespace("tiny")
NOTHING = {"private": 0, "shadow": 0, "quarantined": 0, "loading": 0, "saving": 0, "sequences": 0}


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """As a tokenizer with padding_side="left" would give them."""
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def with_common(prefix: int, *rests: int) -> dict[str, torch.Tensor]:
    return padded([tokens_of(prefix) + tokens_of(rest, seed) for seed, rest in enumerate(rests, start=1)])


def held(client: radixkv.Client) -> dict[str, int]:
    """Pages and sequences that somebody still holds."""
    pool = client.stats()["pools"]["default"]
    assert sum(pool["pages"].values()) == pool["total_pages"]
    return {**{state: pool["pages"][state] for state in NOTHING if state != "sequences"}, "sequences": pool["sequences"]}


@pytest.fixture(scope="module")
def client(daemon_factory: Any) -> Any:
    with radixkv.connect(daemon_factory(pools=[TINY_POOL]).endpoint) as client:
        yield client


@pytest.fixture()
def plain(random_llama: Any) -> Any:
    """The same model, whose attention nobody has touched."""
    return copy.deepcopy(random_llama)


@pytest.fixture()
def fresh(request: pytest.FixtureRequest) -> radixkv.Namespace:
    """In which nothing is cached yet."""
    return radixkv.Namespace("tiny", salt=request.node.name)


def test_one_argument_more_gives_the_same(llama: Any, plain: Any, client: radixkv.Client) -> None:
    inputs = with_common(11, 3, 7, 1)
    expected = plain.generate(**inputs, max_new_tokens=12, pad_token_id=PAD)
    given = generate(llama, **inputs, max_new_tokens=12, pad_token_id=PAD, pool=client.pool())
    assert torch.equal(given, expected)
    assert held(client) == NOTHING
