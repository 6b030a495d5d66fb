"""Single flight through a daemon: one worker computes, the others wait for it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import radixkv

PROMPT = range(64)
UNCACHED = itertools.count(1000, 100)
"""Where prompts begin that no test has computed."""
WRITER = """
import sys, radixkv
pool = radixkv.connect(sys.argv[1]).pool("default")
seq = pool.reserve(range(64))
print("computing", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def endpoint(daemon_factory: Callable[..., Any]) -> str:
    found: str = daemon_factory(pools=[{"name": "default", "pages": 64}]).endpoint
    return found


class Waiter(threading.Thread):
    """A worker of its own that reserves the prompt in a thread."""

    def __init__(self, endpoint: str, prompt: Any, join_timeout: float) -> None:
        super().__init__(daemon=True)
        self.client = radixkv.connect(endpoint)
        self.pool = self.client.pool("default")
        self.prompt, self.join_timeout = prompt, join_timeout
        self.cached = -1
        self.start()

    def run(self) -> None:
        with self.pool.reserve(self.prompt, join_timeout=self.join_timeout) as seq:
            self.cached = seq.cached_tokens

    def over(self) -> int:
        self.join(10)
        self.client.close()
        return self.cached


def wait_until(client: radixkv.Client, queued: int) -> None:
    while client.stats()["queued"] < queued:
        pass


def test_waiters_share_what_one_computes(endpoint: str) -> None:
    with radixkv.connect(endpoint) as client:
        first = next(UNCACHED)
        prompt = range(first, first + 64)
        seq = client.pool("default").reserve(prompt)
        waiters = [Waiter(endpoint, [*prompt, extra], 20.0) for extra in (7, 8, 9)]
        wait_until(client, 3)
        seq.commit(32)
        assert client.stats()["queued"] == 3
        seq.commit(64)
        assert [waiter.over() for waiter in waiters] == [64, 64, 64]
        seq.free()


def test_the_death_of_the_writer_wakes_them(endpoint: str) -> None:
    with radixkv.connect(endpoint) as client:
        command = [sys.executable, "-c", WRITER, endpoint]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "computing\n"
            waiter = Waiter(endpoint, PROMPT, 60.0)
            wait_until(client, 1)
            os.kill(writer.pid, signal.SIGKILL)
            assert waiter.over() == 0


def test_the_wait_has_an_end(endpoint: str) -> None:
    with radixkv.connect(endpoint) as one, radixkv.connect(endpoint) as two:
        with one.pool("default").reserve(range(900, 932)):
            seq = two.pool("default").reserve(range(900, 932), join_timeout=0.05)
        assert seq.cached_tokens == 0
        seq.free()
        with pytest.raises(radixkv.BadRequest):
            two.pool("default").reserve([1], join_timeout=-1)
