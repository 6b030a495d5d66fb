"""Both halves of the vLLM connector against real daemons, with plain tensors for vLLM's blocks and no vLLM.

``tests/engines`` has the same with the real engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import radixkv
from radixkv.adapters.vllm.blocks import Save
from radixkv.adapters.vllm.door import Door, DoorSettings, door_settings
from radixkv.adapters.vllm.namespace import Namespaces
from radixkv.adapters.vllm.ranks import Alone, Leader
from radixkv.adapters.vllm.scheduler import SchedulerHalf
from radixkv.adapters.vllm.worker import WorkerHalf
from radixkv.client.verbs import Found
from radixkv.config import KVSpec

BLOCK = 4
SPEC = KVSpec(layers=2, kv_heads=1, head_dim=8, dtype="float32", page_size=BLOCK)
VLLM_BLOCKS = 24
DEADLINE_S = 0.3


class Engine:
    """What vLLM does around the connector, in one step a request."""

    def __init__(self, endpoint: str, seed: int = 0, spec: KVSpec = SPEC) -> None:
        settings = DoorSettings(endpoint, "default", spec, DEADLINE_S, pause_first_s=0.1, pause_max_s=0.2)
        self.doors = [Door(settings), Door(settings)]
        self.scheduler = SchedulerHalf(self.doors[0], Namespaces("toy", {}), BLOCK)
        self.worker = WorkerHalf(Leader(self.doors[1], Alone()), spec)
        shape = (VLLM_BLOCKS, 1, BLOCK, 16)
        generator = torch.Generator().manual_seed(seed)
        # Layer 10 comes after layer 2, whatever vLLM's order.
        self.caches = {f"model.layers.{n}.attn": torch.rand(shape, generator=generator) for n in (10, 2)}
        self.worker.register(self.caches)

    def load(self, request: Any, blocks: list[int], local: int = 0) -> int:
        """Tokens that were loaded into the blocks; asserts that vLLM is told of the others."""
        found = self.scheduler.matched(request, local)
        self.scheduler.allocated(request, blocks, found, local)
        failed = self.carry_out(request.request_id if found else None)
        promised = blocks[local // BLOCK : (local + found) // BLOCK]
        assert failed <= set(promised)
        return (len(promised) - len(failed)) * BLOCK

    def carry_out(self, loading: str | None) -> set[int]:
        """The worker's part of the step that loads this request; the blocks that failed."""
        loads, _ = self.scheduler.plan({}, lambda _: [])
        self.worker.load(loads)
        assert self.worker.loaded() == ({loading} if loading else set())
        return self.worker.failed()

    def compute(self, request: Any, blocks: list[int], computed: int = 0) -> list[Save]:
        request.num_computed_tokens = computed
        self.scheduler.matched(request, computed)
        self.scheduler.allocated(request, blocks, 0, computed)
        _, saves = self.scheduler.plan({request.request_id: request.num_prompt_tokens - computed}, lambda _: blocks)
        self.worker.save(saves)
        self.scheduler.finished(request.request_id)
        return saves

    def content(self, blocks: list[int]) -> torch.Tensor:
        return torch.stack([self.caches[name][blocks] for name in sorted(self.caches)])

    def close(self) -> None:
        for door in self.doors:
            door.close()


def request(tokens: Any, name: str = "r", **fields: Any) -> SimpleNamespace:
    tokens = list(tokens)
    return SimpleNamespace(
        **{
            "request_id": name, "prompt_token_ids": tokens, "num_prompt_tokens": len(tokens), "prompt_embeds": None,
            "num_computed_tokens": 0, "num_preemptions": 0, "skip_reading_prefix_cache": False, "lora_request": None,
            "cache_salt": None, "mm_features": [], **fields,
        }
    )  # fmt: skip


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(endpoint: str, **how: Any) -> Engine:
        made.append(Engine(endpoint, **how))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def shared(daemon_factory):
    return daemon_factory(pools=[{}])


@pytest.fixture
def daemon(shared):
    yield shared
    with radixkv.connect(shared.endpoint) as client:
        found = client.stats().pools["default"]
    assert found["sequences"] == 0
    assert found["pages"]["private"] == 0


def tokens_of(test: int, count: int) -> list[int]:
    return [1000 * test + n for n in range(count)]


def test_what_one_engine_computed_another_one_loads(daemon, engines) -> None:
    first, second = engines(daemon.endpoint, seed=1), engines(daemon.endpoint, seed=2)
    tokens = tokens_of(1, 14)
    assert first.load(request(tokens), [5, 3, 9, 1]) == 0
    assert len(first.compute(request(tokens), [5, 3, 9, 1])) == 1
    assert second.load(request(tokens), [2, 7, 4, 0]) == 12
    assert torch.equal(second.content([2, 7, 4]), first.content([5, 3, 9]))
    assert not torch.equal(second.content([0]), first.content([1]))  # not a full block


def test_only_what_follows_vllms_own_blocks_is_loaded(daemon, engines) -> None:
    first, second = engines(daemon.endpoint, seed=1), engines(daemon.endpoint, seed=2)
    tokens = tokens_of(2, 13)
    first.compute(request(tokens), [0, 1, 2, 3])
    before = second.content([8]).clone()
    assert second.load(request(tokens), [8, 9, 10, 11], local=4) == 8
    assert torch.equal(second.content([9, 10]), first.content([1, 2]))
    assert torch.equal(second.content([8]), before)
    assert second.scheduler.matched(request(tokens, "again"), 12) == 0


def test_the_last_token_is_left_to_compute(daemon, engines) -> None:
    engine = engines(daemon.endpoint)
    engine.compute(request(tokens_of(3, 8)), [0, 1])
    assert engine.load(request(tokens_of(3, 8), "full"), [2, 3]) == 4
    assert engine.load(request(tokens_of(3, 9), "longer"), [4, 5, 6]) == 8


def test_what_is_saved_already_is_not_saved_again(daemon, engines) -> None:
    engine = engines(daemon.endpoint)
    assert len(engine.compute(request(tokens_of(4, 9)), [0, 1, 2])) == 1
    assert engine.compute(request(tokens_of(4, 9)), [0, 1, 2]) == []
    longer = tokens_of(4, 8) + tokens_of(5, 5)
    assert len(engine.compute(request(longer), [0, 1, 4, 5])) == 1
    assert engine.load(request(longer, "l"), [10, 11, 12, 13]) == 12
    assert torch.equal(engine.content([10, 11, 12]), engine.content([0, 1, 4]))


def test_a_prompt_in_pieces_is_saved_with_its_last_piece(daemon, engines) -> None:
    engine, prompt = engines(daemon.endpoint), request(tokens_of(6, 10))
    engine.scheduler.matched(prompt, 0)
    pieces = []
    for computed, scheduled in ((0, 4), (4, 3), (7, 1), (8, 2), (10, 1)):
        prompt.num_computed_tokens = computed
        pieces.append(len(engine.scheduler.plan({"r": scheduled}, lambda _: [0, 1, 2])[1]))
    assert pieces == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "x"}, {"lora_request": SimpleNamespace(lora_name="a", lora_path="/a")}],
    ids=["salt", "adapter"],
)
def test_another_salt_or_adapter_never_hits(daemon, engines, other) -> None:
    engine, tokens = engines(daemon.endpoint), tokens_of(7, 9)
    engine.compute(request(tokens), [0, 1, 2])
    assert engine.scheduler.matched(request(tokens, "x", **other), 0) == 0
    assert engine.scheduler.matched(request(tokens, "y"), 0) == 8


@pytest.mark.parametrize("fields", [{"prompt_embeds": object()}, {"prompt_token_ids": None}])
def test_embeddings_are_not_cached(daemon, engines, fields) -> None:
    engine = engines(daemon.endpoint)
    assert engine.compute(request(tokens_of(8, 9), **fields), [0, 1, 2]) == []


def test_pages_that_left_between_lookup_and_load_are_failed_blocks(daemon, engines) -> None:
    engine, tokens = engines(daemon.endpoint), tokens_of(9, 13)
    engine.compute(request(tokens), [0, 1, 2, 3])
    late = request(tokens, "late")
    assert engine.scheduler.matched(late, 0) == 12
    with radixkv.connect(daemon.endpoint) as client:
        pool = client.pool()
        pool.invalidate(Namespaces("toy", {}).of(late))
    engine.scheduler.allocated(late, [4, 5, 6, 7], 12, 0)
    assert engine.carry_out("late") == {4, 5, 6}
    # vLLM asks again for the request: it is computed now, whatever the cache has, until it is preempted.
    engine.compute(request(tokens), [0, 1, 2, 3])
    assert engine.scheduler.matched(late, 0) == 0
    late.num_preemptions = 1
    assert engine.scheduler.matched(late, 0) == 12


def test_a_full_pool_saves_nothing_and_fails_nothing(daemon, engines) -> None:
    with radixkv.connect(daemon.endpoint) as client:
        pool = client.pool()
        with pool.reserve(range(16 * BLOCK)):
            engine = engines(daemon.endpoint)
            assert len(engine.compute(request(tokens_of(10, 9)), [0, 1, 2])) == 1
            assert engine.load(request(tokens_of(10, 9), "x"), [3, 4, 5]) == 0
    assert len(engine.compute(request(tokens_of(10, 9)), [0, 1, 2])) == 1
    assert engine.load(request(tokens_of(10, 9), "x"), [3, 4, 5]) == 8


def test_a_request_that_is_aborted_before_its_load_holds_nothing(daemon, engines) -> None:
    engine, tokens = engines(daemon.endpoint), tokens_of(11, 13)
    engine.compute(request(tokens), [0, 1, 2, 3])
    for number in range(20):
        aborted = request(tokens, f"a{number}")
        assert engine.scheduler.matched(aborted, 0) == 12
        engine.scheduler.finished(aborted.request_id)


def test_what_is_only_in_the_host_tier_is_computed_without_waiting(daemon_factory, engines, wait_until) -> None:
    daemon = daemon_factory(pools=[{"pages": 8, "host_pages": 32}])
    engine, tokens = engines(daemon.endpoint), tokens_of(1, 13)
    engine.compute(request(tokens), [0, 1, 2, 3])
    with radixkv.connect(daemon.endpoint) as client:
        pool = client.pool()
        namespace = Namespaces("toy", {}).of(request([1]))
        with pool.reserve(range(8 * BLOCK), timeout=5.0):  # all of the device tier
            wait_until(lambda: pool.lookup(tokens, namespace=namespace) == Found(0, 12))
        assert engine.load(request(tokens, "x"), [4, 5, 6, 7]) == 0
        engine.compute(request(tokens, "y"), [8, 9, 10, 11])
        assert engine.load(request(tokens, "z"), [4, 5, 6, 7]) == 12
        # What the host tier kept, or what was computed again: in an engine they are the same.
        assert any(torch.equal(engine.content([4, 5, 6]), engine.content(kept)) for kept in ([0, 1, 2], [8, 9, 10]))
        wait_until(lambda: client.stats().pools["default"]["sequences"] == 0)


def test_without_a_daemon_everything_is_computed(tmp_path, engines) -> None:
    engine = engines(f"ipc://{tmp_path}/nobody.sock")
    began = time.monotonic()
    assert engine.load(request(tokens_of(1, 9)), [0, 1, 2]) == 0
    engine.compute(request(tokens_of(1, 9)), [0, 1, 2])
    assert time.monotonic() - began < 4 * DEADLINE_S


def test_a_pool_of_another_model_is_no_pool(daemon, engines) -> None:
    engine = engines(daemon.endpoint, spec=KVSpec(layers=2, kv_heads=2, head_dim=4, dtype="float32", page_size=BLOCK))
    engine.compute(request(tokens_of(12, 9)), [0, 1, 2])
    assert engine.load(request(tokens_of(12, 9), "x"), [3, 4, 5]) == 0
    with radixkv.connect(daemon.endpoint) as client:
        assert (
            client.pool().lookup(tokens_of(12, 9), namespace=Namespaces("toy", {}).of(request([1]))).device_tokens == 0
        )


def test_a_pool_that_the_daemon_does_not_have_is_told(daemon, caplog) -> None:
    door = Door(door_settings(SPEC, 1, {"endpoint": daemon.endpoint, "pool": "defautl"}))
    assert [door.ask("lookup", lambda pool: pool) for _ in range(3)] == [None] * 3
    assert len(caplog.messages) == 1
    assert "'defautl'" in caplog.messages[0]
    assert "going on without the cache" in caplog.messages[0]
    door.close()


def test_a_stopped_daemon_costs_a_deadline_and_comes_back(daemon_factory, engines, wait_until) -> None:
    daemon = daemon_factory(pools=[{}])
    engine, tokens = engines(daemon.endpoint), tokens_of(1, 13)
    engine.compute(request(tokens), [0, 1, 2, 3])
    promised = request(tokens, "promised")
    assert engine.scheduler.matched(promised, 0) == 12
    daemon.pause()
    try:
        engine.scheduler.allocated(promised, [4, 5, 6, 7], 12, 0)
        began = time.monotonic()
        assert engine.carry_out("promised") == {4, 5, 6}
        for number in range(10):
            assert engine.scheduler.matched(request(tokens, f"n{number}"), 0) == 0
        # The load, the lookup, and what is let through on trial meanwhile; ten lookups alone would be 3 s.
        assert time.monotonic() - began < 5 * DEADLINE_S
    finally:
        daemon.resume()
    numbers = iter(range(10**6))
    wait_until(lambda: engine.load(request(tokens, f"back{next(numbers)}"), [4, 5, 6, 7]) == 12)
    with radixkv.connect(daemon.endpoint) as client:
        wait_until(lambda: client.stats().pools["default"]["sequences"] == 0)


def test_a_daemon_that_was_killed_is_replaced(daemon_factory, engines, wait_until) -> None:
    daemon = daemon_factory(pools=[{}])
    engine, tokens = engines(daemon.endpoint), tokens_of(1, 13)
    engine.compute(request(tokens), [0, 1, 2, 3])
    promised = request(tokens, "promised")
    assert engine.scheduler.matched(promised, 0) == 12
    daemon.kill()
    engine.scheduler.allocated(promised, [4, 5, 6, 7], 12, 0)
    assert engine.carry_out("promised") == {4, 5, 6}
    again = daemon_factory(pools=[{}], endpoint=daemon.endpoint)
    numbers = iter(range(10**6))

    def saved() -> bool:
        engine.compute(request(tokens, f"s{next(numbers)}"), [0, 1, 2, 3])
        return engine.load(request(tokens, f"l{next(numbers)}"), [8, 9, 10, 11]) == 12

    wait_until(saved)
    assert torch.equal(engine.content([8, 9, 10]), engine.content([0, 1, 2]))
    with radixkv.connect(again.endpoint) as client:
        wait_until(lambda: client.stats().pools["default"]["sequences"] == 0)


def test_what_was_copied_from_pages_that_may_be_somebody_elses_is_not_used(daemon_factory, engines) -> None:
    daemon = daemon_factory(pools=[{}])
    engine, tokens = engines(daemon.endpoint), tokens_of(1, 13)
    engine.compute(request(tokens), [0, 1, 2, 3])
    find_pages = engine.worker._pages

    def replace_the_daemon_first(memory: Any) -> list[torch.Tensor]:
        daemon.kill()
        daemon_factory(pools=[{}], endpoint=daemon.endpoint)
        return find_pages(memory)

    engine.worker._pages = replace_the_daemon_first
    assert engine.load(request(tokens, "between"), [4, 5, 6, 7]) == 0
    assert torch.equal(engine.content([4, 5, 6]), engine.content([0, 1, 2]))  # copied, and still not to be trusted
