"""The engine with a host tier beside a naive two-tier LRU, exactly: a prompt at a time, and copies that end at once.

There is staging room for whatever passes through; nothing is copied ahead of need. Then nothing is lost that a perfect
LRU of both tiers would still have: what is where, and what is found, must be the model's after every prompt. Every
other prompt does not wait for what is loaded, which changes nothing of that.
"""

from __future__ import annotations

import random
from collections import Counter

from fuzz.model.mismatch import expect, require
from fuzz.model.packing import unpack_tokens
from fuzz.model.two_tiers import Page, TwoTierLRU
from fuzz.pairs.tiered import Tiered
from fuzz.pairs.worker import Held, Worker, small_config
from fuzz.targets.words import Words
from radixkv import commands


class TwoTiersTarget:
    def __init__(self, rng: random.Random) -> None:
        pages = rng.choice((rng.randint(1, 4), rng.randint(3, 12), rng.randint(8, 32)))
        host_pages = rng.choice((1, rng.randint(1, 4), rng.randint(2, 16), rng.randint(8, 64)))
        size = rng.choice((1, 1, 2, 3))
        self._rng = rng
        self.pair = Tiered(small_config(pages, size, host_pages=host_pages, host_staging_pages=pages, reclaim_pages=0))
        self._model = TwoTierLRU(pages, host_pages, size)
        self._worker = Worker(self.pair)
        self._words = Words(rng, size, rng.randint(max(1, pages // 2), pages))
        self.events: Counter[str] = self.pair.events

    def step(self) -> None:
        tokens = self._words.prompt()
        if not tokens:
            return
        found = self._worker.look(tokens)
        reply = self._worker.try_reserve(tokens, last_page="keep", early=self._rng.random() < 0.5)
        self.pair.finish_all()
        if reply is None:
            reply = self.pair.late(self._worker.session)
        require("I28", isinstance(reply, commands.Reserved), f"a prompt that fits was answered by {reply!r}")
        held = Held(self._worker.next_seq - 1, reply)
        self._worker.commit(held, len(tokens))
        self._worker.free(held)
        self._compare(tokens, (found, held.writable_from))

    def _compare(self, tokens: list[int], found: tuple[tuple[int, int], int]) -> None:
        size = self.pair.pool.page_size
        (device, host), ready = found
        hits = self._model.prompt(tokens)
        expect("I8", f"pages of {tokens} on the device and in the host tier", (device // size, host // size), hits)
        expect("I8", f"pages of {tokens} that need no computing", ready // size, sum(hits))
        tiers: tuple[set[Page], set[Page]] = set(), set()
        for node, path in self.pair.nodes():
            whole = tuple(unpack_tokens(b"".join(bytes(part.tokens) for part in path[1:])))
            ends = range(len(whole), len(whole) - node.page_count * size, -size)
            tiers[0 if node.pages else 1].update(whole[:end] for end in ends)
        expect("I7", "pages on the device", sorted(tiers[0]), sorted(self._model.device))
        expect("I7", "pages in the host tier alone", sorted(tiers[1]), sorted(self._model.host))
        self.events["device hit"] += hits[0] > 0
        self.events["host hit"] += hits[1] > 0
        self.events["lost"] = self._model.lost
