"""examples/custom_engine.py over real daemons: its tokens are those of the same model without pages, whatever happens.

The model by itself is dense: one request at a time, all tokens computed at every step, torch's own attention.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import radixkv
from radixkv.kernels import reference_write
from radixkv.kernels.options import Rotary
from tests.examples import as_module

POOL = {"layers": 2, "kv_heads": 2, "head_dim": 16, "page_size": 4, "pages": 64}
SYSTEM = list(range(10, 34))


@pytest.fixture(scope="module")
def custom_engine() -> Iterator[Any]:
    """The example as a module."""
    module = as_module("custom_engine.py", "custom_engine")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield module
    torch.set_num_threads(threads)
    del sys.modules["custom_engine"]


@pytest.fixture(scope="module")
def model(custom_engine: Any) -> Any:
    return custom_engine.random_llama()


def alone(model: Any, prompt: list[int], until: int) -> list[int]:
    """Greedy tokens without pages, caches, batches or guesses."""
    tokens = list(prompt)

    def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        rotary = Rotary(model.cos, model.sin, torch.arange(len(tokens)))
        q, k = (reference_write.rotated(each, rotary).transpose(0, 1) for each in qkv[:2])
        dense = torch.nn.functional.scaled_dot_product_attention
        out = dense(q[None], k[None], qkv[2].transpose(0, 1)[None], is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    while len(tokens) < until:
        tokens += model.best(model(torch.tensor(tokens), attend)[-1:])
    return tokens


def requests(custom_engine: Any, count: int) -> list[Any]:
    """One common beginning, an own ending, each of another length."""
    prompts = [[*SYSTEM, 40 + number, 50, 51, 52 + number] for number in range(count)]
    return [custom_engine.Request(prompt, len(prompt) + 10 + 3 * number) for number, prompt in enumerate(prompts)]


def expect_tokens_of_the_model_alone(model: Any, rows: list[Any]) -> None:
    assert [row.tokens for row in rows] == [alone(model, row.tokens[: row.prompt], row.until) for row in rows]


def expect_nothing_held(client: radixkv.Client) -> None:
    pages = client.stats().pools["default"].pages
    assert pages.private == pages.shadow == 0


def test_its_tokens_are_those_of_the_model_alone(custom_engine: Any, model: Any, daemon_factory: Any) -> None:
    with radixkv.connect(daemon_factory(pools=[POOL]).endpoint) as client:
        engine = custom_engine.Engine(model, client.pool(), radixkv.Namespace(model="random"))
        rows = requests(custom_engine, 7)
        engine.run(rows)
        expect_tokens_of_the_model_alone(model, rows)
        expect_nothing_held(client)
    counts = engine.counts
    assert counts["cached"] >= 6 * len(SYSTEM), "the common prefix is computed once"
    assert counts["steps that share pages"] > 0
    assert counts["right guesses"] > 0
    generated = sum(len(row.tokens) - row.prompt for row in rows)
    assert counts["steps"] * custom_engine.ROWS < generated, (
        "batching and guesses give more than a token a row and step"
    )


def test_a_full_pool_puts_rows_back_and_loses_no_token(custom_engine: Any, model: Any, daemon_factory: Any) -> None:
    with radixkv.connect(daemon_factory(pools=[{**POOL, "pages": 22}]).endpoint) as client:
        engine = custom_engine.Engine(model, client.pool(), radixkv.Namespace(model="random"))
        rows = requests(custom_engine, 7)
        engine.run(rows)
        assert engine.counts["put back"] > 0
        expect_tokens_of_the_model_alone(model, rows)
        expect_nothing_held(client)


def test_a_request_that_can_never_fit_is_the_callers_error(custom_engine: Any, model: Any, daemon_factory: Any) -> None:
    with radixkv.connect(daemon_factory(pools=[{**POOL, "pages": 4}]).endpoint) as client:
        engine = custom_engine.Engine(model, client.pool(), radixkv.Namespace(model="random"))
        with pytest.raises(radixkv.OutOfPages):
            engine.run(requests(custom_engine, 1))


def test_requests_of_no_or_one_token_and_those_put_back_with_their_last(
    custom_engine: Any, model: Any, daemon_factory: Any
) -> None:
    """Nothing is ever written behind what is computed, or again into what is committed."""
    prompt = requests(custom_engine, 1)[0].tokens
    with radixkv.connect(daemon_factory(pools=[POOL]).endpoint) as client:
        engine = custom_engine.Engine(model, client.pool(), radixkv.Namespace(model="random"))
        rows = [custom_engine.Request(list(prompt), len(prompt) + more) for more in (0, 1, -3, 1)]
        engine.waiting.extend(rows)
        engine.admit()
        assert [row.over for row in rows] == [True] * 4
        for row in list(engine.batch):
            engine.put_back(row)
        engine.run([])
        assert [len(row.tokens) - len(prompt) for row in rows] == [0, 1, 0, 1]
        assert rows[1].tokens == rows[3].tokens == alone(model, prompt, len(prompt) + 1)
        assert engine.counts["steps"] == 0
        expect_nothing_held(client)


def after_three_steps(custom_engine: Any, model: Any, client: Any) -> tuple[Any, list[Any]]:
    """An engine in the middle of five requests."""
    engine = custom_engine.Engine(model, client.pool(), radixkv.Namespace(model="random"))
    rows = requests(custom_engine, 5)
    engine.waiting.extend(rows)
    for _ in range(3):
        engine.step()
    return engine, rows


@pytest.mark.parametrize("supervised", [True, False], ids=["with a keeper", "without"])
def test_a_daemon_that_dies_costs_time_only(
    custom_engine: Any, model: Any, daemon_factory: Any, supervised: bool
) -> None:
    daemon = daemon_factory(pools=[POOL], supervised=supervised)
    with radixkv.connect(daemon.endpoint) as client:
        engine, rows = after_three_steps(custom_engine, model, client)
        if supervised:
            daemon.kill_daemon()
            daemon.wait_ready()
        else:
            daemon.kill()
            daemon = daemon_factory(pools=[POOL], endpoint=daemon.endpoint)
        engine.run([])
        expect_tokens_of_the_model_alone(model, rows)
        assert (engine.counts["put back"] == 0) == supervised, "with a keeper its sequences go on"
        expect_nothing_held(client)


def test_what_it_had_of_one_daemon_is_not_written_into_the_pages_of_the_next(
    custom_engine: Any, model: Any, daemon_factory: Any, wait_until: Any
) -> None:
    """Page ids mean nothing in another memory: there, those pages are somebody else's."""
    pools = [{**POOL, "page_size": 16, "pages": 24}]
    daemon = daemon_factory(pools=pools)
    with radixkv.connect(daemon.endpoint) as client:
        engine, rows = after_three_steps(custom_engine, model, client)
        before = client.pool().memory
        daemon.kill()
        daemon = daemon_factory(pools=pools, endpoint=daemon.endpoint)
        wait_until(lambda: client.pool().memory is not before, what="the client's way to the next daemon")
        with radixkv.connect(daemon.endpoint) as other:
            pool, prompt = other.pool(), list(range(24 * 16))
            sides = [side(layer) for layer in range(2) for side in (pool.keys, pool.values)]
            with pool.reserve(prompt, namespace=radixkv.Namespace(model="another")) as seq:
                for side in sides:
                    side[:] = 7.0
                seq.commit(len(prompt))
                engine.make_room()
                assert engine.batch, "they have room for a step, so nobody has told them yet"
                engine.verify()
                assert all((side == 7.0).all() for side in sides)
        engine.run([])
        expect_tokens_of_the_model_alone(model, rows)
        expect_nothing_held(client)


def test_it_stops_behind_its_stop_token_and_guesses_do_not_matter(
    custom_engine: Any, model: Any, daemon_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = requests(custom_engine, 1)[0].tokens
    wanted = alone(model, prompt, len(prompt) + 12)
    stop = wanted[len(prompt) + 7]
    cut = wanted[: wanted.index(stop, len(prompt)) + 1]
    guesses = {
        "always right": lambda tokens: (wanted[len(tokens) :] + [0] * 3)[:3],
        "always wrong": lambda tokens: [100 if wanted[len(tokens) : len(tokens) + 1] != [100] else 99] * 3,
    }
    with radixkv.connect(daemon_factory(pools=[POOL]).endpoint) as client:
        for name, guess in guesses.items():
            monkeypatch.setattr(custom_engine, "guess", guess)
            engine = custom_engine.Engine(model, client.pool(), radixkv.Namespace(model=name))
            rows = [custom_engine.Request(list(prompt), len(wanted)), custom_engine.Request(list(prompt), 99, stop)]
            engine.run(rows)
            assert [row.tokens for row in rows] == [wanted, cut], name
            assert (engine.counts["right guesses"] > 0) == (name == "always right")
