"""vLLM computing in radixkv's pages, with the real engine on a CPU: ``make test-engines``."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import radixkv
from radixkv.adapters.vllm.bench.process import EngineError, EngineProcess
from radixkv.adapters.vllm.bench.run import transfer
from tests.engines.test_vllm import (
    BLOCK,
    LONG,
    MODEL,
    POOL,
    POSSIBLE,
    PYTHON,
    Engine,
    prompt,
    pytestmark,  # noqa: F401 - read by pytest
)

PAGE_BYTES = 2 * 30 * 3 * 64 * BLOCK * 4
OWN_BLOCKS = 100
SMALL = {**POOL, "pages": 120}


class InPlace(Engine):
    def __init__(self, endpoint: str, log: Path, own_blocks: int = OWN_BLOCKS, pages: int = SMALL["pages"]) -> None:
        config = {**transfer(endpoint, pause_max_s=2.0), "kv_connector": "RadixKVZeroCopyConnector"}
        settings = {"kv_transfer_config": config, "kv_cache_memory_bytes": (own_blocks + pages) * PAGE_BYTES}
        EngineProcess.__init__(self, PYTHON, {"model": str(MODEL), **settings}, log)


@pytest.fixture(scope="module")
def daemon(daemon_factory: Any) -> Any:
    return daemon_factory(pools=[SMALL])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def copying(daemon: Any, folder: Path) -> Iterator[tuple[list[int], int]]:
    """What an engine that copies says to LONG; it has left the pages when it is gone."""
    engine = Engine(daemon.endpoint, folder / "copying.log")
    try:
        yield engine.one(LONG)
    finally:
        engine.kill()


@pytest.fixture(scope="module")
def engine(daemon: Any, folder: Path, copying: Any) -> Iterator[InPlace]:
    engine = InPlace(daemon.endpoint, folder / "in-place.log")
    yield engine
    engine.kill()


def stats(endpoint: str) -> Any:
    with radixkv.connect(endpoint) as client:
        return client.stats().pools["default"]


def test_it_computes_on_pages_that_another_engine_saved(daemon: Any, engine: InPlace, copying: Any) -> None:
    before = stats(daemon.endpoint)["pages"]["cached"]
    assert engine.one(LONG) == (copying[0], POSSIBLE)
    assert stats(daemon.endpoint)["pages"]["cached"] == before


def test_the_pages_are_read_where_they_are(daemon: Any, engine: InPlace, copying: Any) -> None:
    """Whoever changes a page changes what the engine says."""
    with radixkv.connect(daemon.endpoint) as client:
        pool = client.pool()
        values = [pool.values(layer) for layer in range(pool.spec.layers)]
        kept = [each.clone() for each in values]
        try:
            for each in values:
                each.copy_(torch.flip(each, dims=[0]))
            assert engine.one(LONG)[0] != copying[0]
        finally:
            for each, was in zip(values, kept, strict=True):
                each.copy_(was)
    assert engine.one(LONG) == (copying[0], POSSIBLE)


def test_what_it_computes_is_there_for_others_at_once(daemon: Any, engine: InPlace) -> None:
    own = prompt(21, 200)
    output, cached = engine.one(own)
    assert cached == 0
    assert engine.one(own) == (output, 192)
    assert engine.one(own, salt="somebody else's") == (output, 0)


def test_what_comes_at_once_with_the_same_beginning_is_computed_once(engine: InPlace) -> None:
    document = prompt(24, 5 * BLOCK)
    results = engine.generate([document + prompt(300 + n, 10) for n in range(4)])["results"]
    assert [cached for _, cached, _ in results] == [0, *[len(document)] * 3]


def test_fifty_requests_at_once_with_aborts_leave_nothing_behind(daemon: Any, engine: InPlace, wait_until: Any) -> None:
    """More than the pages can hold: those that find none are computed in the engine's own blocks."""
    shared = prompt(22, 3 * BLOCK)
    before = engine.generate([shared])
    requests = [shared + prompt(200 + n, 8 + n) for n in range(50)]
    aborted = list(range(0, 50, 3))
    answer = engine.generate(requests, max_tokens=4, abort=aborted)
    for number, (output, _, finished) in enumerate(answer["results"]):
        if number not in aborted:
            assert finished
            assert len(output) == 4
    assert answer["idle"] == before["idle"]
    pool = stats(daemon.endpoint)
    assert pool["sequences"] == pool["pages"]["private"] == pool["pages"]["quarantined"] == 0
    assert engine.one(requests[1])[0][:4] == answer["results"][1][0]


def test_a_daemon_that_hangs_and_one_that_is_killed_change_no_answer(
    daemon: Any, daemon_factory: Any, engine: InPlace, copying: Any, wait_until: Any
) -> None:
    daemon.pause()
    try:
        assert engine.one(LONG)[0] == copying[0]
    finally:
        daemon.resume()
    wait_until(lambda: engine.one(LONG) == (copying[0], POSSIBLE), timeout=120.0)
    engine.begin([LONG, prompt(23, 60)], max_tokens=24)
    daemon.kill()
    results = engine.receive()["results"]
    assert all(finished for _, _, finished in results)
    assert results[0][0][:8] == copying[0]
    another = daemon_factory(pools=[SMALL], endpoint=daemon.endpoint)
    wait_until(lambda: engine.one(LONG) == (copying[0], POSSIBLE), timeout=120.0)
    assert stats(another.endpoint)["sequences"] == 0


def test_it_does_not_start_where_it_could_not_serve(daemon_factory: Any, tmp_path: Path) -> None:
    daemon = daemon_factory(pools=[SMALL])
    with pytest.raises(EngineError, match="blocks more than pages"):
        InPlace(daemon.endpoint, tmp_path / "log", own_blocks=10)


WALKED = {"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32", "page_size": 4, "pages": 40}


@pytest.fixture
def walk(request: pytest.FixtureRequest, daemon_factory: Any) -> Iterator[tuple[Any, Any]]:
    """Half way through; its daemon."""
    daemon = daemon_factory(pools=[WALKED], lease_s=2.0, heartbeat_s=0.2)
    command = [PYTHON, Path(__file__).with_name("leases_walk.py"), daemon.endpoint, str(request.param), "600"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline() not in ("half\n", ""):
            pass
        yield process, daemon
        process.kill()


def rest_of(walk: Any) -> dict[str, int]:
    """No block is used that is not leased, none is written by two, and what is in a block is what was computed for it:
    else the walk ends before it tells."""
    told: dict[str, int] = json.loads(walk.communicate("go on\n")[0])
    assert walk.returncode == 0
    print(told)
    assert min(told[what] for what in ("hits", "hits_after", "preempted", "private", "waited", "finished")) > 0
    return told


@pytest.mark.parametrize("walk", [1, 2], indirect=True)
def test_a_walk_with_vllms_cache_manager_goes_on_in_another_daemons_memory(walk: Any, daemon_factory: Any) -> None:
    process, daemon = walk
    daemon.kill()
    daemon_factory(pools=[WALKED], endpoint=daemon.endpoint)
    rest_of(process)


@pytest.mark.parametrize("walk", [3, 4], indirect=True)
def test_what_was_computed_while_the_pages_were_somebody_elses_is_dropped(walk: Any, wait_until: Any) -> None:
    """The engine stands still in the middle of a step, for longer than its lease; others use its pages meanwhile."""
    process, daemon = walk
    process.send_signal(signal.SIGSTOP)
    try:
        with radixkv.connect(daemon.endpoint) as client:
            pool = client.pool()
            taken: list[radixkv.Sequence] = []
            wait_until(lambda: not take_a_page(pool, taken) and client.stats().counters["revoked_sessions"], timeout=60)
            while take_a_page(pool, taken):
                pass
            assert len(taken) > 10
            for seq in taken:
                seq.free()
    finally:
        process.send_signal(signal.SIGCONT)
    assert rest_of(process)["lost"] > 0


def take_a_page(pool: radixkv.Pool, taken: list[radixkv.Sequence]) -> bool:
    """And scribble on it. False: there is none."""
    try:
        taken.append(pool.reserve([1, 2, 3, 4], namespace=radixkv.Namespace(str(len(taken)))))
    except radixkv.OutOfPages:
        return False
    pool.keys(0)[int(taken[-1].page_table[0])] = 7.0
    return True
