"""One daemon a module with tiny pools; a client and a namespace of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import radixkv
from tests.contract.facade import LoopThread, install

BOTH_SHELLS = {
    "test_doubts", "test_early", "test_fences", "test_join", "test_reserve", "test_retention", "test_sequence",
    "test_step", "test_suspend",
}  # fmt: skip
"""Modules that run for the blocking and for the asyncio client."""
BOTH_AT_LENGTH = {
    "test_agreement", "test_connect", "test_fork", "test_restart", "test_resume", "test_storm", "test_threads",
}  # fmt: skip
"""The same, but for the asyncio client only where time does not matter (``-m long``)."""

POOLS = [
    {"name": "default"},
    {"name": "small", "pages": 4},
    {"name": "half", "dtype": "bfloat16", "layers": 3, "kv_heads": 2, "pages": 8},
    {"name": "single", "page_size": 1, "pages": 8},
    {"name": "capped", "pages": 8, "session_cap_pages": 3},
]
_numbers = itertools.count()


class Fence:
    """An event that is done when the test says so."""

    def __init__(self, done: bool = False) -> None:
        self.done = done
        self.synchronized = 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.synchronized += 1
        self.done = True


@pytest.fixture(name="new_fence")
def _fence() -> type[Fence]:
    return Fence


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if module in BOTH_SHELLS | BOTH_AT_LENGTH:
        marks = [] if module in BOTH_SHELLS else [pytest.mark.long]
        shells = [pytest.param("sync", id=pytest.HIDDEN_PARAM), pytest.param("aio", marks=marks)]
        metafunc.parametrize("shell", shells, indirect=True)


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.end()


@pytest.fixture(autouse=True)
def shell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which client ``radixkv.connect`` gives."""
    if getattr(request, "param", "sync") == "aio":
        install(monkeypatch, request.getfixturevalue("loop_thread"))


@pytest.fixture(scope="module")
def daemon(daemon_factory: Callable[..., Any]) -> Any:
    return daemon_factory(pools=POOLS)


@pytest.fixture
def connect(daemon: Any) -> Iterator[Callable[..., radixkv.Client]]:
    """Further clients of the module's daemon, closed when the test is over."""
    clients: list[radixkv.Client] = []

    def connect(**options: Any) -> radixkv.Client:
        clients.append(radixkv.connect(daemon.endpoint, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Callable[..., radixkv.Client]) -> radixkv.Client:
    return connect()


@pytest.fixture
def pool(client: radixkv.Client) -> radixkv.Pool:
    """16 pages of 4 tokens; all of them free or evictable."""
    return client.pool("default")


@pytest.fixture
def ns() -> radixkv.Namespace:
    """A namespace in which nothing is cached yet."""
    return radixkv.Namespace(f"test-{next(_numbers)}")


@pytest.fixture
def cache(pool: radixkv.Pool, ns: radixkv.Namespace) -> Callable[[int], list[int]]:
    """Makes the first n tokens of a prompt cached and gives the prompt."""

    def cache(tokens: int, pool: radixkv.Pool = pool) -> list[int]:
        prompt = list(range(100, 100 + tokens))
        with pool.reserve(prompt, namespace=ns) as seq:
            seq.commit(tokens)
        return prompt

    return cache


@pytest.fixture
def counts(client: radixkv.Client) -> Callable[..., dict[str, int]]:
    """Pages of the default pool by state, and how many are evictable."""

    def counts(name: str = "default") -> dict[str, int]:
        pool = client.stats().pools[name]
        return {**pool.pages, "evictable": pool.evictable_pages, "sequences": pool.sequences}

    return counts
