"""What routers know of an engine with two tiers, restarts and invalidates, beside what it has and a lookup finds."""

from __future__ import annotations

import random

from fuzz.model.mismatch import expect
from fuzz.model.packing import pack_tokens
from fuzz.pairs.told import SPACES, ToldRecovery
from fuzz.targets.tiers import TiersTarget, random_config
from radixkv import commands


class EventsTarget(TiersTarget):
    pair: ToldRecovery

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, ToldRecovery(random_config(rng), rng))
        self._restarts = rng.choice((0.0, 0.002, 0.02))
        self._settles = rng.choice((0.01, 0.05, 0.2))
        self._turns = rng.choice((0.1, 0.5, 2.0))
        """How many a step: with fewer than there is to tell, much waits."""

    def step(self) -> None:
        rng, pair = self._rng, self.pair
        if rng.random() < self._restarts:
            pair.restart()
            self._count_moves()
        super().step()
        for _ in range(int(self._turns + rng.random())):
            pair.turn()
            pair.answer()
        if rng.random() < 0.02:
            pair.newcomer()
        if rng.random() < self._settles:
            pair.settle()
            self._look()

    def _look(self) -> None:
        """Every subscriber knows what a lookup of some prompt finds."""
        space, prompt = self._namespace(), self._words.prompt()
        reply = self.pair.ask(self._session(), commands.Lookup("a", space, [pack_tokens(prompt)]))
        if not isinstance(reply, commands.LookedUp):
            return
        found = reply.device_tokens[0], reply.host_tokens[0]
        for one in self.pair.subscribers:
            known = one.router.tokens(prompt, self.pair.pool.page_size, *SPACES[space])
            expect("I23", f"tokens of {prompt} on the device and in the host tier", known, found)
        self.events["found"] += found != (0, 0)

    def _namespace(self) -> bytes:
        return self._rng.choice(list(SPACES))
