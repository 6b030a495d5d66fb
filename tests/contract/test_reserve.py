"""reserve: tokens, page tables, what is cached, what is refused."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import radixkv

PROMPT = [7, 0, 2**32 - 1, 9, 1]


@pytest.mark.parametrize(
    "tokens",
    [
        PROMPT,
        tuple(PROMPT),
        np.array(PROMPT, np.uint32),
        np.array(PROMPT, np.int64),
        np.array(PROMPT, np.uint32).tobytes(),
        torch.tensor(PROMPT),
    ],
    ids=["list", "tuple", "uint32", "int64", "bytes", "tensor"],
)
def test_all_kinds_of_tokens_mean_the_same(pool: Any, ns: Any, tokens: Any) -> None:
    with pool.reserve(tokens, namespace=ns) as seq:
        assert seq.tokens.tolist() == PROMPT
        seq.commit(5)
    assert pool.lookup(PROMPT, namespace=ns).device_tokens == 4


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], "12", b"123", np.array([[1]]), np.array([-1]), None, 5])
def test_other_tokens_are_a_bad_request(pool: Any, ns: Any, tokens: Any) -> None:
    with pytest.raises(radixkv.BadRequest):
        pool.reserve(tokens, namespace=ns)


def test_empty_is_legal(pool: Any, ns: Any) -> None:
    with pool.reserve([], namespace=ns) as seq:
        assert (seq.length, seq.cached_tokens, seq.capacity_tokens, len(seq.page_table)) == (0, 0, 0, 0)
        seq.extend([1, 2, 3])
        assert (seq.length, seq.capacity_tokens) == (3, 4)
        seq.commit(3)


def test_the_page_table(pool: Any, ns: Any) -> None:
    with pool.reserve(range(10), namespace=ns) as seq:
        table = seq.page_table
        assert table.dtype == np.int32
        assert table.shape == (3,)
        assert len(set(table.tolist())) == 3
        assert all(0 <= page < pool.total_pages for page in table)
        assert seq.capacity_tokens == len(table) * pool.page_size == 12
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0


def test_headroom(pool: Any, ns: Any) -> None:
    with pool.reserve(range(6), namespace=ns, headroom_tokens=7) as seq:
        assert (seq.length, seq.capacity_tokens) == (6, 16)


def test_short_prompts_are_never_shared(pool: Any, ns: Any) -> None:
    with pool.reserve([1, 2, 3], namespace=ns) as seq:
        assert (seq.cached_tokens, seq.writable_from_tokens, len(seq.page_table)) == (0, 0, 1)
        seq.commit(3)
        assert seq.committed_tokens == 3
        assert pool.lookup([1, 2, 3], namespace=ns).device_tokens == 0
    with pool.reserve([1, 2, 3], namespace=ns) as seq:
        assert seq.cached_tokens == 0


def test_the_longest_cached_prefix_is_shared(pool: Any, ns: Any) -> None:
    with pool.reserve(range(11), namespace=ns) as first:
        first.commit(11)
        with pool.reserve([*range(8), 99, 98, 97, 96], namespace=ns) as second:
            assert (second.cached_tokens, second.committed_tokens, second.writable_from_tokens) == (8, 8, 8)
            assert second.page_table[:2].tolist() == first.page_table[:2].tolist()
            assert second.page_table[2] != first.page_table[2]
            assert second.copy_rows == []


def test_nothing_is_visible_before_its_commit(pool: Any, ns: Any) -> None:
    with pool.reserve(range(8), namespace=ns) as first:
        with pool.reserve(range(8), namespace=ns) as second:
            assert second.cached_tokens == 0
        first.commit(4)
        with pool.reserve(range(8), namespace=ns) as third:
            assert third.cached_tokens == 4


def test_namespaces_share_nothing(pool: Any, ns: Any, cache: Any) -> None:
    prompt = cache(8)
    for other in (radixkv.Namespace(ns.model, salt=""), radixkv.Namespace(ns.model, lora=b"a"), radixkv.Namespace("")):
        with pool.reserve(prompt, namespace=other) as seq:
            assert seq.cached_tokens == 0
    with pool.reserve(prompt, namespace=radixkv.Namespace(ns.model)) as seq:
        assert seq.cached_tokens == 7


def test_fully_cached_with_a_copied_last_page(pool: Any, ns: Any, cache: Any) -> None:
    prompt = cache(8)
    keys, values = pool.keys(1), pool.values(1)
    with pool.reserve(prompt, namespace=ns, last_page="keep") as seq:
        shared = seq.page_table.tolist()
    keys[shared[1]] = torch.arange(32.0).reshape(4, 1, 8)
    values[shared[1]] = -torch.arange(32.0).reshape(4, 1, 8)
    with pool.reserve(prompt, namespace=ns) as seq:
        own = int(seq.page_table[1])
        assert (seq.cached_tokens, seq.committed_tokens, seq.writable_from_tokens) == (7, 7, 4)
        assert seq.page_table[0] == shared[0]
        assert own != shared[1]
        assert seq.copy_rows == []
        assert torch.equal(keys[own, :3], keys[shared[1], :3])
        assert torch.equal(values[own, :3], values[shared[1], :3])


def test_copy_false_leaves_the_rows_to_the_caller(pool: Any, ns: Any, cache: Any, counts: Any) -> None:
    prompt = cache(8)
    with pool.reserve(prompt, namespace=ns, copy=False) as seq:
        (row,) = seq.copy_rows
        source, target, rows = row
        assert (target, rows) == (seq.page_table[1], 3)
        assert source not in seq.page_table
        held = counts()["evictable"]
        seq.copied()
        assert seq.copy_rows == []
        assert counts()["evictable"] == held + 1


def test_fully_cached_and_kept(pool: Any, ns: Any, cache: Any) -> None:
    prompt = cache(8)
    with pool.reserve(prompt, namespace=ns, last_page="keep") as seq:
        assert (seq.cached_tokens, seq.writable_from_tokens, seq.copy_rows) == (7, 8, [])


def test_fully_cached_and_dropped(pool: Any, ns: Any, cache: Any) -> None:
    prompt = cache(8)
    with pool.reserve(prompt, namespace=ns, last_page="drop") as seq:
        assert (seq.cached_tokens, seq.writable_from_tokens, seq.copy_rows) == (4, 4, [])


def test_one_token_a_page_is_dropped_instead_of_copied(client: Any, ns: Any, cache: Any) -> None:
    pool = client.pool("single")
    prompt = cache(3, pool)
    with pool.reserve(prompt, namespace=ns) as seq:
        assert (seq.cached_tokens, seq.writable_from_tokens) == (2, 2)


def test_a_copy_that_does_not_fit_beside_its_source_is_dropped(client: Any, ns: Any, cache: Any) -> None:
    pool = client.pool("small")
    prompt = cache(16, pool)
    with pool.reserve(prompt, namespace=ns) as seq:
        assert (seq.cached_tokens, len(seq.page_table)) == (12, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"last_page": "COPY"},
        {"last_page": None},
        {"headroom_tokens": -1},
        {"headroom_tokens": 1.5},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": "1"},
        {"namespace": "model"},
    ],
    ids=str,
)
def test_options_that_can_never_be_right(pool: Any, options: Any) -> None:
    with pytest.raises(radixkv.BadRequest):
        pool.reserve([1], **options)


def test_out_of_pages_at_once(client: Any, ns: Any, counts: Any) -> None:
    pool = client.pool("small")
    with pool.reserve(range(12), namespace=ns):
        before = counts("small")
        for timeout in (None, 0):
            with pytest.raises(radixkv.OutOfPages) as caught:
                pool.reserve(range(50, 58), namespace=ns, timeout=timeout)
            error = caught.value
            assert (error.need, error.available, error.waited_s, error.never_fits) == (2, 1, 0, False)
            assert error.code == "out_of_pages"
        assert counts("small") == before


def test_evictable_pages_are_available(client: Any, ns: Any, cache: Any) -> None:
    pool = client.pool("small")
    cache(12, pool)
    with pool.reserve(range(500, 516), namespace=ns) as seq:
        assert len(seq.page_table) == 4


def test_what_can_never_fit_is_refused_at_once_whatever_the_timeout(client: Any, ns: Any) -> None:
    started = time.monotonic()
    for name, tokens in (("small", 17), ("capped", 13)):
        with pytest.raises(radixkv.OutOfPages) as caught:
            client.pool(name).reserve(range(tokens), namespace=ns, timeout=60)
        assert caught.value.never_fits
    assert time.monotonic() - started < 5


def test_a_sessions_cap_holds_its_private_pages_only(client: Any, ns: Any, cache: Any) -> None:
    pool = client.pool("capped")
    prompt = cache(12, pool)
    with pool.reserve([*prompt, *range(8)], namespace=ns) as seq:
        assert len(seq.page_table) == 5
        with pytest.raises(radixkv.OutOfPages) as caught:
            pool.reserve(range(900, 908), namespace=ns)
        assert (caught.value.available, caught.value.never_fits) == (1, False)


def test_waiting_is_over_after_its_time(client: Any, ns: Any) -> None:
    pool = client.pool("small")
    with pool.reserve(range(16), namespace=ns):
        with pytest.raises(radixkv.OutOfPages) as caught:
            pool.reserve(range(50, 54), namespace=ns, timeout=0.2)
        assert 0.15 < caught.value.waited_s < 3
        assert not caught.value.never_fits


def test_who_waits_gets_what_comes_free(client: Any, connect: Any, ns: Any, wait_until: Any) -> None:
    pool = client.pool("small")
    holder = pool.reserve(range(16), namespace=ns)
    got: list[Any] = []

    def wait() -> None:
        with connect().pool("small").reserve(range(50, 54), namespace=ns, timeout=30) as seq:
            got.append(seq.page_table.tolist())

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: client.stats().queued == 1, what="the queued reserve")
    holder.free()
    waiter.join()
    assert len(got[0]) == 1


def test_pool_facts(pool: Any, client: Any) -> None:
    assert (pool.page_size, pool.total_pages) == (4, 16)
    assert (pool.spec.layers, pool.spec.kv_heads, pool.spec.head_dim, pool.spec.dtype) == (2, 1, 8, "float32")
    assert client.pool("default") is pool
    with pytest.raises(radixkv.BadRequest, match="no pool"):
        client.pool("other")
    for name in ("", "x" * 65, "\ud800", 7, None):
        with pytest.raises(radixkv.BadRequest, match="name has"):
            client.pool(name)


@pytest.mark.parametrize("name", ["default", "half"])
def test_keys_and_values_are_views_of_the_shared_arena(client: Any, connect: Any, name: str) -> None:
    pool, other = client.pool(name), connect().pool(name)
    spec = pool.spec
    shape = (pool.total_pages, spec.page_size, spec.kv_heads, spec.head_dim)
    dtype = getattr(torch, spec.dtype)
    for layer in range(spec.layers):
        for number, (mine, theirs) in enumerate(
            [(pool.keys(layer), other.keys(layer)), (pool.values(layer), other.values(layer))]
        ):
            assert (mine.shape, mine.dtype) == (shape, dtype)
            mine.fill_(10 * layer + number)
            assert (theirs == 10 * layer + number).all()
    assert (pool.keys(0) == 0).all()
    assert (pool.values(spec.layers - 1) == 10 * (spec.layers - 1) + 1).all()
    for layer in (-1, spec.layers):
        with pytest.raises(radixkv.BadRequest):
            pool.keys(layer)


def test_rows_are_copied_in_every_layer(client: Any, ns: Any, cache: Any) -> None:
    pool = client.pool("half")
    prompt = cache(8, pool)
    with pool.reserve(prompt, namespace=ns, last_page="keep") as seq:
        source = int(seq.page_table[1])
    for layer in range(3):
        for view in (pool.keys(layer), pool.values(layer)):
            view.fill_(0)
            view[source] = torch.randn(view[source].shape).to(view.dtype)
    with pool.reserve(prompt, namespace=ns) as seq:
        own = int(seq.page_table[1])
        for layer in range(3):
            for view in (pool.keys(layer), pool.values(layer)):
                assert torch.equal(view[own, :3], view[source, :3])
                assert (view[own, 3] == 0).all()
