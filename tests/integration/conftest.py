"""Daemons by command line, and workers that speak the protocol by hand (``raw.py``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.raw import RawWorker


@pytest.fixture
def raw_worker() -> Iterator[Callable[..., RawWorker]]:
    workers: list[RawWorker] = []

    def start(endpoint: str, **how: bool) -> RawWorker:
        workers.append(RawWorker(endpoint, **how))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
def serve_command() -> Callable[..., list[str]]:
    """The command line of a daemon at an endpoint in a directory, with more flags."""

    def command(directory: Path, *flags: str) -> list[str]:
        return [sys.executable, "-m", "radixkv", "serve", "--endpoint", f"ipc://{directory}/r.sock", *flags]

    return command
