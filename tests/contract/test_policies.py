"""A pool's policy, through a daemon: what is still cached when a third of three prompts has room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import radixkv
from radixkv.config import POLICIES

A, B, C = ([number] * 12 for number in (1, 2, 3))
"""Three pages each; the pool has nine."""


LEFT = {"lru": C, "lfu": A, "fifo": B, "s3fifo": B}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_left(daemon_factory: Callable[..., Any], policy: str) -> None:
    """In a pool of its own: policies remember what has been there."""
    left = LEFT[policy]
    with radixkv.connect(daemon_factory(pools=[{"policy": policy, "pages": 9}]).endpoint) as client:
        pool, namespace = client.pool(), radixkv.Namespace("model")
        for prompt in (A, C, B, A, A, C):
            with pool.reserve(prompt, namespace=namespace, last_page="keep") as seq:
                seq.commit(len(prompt))
        with pool.reserve(range(100, 124), namespace=namespace):  # six pages
            cached = pool.lookup([A, B, C], namespace=namespace)
        assert [found.device_tokens for found in cached] == [12 * (prompt is left) for prompt in (A, B, C)]
        assert client.stats()["pools"]["default"]["policy"] == policy
