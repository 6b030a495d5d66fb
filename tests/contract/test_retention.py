"""Priorities and pins through a daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import radixkv
from radixkv import Retain

A, B = range(8), range(100, 108)
"""Two pages each; the pool has eight and pins two."""


@pytest.fixture(scope="module")
def endpoint(daemon_factory: Callable[..., Any]) -> str:
    found: str = daemon_factory(
        pools=[{"name": "default", "pages": 8, "pin_limit_pages": 2}, {"name": "fifo", "pages": 8, "policy": "fifo"}]
    ).endpoint
    return found


@pytest.fixture(name="client")
def _client(endpoint: str) -> Iterator[radixkv.Client]:
    with radixkv.connect(endpoint) as client:
        yield client


def cache(pool: radixkv.Pool, prompt: Any, **options: Any) -> None:
    with pool.reserve(prompt, **options) as seq:
        seq.commit(len(prompt))


def test_what_is_retained_outlives_what_came_later(client: radixkv.Client) -> None:
    pool = client.pool("default")
    cache(pool, A, retain=Retain(90))
    cache(pool, B, retain=[Retain(10)])
    for number in range(5):
        cache(pool, range(1000 * number + 500, 1000 * number + 516))
    assert [found.device_tokens for found in pool.lookup([A, B])] == [8, 0]


def test_a_pin_is_counted_limited_and_over(client: radixkv.Client) -> None:
    pool = client.pool("default")
    cache(pool, B, retain=Retain(100, seconds=0.3))
    assert client.stats()["pools"]["default"]["pinned_pages"] == 2
    with pytest.raises(radixkv.LimitExceeded) as caught:
        pool.reserve(range(300, 304), retain=Retain(100, seconds=9))
    assert caught.value.details["limit"] == 2
    with pool.reserve(range(8000, 8032)):  # all of the pool: pins starve nobody
        stats = client.stats()
        assert stats["pools"]["default"]["pinned_pages"] == 0
    assert client.stats()["counters"]["pins_given_up"] >= 2


def test_what_cannot_be_is_refused(client: radixkv.Client) -> None:
    pool = client.pool("default")
    for wrong in (Retain(101), Retain(-1), Retain(5, seconds=-1.0), Retain(5, start=-1), Retain("high"), [5]):  # type: ignore[arg-type]
        with pytest.raises(radixkv.BadRequest):
            pool.reserve(A, retain=wrong)  # type: ignore[arg-type]
    with pytest.raises(radixkv.BadRequest, match="limit in time"):
        pool.reserve(A, retain=Retain(100))
    with pytest.raises(radixkv.BadRequest, match="lru"):
        client.pool("fifo").reserve(A, retain=Retain(60))
