"""radixkv behind real vLLM engines on a CPU: ``make test-engines``. Takes minutes; left out of the default run.

Two engines, one after the other, go through all of it: each start costs most of a minute. Both compute greedily in
float32, and vLLM's own prefix cache is off, so that every cached token comes from radixkv.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv.adapters.smollm2 import model_directory
from radixkv.adapters.vllm.bench.process import ANSWER_S, EngineProcess
from radixkv.adapters.vllm.bench.run import transfer

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL = model_directory()
BLOCK = 32
POOL = {"layers": 30, "kv_heads": 3, "head_dim": 64, "dtype": "float32", "page_size": BLOCK, "pages": 240}
DEADLINE_S = 0.5

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM in .venv-vllm: `make engines` installs it (3.5 GB)"),
    pytest.mark.skipif(not MODEL.exists(), reason="no model: `radixkv model fetch smollm2`"),
]


class Engine(EngineProcess):
    """With radixkv, and without vLLM's own prefix cache."""

    def __init__(self, endpoint: str, log: Path) -> None:
        config = transfer(endpoint, deadline_s=DEADLINE_S, pause_max_s=2.0)
        settings = {"model": str(MODEL), "enable_prefix_caching": False, "kv_transfer_config": config}
        super().__init__(PYTHON, settings, log)

    def begin(self, prompts: list[list[int]], max_tokens: int = 8) -> None:
        """Returns when the first step is done and others follow; ``receive`` gives the answer."""
        self.send({"prompts": prompts, "max_tokens": max_tokens, "tell": True})
        assert self.receive() == {"step": 1}

    def one(self, prompt: list[int], **job: Any) -> tuple[list[int], int]:
        """Output tokens, and how many of the prompt's came from radixkv."""
        ((output, cached, finished),) = self.generate([prompt], **job)["results"]
        assert finished
        return output, cached


def prompt(seed: int, tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(100, 40000) for _ in range(tokens)]


LONG = prompt(1, 400)
POSSIBLE = (len(LONG) - 1) // BLOCK * BLOCK


@dataclass
class Story:
    """One daemon at a time at one place; engines that live through several of them. ``plain``: what LONG goes on with
    when nothing is cached, and the seconds it took."""

    start_daemon: Callable[[], Any]
    first: Engine
    endpoint: str
    second: Engine | None = None
    plain: list[int] = field(default_factory=list)
    plain_s: float = 0.0

    def again_until_cached(self, engine: Engine) -> int:
        """Ask for LONG until all of it that can be is cached; every answer on the way is right. Returns how often."""
        end = time.monotonic() + ANSWER_S
        for times in itertools.count(1):
            output, cached = engine.one(LONG)
            assert output == self.plain
            if cached == POSSIBLE:
                return times
            assert time.monotonic() < end, f"only {cached} of {POSSIBLE} tokens"
        raise AssertionError

    def idle(self) -> bool:
        with radixkv.connect(self.endpoint) as client:
            pool = client.stats().pools["default"]
        return pool["sequences"] == 0 and pool["pages"]["private"] == 0 and pool["pages"]["quarantined"] == 0


@pytest.fixture(scope="module")
def story(daemon_factory: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    directory = tmp_path_factory.mktemp("vllm")
    endpoint = f"ipc://{directory}/r.sock"
    story = Story(
        lambda: daemon_factory(pools=[POOL], endpoint=endpoint, drain_s=300.0),
        Engine(endpoint, directory / "first.log"),
        endpoint,
    )
    yield story
    for engine in (story.first, story.second):
        if engine is not None and engine.process.poll() is None:
            engine.kill()


@pytest.fixture(scope="module")
def second(story: Story, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    story.second = Engine(story.endpoint, tmp_path_factory.mktemp("vllm") / "second.log")
    return story.second


@pytest.fixture(scope="module")
def daemons(story: Story) -> list[Any]:
    """The one that runs is the last."""
    return [story.start_daemon()]


def test_without_a_daemon_the_engine_starts_and_computes(story: Story) -> None:
    story.first.one(prompt(2, 64))  # what only a first request pays for
    began = time.monotonic()
    story.plain, cached = story.first.one(LONG)
    story.plain_s = time.monotonic() - began
    assert cached == 0
    print(f"without a daemon: {story.plain_s:.2f} s")


def test_it_joins_in_when_a_daemon_comes(story: Story, daemons: list[Any]) -> None:
    print(f"asked {story.again_until_cached(story.first)} times until it hit")


def test_an_engine_that_is_killed_in_the_middle_leaves_nothing_behind(story: Story, daemons: Any, wait_until) -> None:
    story.first.begin([LONG, *(prompt(seed, 40) for seed in range(10, 20))], max_tokens=64)
    story.first.kill()
    wait_until(story.idle)


def test_a_fresh_engine_gets_what_the_first_one_computed(story: Story, second: Engine) -> None:
    second.one(prompt(2, 64))
    answer = second.generate([LONG])
    assert answer["results"] == [[story.plain, POSSIBLE, True]]
    print(f"{POSSIBLE} of {len(LONG)} tokens from radixkv: {answer['seconds']:.2f} s")


def test_another_salt_never_hits(story: Story, second: Engine) -> None:
    first_token_s = []
    for salt, expected in (("somebody else's", 0), ("somebody else's", POSSIBLE), ("and another", 0), (None, POSSIBLE)):
        answer = second.generate([LONG], salt=salt)
        assert answer["results"] == [[story.plain, expected, True]]
        first_token_s += answer["first_tokens_s"]
    print("first token after", ", ".join(f"{seconds:.2f} s" for seconds in first_token_s), "(computed, cached, twice)")


def test_fifty_requests_at_once_with_aborts_leave_nothing_behind(story: Story, second: Engine, wait_until) -> None:
    shared = prompt(3, 3 * BLOCK)
    before = second.generate([shared])
    requests = [shared + prompt(100 + n, 8 + n % 30) for n in range(50)]
    aborted = list(range(0, 50, 3))
    answer = second.generate(requests, max_tokens=4, abort=aborted)
    for number, (output, cached, finished) in enumerate(answer["results"]):
        if number not in aborted:
            assert finished
            assert len(output) == 4
            assert cached == 3 * BLOCK
    assert answer["idle"] == before["idle"]
    assert answer["idle"]["prompts"] == 0
    wait_until(story.idle)


def test_a_pool_that_is_full_of_what_others_use_is_done_without(story: Story, second: Engine) -> None:
    other = prompt(6, 100)
    everything = range(POOL["pages"] * BLOCK)
    with radixkv.connect(story.endpoint) as client, client.pool().reserve(everything, timeout=30.0):
        assert second.one(LONG) == (story.plain, 0)
        output, cached = second.one(other)
        assert cached == 0
    assert second.one(other)[0] == output
    print(f"a full pool, then asked {story.again_until_cached(second)} times until it hit")


def test_a_stopped_daemon_is_waited_for_no_longer_than_its_deadline(story: Story, second: Engine, daemons: Any) -> None:
    daemons[-1].pause()
    try:
        began = time.monotonic()
        assert second.one(LONG) == (story.plain, 0)
        took = time.monotonic() - began
    finally:
        daemons[-1].resume()
    assert took < 2 * story.plain_s + 8 * DEADLINE_S
    print(f"stopped daemon: {took:.2f} s, then asked {story.again_until_cached(second)} times until it hit")


def test_a_load_that_fails_is_computed(story: Story, second: Engine, daemons: list[Any]) -> None:
    """A daemon that drains still answers lookups and reserves nothing: what was promised cannot be loaded."""
    with radixkv.connect(story.endpoint) as client, client.pool().reserve([1]):
        daemons[-1].process.terminate()
        while not refuses(client):
            pass
        assert second.one(LONG)[0] == story.plain
        assert "Recovered from KV load failure: 1 request(s)" in second.log.read_text()
    assert daemons[-1].process.wait(60) == 0
    daemons.append(story.start_daemon())
    print(f"after the restart asked {story.again_until_cached(second)} times until it hit")


def test_a_daemon_that_is_killed_in_the_middle_is_replaced(story: Story, second: Engine, daemons: list[Any]) -> None:
    own = prompt(4, 100)
    alone = second.one(own, max_tokens=24)[0]
    second.begin([LONG, own, prompt(5, 60)], max_tokens=24)
    daemons[-1].kill()
    results = second.receive()["results"]
    assert all(finished for _, _, finished in results)
    assert results[0][0][: len(story.plain)] == story.plain
    assert results[1][0] == alone
    daemons.append(story.start_daemon())
    print(f"after the kill asked {story.again_until_cached(second)} times until it hit")


def refuses(client: radixkv.Client) -> bool:
    try:
        client.pool().reserve([2]).free()
    except radixkv.Draining:
        return True
    return False
