"""A worker that stands still with a sequence in its hands, and what it does first when it goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import radixkv

PROMPT = list(range(700, 710))
"""Three pages of 4 tokens: one is committed (or none), the others stay private."""


def _step(seq: Any) -> None:
    result = seq.pool.step(commit={seq: 10}).commit[seq]
    if result is not None:
        raise result


FIRST: dict[str, Callable[[Any], Any]] = {
    "valid": lambda seq: seq.valid(),
    "commit": lambda seq: seq.commit(10),
    "extend": lambda seq: seq.extend([1, 2, 3]),
    "truncate": lambda seq: seq.truncate(5),
    "share": lambda seq: [child.free() for child in seq.share(4)],
    "handoff": lambda seq: seq.handoff(ttl=0.0),
    "step": _step,
    "free": lambda seq: seq.free(),
}


def live(endpoint: str, namespace: radixkv.Namespace, first: str, committed: int, pipe: Connection) -> None:
    """Say "holding", stop; once continued, say what the first call gave (or its error's code), and the others."""
    client = radixkv.connect(endpoint)
    pool = client.pool()
    seq = pool.reserve(PROMPT, namespace=namespace)
    seq.commit(committed)
    pipe.send("holding")
    os.kill(os.getpid(), signal.SIGSTOP)
    pipe.send(said(first, seq))
    pipe.send([said(name, seq) for name in FIRST if name != "free"])
    pipe.recv()
    with pool.reserve(PROMPT, namespace=namespace, timeout=10.0) as again:
        pipe.send((again.cached_tokens, again.valid()))
    pipe.recv()
    os._exit(0)


def said(name: str, seq: Any) -> Any:
    try:
        return FIRST[name](seq)
    except radixkv.RadixKVError as error:
        return error.code
