"""The asyncio client as if it blocked, so that the tests written for the blocking one hold it to the same contract.

Each coroutine runs in a task of one event loop, in a thread of its own: calls of many threads are many tasks.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

import radixkv
from radixkv import aio


def in_a_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


class LoopThread:
    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if os.getpid() != self._pid:
            return asyncio.run(coroutine)  # a forked child: the thread is not here
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def install(monkeypatch: pytest.MonkeyPatch, loop: LoopThread) -> None:
    """From now on ``radixkv.connect`` gives an asyncio client that blocks."""
    for kind in (aio.Client, aio.Pool, aio.Sequence):
        monkeypatch.setattr(aio, kind.__name__, _blocking(kind, loop))
    monkeypatch.setattr(radixkv, "connect", _call(aio.connect, loop))


def _blocking(kind: type, loop: LoopThread) -> type:
    methods = {name: _call(method, loop) for name, method in inspect.getmembers(kind, inspect.iscoroutinefunction)}
    for entry, name in (("__aenter__", "__enter__"), ("__aexit__", "__exit__")):
        if entry in methods:
            methods[name] = methods.pop(entry)
    slots = {"__slots__": ()} if kind is aio.Sequence else {}
    return type(kind.__name__, (kind,), {**methods, **slots})


def _call(method: Callable[..., Any], loop: LoopThread) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        coroutine = method(*args, **keywords)
        return coroutine if in_a_task() else loop.run(coroutine)

    return call
