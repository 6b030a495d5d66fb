"""What it saves not to wait for pages of the host tier: a real daemon, its copier and one client (see ``bench.copy``).

A prompt of 128 pages of SmolLM2-135M (94 MB) lies in the host tier alone, and the device is free. Then it is reserved,
in turns: waiting for all, or early and then for the first layer and for all. Nothing is computed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

import radixkv
from bench.rows import Row, row
from bench.serving import serving
from bench.stopwatch import quiet, summarize

PAGES, PROMPT_PAGES = 160, 128
POOL = f"name=default,pages={PAGES},host_pages={2 * PAGES},reclaim_pages=0"
ROUNDS = 24
BUDGET_S = 2.0
NAMESPACE = radixkv.Namespace("bench")


def early_rows() -> Iterator[Row]:
    took: defaultdict[str, list[float]] = defaultdict(list)
    with serving(["--pool", POOL]) as daemon, radixkv.connect(daemon.endpoint, timeout=30.0) as client, quiet():
        pool = client.pool()
        prompt = list(range(PROMPT_PAGES * pool.page_size))
        with pool.reserve(prompt, namespace=NAMESPACE) as seq:
            seq.commit(len(prompt))
        until = time.monotonic() + BUDGET_S
        for number in range(ROUNDS):
            _push_out(pool, prompt)
            _reserve(pool, prompt, took, early=number % 2 == 1)
            if number > 4 and time.monotonic() > until:
                break
    whole = summarize(took["loaded"][1:])
    yield row("copy.loaded_ms", "ms", whole)
    for name in ("early", "first_layer", "last_layer"):
        yield row(f"copy.{name}_ms", "ms", summarize(took[name]), reference=whole.p50)


def _push_out(pool: radixkv.Pool, prompt: list[int]) -> None:
    """All of the device is handed out and comes back free."""
    pool.reserve(range(PAGES * pool.page_size), namespace=radixkv.Namespace("filler")).free()
    if pool.lookup(prompt, namespace=NAMESPACE).host_tokens != len(prompt):
        raise RuntimeError("the prompt is not in the host tier")


def _reserve(pool: radixkv.Pool, prompt: list[int], took: dict[str, list[float]], early: bool) -> None:
    """Milliseconds from the call on."""
    begin = time.perf_counter()
    with pool.reserve([*prompt, 0], namespace=NAMESPACE, wait_loaded=not early) as seq:
        took["early" if early else "loaded"].append(1e3 * (time.perf_counter() - begin))
        if early:
            for name, layer in (("first_layer", 0), ("last_layer", None)):
                seq.wait_loaded(layer)
                took[name].append(1e3 * (time.perf_counter() - begin))
        if seq.cached_tokens != len(prompt) or seq.loading:
            raise RuntimeError("the prompt was not loaded")
