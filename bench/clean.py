"""What a reserve costs that pushes clean pages out of a full pool, beside one in an empty pool (see ``bench.copy``).

The engine alone, as in ``bench.index``. Between the reserves, outside of what is timed, the request computes, commits
and ends, and the reclaimer's copies end: as where copying keeps pace.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from time import perf_counter_ns

from bench import workload
from bench.core import LATER, NAMESPACE, NOW, POOL, SESSION, SPEC
from bench.rows import Row, single
from bench.stopwatch import quiet, summarize
from radixkv.commands import Body, Commit, Copy, CopyDone, Free, OpenSession, Reply, Request, Reserve, Reserved, Step
from radixkv.config import Config, PoolConfig
from radixkv.engine.engine import Engine

PAGES = 16_384
RESERVED_PAGES = 256
RUN_PAGES = 32
"""Of each sequence that lies in the pool."""
ROUNDS = 200
BAR = 2.0


def clean_row() -> Row:
    full, empty = _Worker(reclaim_pages=PAGES // 4), _Worker(reclaim_pages=0)
    source = workload.generator(11)
    for _ in range(PAGES // RUN_PAGES):
        full.compute(workload.fresh(source, RUN_PAGES * workload.PAGE_SIZE).tobytes())
    clean, fresh = [], []
    prompts = (workload.fresh(source, RESERVED_PAGES * workload.PAGE_SIZE).tobytes() for _ in range(10 * ROUNDS))
    with quiet():
        for prompt in islice(prompts, ROUNDS):
            clean.append(full.reserve(prompt))
            full.end(len(prompt) // 4)
            fresh.append(empty.reserve(prompt))
            empty.end(0)
    full.check(ROUNDS * RESERVED_PAGES)
    ratio = summarize(clean).p50 / summarize(fresh).p50
    return single("copy.reserve_clean_ratio", "x", ratio, BAR)


class _Worker:
    """An engine with one pool of two tiers and one session."""

    def __init__(self, reclaim_pages: int) -> None:
        pool = PoolConfig(name=POOL, spec=SPEC, pages=PAGES, host_pages=PAGES, reclaim_pages=reclaim_pages)
        self.engine = Engine(Config(pools=(pool,)), boot_id="bench", cache_id="bench")
        self.engine.step(OpenSession(SESSION, bytes(16), "bench"), NOW)
        self._epoch = self.engine.sessions.find_quietly(SESSION).epoch
        self._request = 0

    def reserve(self, prompt: bytes) -> int:
        """Nanoseconds."""
        self._request += 1
        body = Reserve(POOL, self._request, NAMESPACE, prompt, 0, "keep")
        request = Request(SESSION, self._epoch, self._request, LATER, body)
        began = perf_counter_ns()
        outcome = self.engine.step(request, NOW)
        took = perf_counter_ns() - began
        if type(outcome.reply) is not Reserved:
            raise RuntimeError(f"a reserve that finds clean pages should be granted at once, not {outcome.reply!r}")
        self._finish(outcome.effects)
        return took

    def compute(self, prompt: bytes) -> None:
        self.reserve(prompt)
        self.end(len(prompt) // 4)

    def end(self, committed: int) -> None:
        """Of the last sequence, with so many tokens complete."""
        seq = self._request
        if committed:
            self._ask(Step(commit=[Commit(seq, committed)]))
        self._ask(Step(free=[Free(seq)]))

    def check(self, pushed_out: int) -> None:
        saved, lost = (self.engine.snapshot()["counters"][name] for name in ("saved_pages", "evicted_pages"))
        if saved < pushed_out:
            raise RuntimeError(f"only {saved} pages were saved, {lost} lost; {pushed_out} were pushed out")

    def _ask(self, body: Body) -> Reply | None:
        self._request += 1
        outcome = self.engine.step(Request(SESSION, self._epoch, self._request, LATER, body), NOW)
        self._finish(outcome.effects)
        return outcome.reply

    def _finish(self, effects: Iterable[Copy]) -> None:
        copies = list(effects)
        for copy in copies:
            copies += self.engine.step(CopyDone(copy.copy, ok=True), NOW).effects
