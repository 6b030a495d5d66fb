"""Fixtures for tests over a CUDA driver. What steers the fake one is skipped where the real one is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import radixkv
from tests.cuda.suites import Control


@pytest.fixture
def control() -> Iterator[Control]:
    """The fake driver's numbers, all 0 before and after the test but for what has been counted."""
    path = os.environ.get("FAKE_CUDA_CONTROL")
    if path is None:
        pytest.skip("steers the fake driver, and this is not it")
    control = Control(Path(path))
    control.release()
    yield control
    control.release()


@pytest.fixture
def connect() -> Iterator[Any]:
    clients: list[radixkv.Client] = []

    def connect(daemon: Any, **options: Any) -> radixkv.Client:
        clients.append(radixkv.connect(daemon.endpoint, timeout=30.0, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
