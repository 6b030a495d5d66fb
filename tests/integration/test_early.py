"""Sequences that are there before their pages are: a real daemon, its copier, and every byte looked at.

A page has three layers of 256 KiB, so that the copier brings one after the other. Every word of a page's layer is the
same number, which no other page or layer has. The daemon recounts its invariants after each step.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import radixkv
from tests.integration.test_host_tier import copier_of, copiers, counters, figures, stop_process, tiered  # noqa: F401

SPEC = {"layers": 3, "kv_heads": 8, "head_dim": 128, "page_size": 32, "dtype": "float32"}
PAGE_TOKENS, LAYERS = 32, 3
NAMESPACE, FILLER = radixkv.Namespace("early"), radixkv.Namespace("filler")
END_S = 60.0


def document(number: int, pages: int = 4) -> list[int]:
    return [10_000 * number + n for n in range(PAGE_TOKENS * pages)]


def word(tokens: Any, page: int, layer: int) -> int:
    return int(tokens[page * PAGE_TOKENS]) * 8 + layer + 1


def write(seq: Any) -> None:
    """Compute what is not cached, and say so."""
    rows = seq.memory._rows
    for page in range(seq.writable_from_tokens // PAGE_TOKENS, len(seq.page_table)):
        for layer in range(LAYERS):
            rows[seq.page_table[page], layer] = word(seq.tokens, page, layer)
    seq.commit(seq.length)


def check(seq: Any, layers: Any = range(LAYERS), pages: Any = None) -> None:
    """All bytes of these layers, of all pages that need not be computed."""
    rows, tokens = seq.memory._rows, seq.tokens
    for page in range(seq.writable_from_tokens // PAGE_TOKENS) if pages is None else pages:
        for layer in layers:
            found = rows[seq.page_table[page], layer]
            assert (found == np.uint32(word(tokens, page, layer))).all(), f"layer {layer} of page {page}"


def compute(pool: Any, *numbers: int) -> None:
    for number in numbers:
        with pool.reserve(document(number), namespace=NAMESPACE) as seq:
            write(seq)


def early(pool: Any, number: int, **how: Any) -> Any:
    return pool.reserve([*document(number), 7], namespace=NAMESPACE, wait_loaded=False, **how)


@pytest.fixture
def cold(tiered: Any) -> Any:  # noqa: F811
    """A daemon with 12 pages, all free, and its pool; documents 0 to 2 are in the host tier alone."""

    def start(**options: Any) -> tuple[Any, Any]:
        daemon, pool = tiered(**SPEC, pages=12, host_pages=24, reclaim_pages=0, **options)
        compute(pool, 0, 1, 2)
        pool.reserve(document(9, pages=12), namespace=FILLER).free()
        pool.invalidate(FILLER)
        assert pool.lookup(document(0), namespace=NAMESPACE).host_tokens == 4 * PAGE_TOKENS
        assert figures(pool).pages.free == 12
        return daemon, pool

    return start


def test_a_hit_on_host_pages_answers_before_the_copy_has_ended(cold: Any, wait_until: Any) -> None:
    daemon, pool = cold()
    stop_process(pid := copier_of(daemon), wait_until)
    seq = early(pool, 0)
    assert seq.loading == (0, 1, 2, 3) and seq.cached_tokens == 4 * PAGE_TOKENS
    os.kill(pid, signal.SIGCONT)
    for layer in range(LAYERS):
        seq.wait_loaded(layer)
        check(seq, [layer])
    seq.wait_loaded()
    assert seq.loading == ()
    check(seq)
    write(seq)
    seq.free()
