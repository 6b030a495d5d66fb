"""The workers of a tensor-parallel vLLM engine as ranks of one pool: real processes, a real daemon, no vLLM.

``tests/engines`` has the same with the real engine.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv.adapters.vllm.blocks import Load, Save
from radixkv.adapters.vllm.door import DoorSettings
from radixkv.client.tokens import pack
from radixkv.config import KVSpec
from tests.integration import vllm_ranks

SPEC = KVSpec(layers=2, kv_heads=1, head_dim=8, dtype="float32", page_size=4)
ANSWER_S = 60.0
NS = radixkv.Namespace("toy")
POOL = {"ranks": 2}


class Engine:
    """Two workers that are given the same orders, as vLLM's scheduler does."""

    def __init__(self, context: Any, endpoint: str, store: Path) -> None:
        settings = DoorSettings(endpoint, "default", SPEC, 2.0, pause_first_s=0.1, pause_max_s=0.2, ranks=2)
        self.processes, self.pipes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=vllm_ranks.run, args=(settings, rank, 2, str(store), theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        assert self._answers() == ["ready", "ready"]

    def all(self, *order: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(order)
        return self._answers()

    def each(self, *orders: tuple[Any, ...]) -> list[Any]:
        for pipe, order in zip(self.pipes, orders, strict=True):
            pipe.send(order)
        return self._answers()

    def _answers(self) -> list[Any]:
        for pipe in self.pipes:
            assert pipe.poll(ANSWER_S)
        return [pipe.recv() for pipe in self.pipes]

    def end(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join(ANSWER_S)
            pipe.close()


@pytest.fixture(scope="module")
def context() -> Any:
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.integration.vllm_ranks", "radixkv.client.sync", "radixkv.client.ranks"])
    return forks


@pytest.fixture(scope="module")
def daemons(daemon_factory: Any) -> list[Any]:
    """The one that runs is the last."""
    return [daemon_factory(pools=[POOL])]


@pytest.fixture(scope="module")
def engines(context: Any, daemons: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("store")
    made = [Engine(context, daemons[0].endpoint, folder / f"{n}") for n in range(2)]
    yield made
    for engine in made:
        engine.end()


def idle(endpoint: str) -> bool:
    with radixkv.connect(endpoint) as client:
        pool = client.stats().pools["default"]
    return pool["sequences"] == 0 and pool["pages"]["private"] == 0 and pool["pages"]["quarantined"] == 0


def save(engine: Engine, tokens: bytes, blocks: tuple[int, ...]) -> None:
    engine.each(("fill", 1.0, list(blocks)), ("fill", 2.0, list(blocks)))
    engine.all("save", Save(NS, tokens, blocks))


def test_each_worker_loads_its_own_part(daemons: Any, engines: list[Engine]) -> None:
    first, second = engines
    tokens = pack(range(12))
    save(first, tokens, (5, 3, 9))
    assert second.all("load", Load("r", NS, tokens, (2, 7, 4))) == [set(), set()]
    ours, theirs = first.all("read", [5, 3, 9]), second.all("read", [2, 7, 4])
    assert theirs == ours
    assert ours[0] != ours[1]
    assert idle(daemons[-1].endpoint)


def test_what_is_not_there_is_failed_on_both(daemons: Any, engines: list[Engine]) -> None:
    tokens = pack(range(100, 112))
    save(engines[0], tokens[: 8 * 4], (1, 2))
    assert engines[1].all("load", Load("r", NS, tokens, (2, 7, 4))) == [{4}, {4}]
    nothing = pack(range(200, 212))
    assert engines[1].all("load", Load("r", NS, nothing, (2, 7, 4))) == [{2, 7, 4}, {2, 7, 4}]
    assert idle(daemons[-1].endpoint)


def test_a_worker_that_dies_ends_its_engine_and_leaves_nothing(
    context: Any, daemons: Any, engines: list[Engine], tmp_path: Path, wait_until: Any
) -> None:
    doomed = Engine(context, daemons[-1].endpoint, tmp_path / "doomed")
    save(doomed, pack(range(300, 308)), (0, 1))
    doomed.end()
    wait_until(lambda: idle(daemons[-1].endpoint))
    assert engines[0].all("load", Load("r", NS, pack(range(300, 308)), (2, 7))) == [set(), set()]


def test_without_a_daemon_both_compute_and_both_come_back(
    daemon_factory: Any, daemons: Any, engines: Any, wait_until: Any
) -> None:
    tokens = pack(range(400, 408))
    save(engines[0], tokens, (0, 1))
    daemons[-1].kill()
    assert engines[0].all("load", Load("r", NS, tokens, (2, 7))) == [{2, 7}, {2, 7}]
    daemons.append(daemon_factory(pools=[POOL], endpoint=daemons[0].endpoint))

    def back() -> bool:
        save(engines[0], tokens, (0, 1))
        return bool(engines[1].all("load", Load("r", NS, tokens, (2, 7))) == [set(), set()])

    wait_until(back)
    assert engines[1].all("read", [2, 7]) == engines[0].all("read", [0, 1])
    assert idle(daemons[-1].endpoint)


def test_a_pool_of_another_number_of_ranks_is_no_pool(context: Any, daemon_factory: Any, tmp_path: Path) -> None:
    daemon = daemon_factory(pools=[{}])
    engine = Engine(context, daemon.endpoint, tmp_path / "store")
    try:
        save(engine, pack(range(8)), (0, 1))
        assert engine.all("load", Load("r", NS, pack(range(8)), (2, 7))) == [{2, 7}, {2, 7}]
    finally:
        engine.end()
    with radixkv.connect(daemon.endpoint) as client:
        assert client.pool().lookup(list(range(8)), namespace=NS).device_tokens == 0
