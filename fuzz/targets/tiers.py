"""The engine with a host tier: every verb while copies run, and copies that end late, badly, twice, never or unasked.

There is no model of what should be where (see ``two_tiers.py``): whatever is handed out or kept must hold what its
tokens say, nobody may touch what a copy reads or fills, and all must add up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fuzz.model.packing import pack_tokens
from fuzz.pairs.tiered import FAR, Tiered
from fuzz.registry import Swarm
from fuzz.targets.words import Words
from radixkv import commands
from radixkv.config import HOST_WRITE_MODES, Config, KVSpec, Limits, PoolConfig, ServerConfig
from radixkv.engine.host import HostTier
from radixkv.engine.sequence import Sequence

NAMESPACES = (b"", b"a", b"ab")
ALWAYS = ("prompt", "reserve", "commit", "free", "copy_ends", "progress")
OPERATIONS = [
    "prompt", "reserve", "commit", "free", "extend", "truncate", "share", "compact", "handoff", "adopt", "prefetch",
    "invalidate", "cancel", "copy_ends", "copies_fail", "unknown_copy", "time", "scribble", "open", "end", "gone",
    "wait_loaded", "progress", "fail_on",
]  # fmt: skip
ODDS = {
    "prompt": 20.0, "reserve": 6.0, "commit": 3.0, "free": 4.0, "copy_ends": 6.0, "extend": 2.0, "truncate": 2.0,
    "share": 1.5, "prefetch": 1.0, "scribble": 1.0, "compact": 0.3, "handoff": 0.5, "cancel": 0.3, "invalidate": 0.3,
    "wait_loaded": 3.0, "progress": 4.0, "fail_on": 0.1,
    "time": 0.5, "copies_fail": 0.1, "unknown_copy": 0.1, "open": 0.2, "end": 0.15, "gone": 0.3,
}  # fmt: skip


def random_config(rng: random.Random) -> Config:
    """One pool of 2 to 24 pages, and a host tier that may be smaller than a prompt, or larger than the device."""
    pages = rng.choice((rng.randint(2, 6), rng.randint(4, 12), rng.randint(8, 24)))
    host = rng.choice((1, rng.randint(1, 4), rng.randint(2, 12), rng.randint(8, 32)))
    floor = rng.randint(0, pages // 4) if rng.random() < 0.2 else 0
    return Config(
        server=ServerConfig(lease_s=20.0),
        limits=Limits(queued=rng.choice((0, 2, 100))),
        pools=(
            PoolConfig(
                name="a",
                spec=KVSpec(layers=rng.choice((1, 2, 3)), kv_heads=1, head_dim=1, page_size=rng.choice((1, 1, 2, 3))),
                pages=pages,
                decode_reserve_pages=rng.randint(0, pages // 3) if rng.random() < 0.2 else 0,
                session_floor_pages=floor,
                session_cap_pages=rng.randint(max(1, floor), pages) if rng.random() < 0.1 else 0,
                namespaces=rng.choice((2, 64, 64)),
                host_pages=host,
                host_staging_pages=rng.choice((0, 0, 2, pages)),
                reclaim_pages=rng.choice((0, -1, pages // 2, pages)),
                host_write=rng.choice(("back", "back", *HOST_WRITE_MODES)),
                host_load_min_tokens=rng.choice((0, 0, 0, 2)),
            ),
        ),
    )


class TiersTarget:
    """``pair`` may be given to fuzz a certain one."""

    def __init__(self, rng: random.Random, pair: Tiered | None = None) -> None:
        self._rng = rng
        self.pair = pair or Tiered(random_config(rng))
        self.events = self.pair.events
        pool = self.pair.config.pools[0]
        self._words = Words(rng, pool.spec.page_size, rng.randint(1, min(pool.pages + 1, 12)))
        self._swarm = Swarm(rng, OPERATIONS, ALWAYS, ODDS)
        self._haste = rng.choice((0.95, 0.8, 0.3, 0.0))
        """How readily copies end when somebody waits for them."""
        self._sessions: list[int] = []
        self._ended = [0]
        self._copies: list[int] = []
        self._tickets: list[bytes] = []
        self._next_seq = 0
        self._count_moves()
        self._copy_ending = False
        self._fails = rng.choice((0.0, 0.02, 0.1))
        self._hurry = rng.choice((0.0, 0.5, 0.9))
        """How often a prompt does not wait for its pages."""
        self._crowd = rng.choice((1, 2, 4, 10))
        self._short = False
        self._open()

    def _count_moves(self) -> None:
        assert self.pair.pool.host is not None
        _count_moves(self.pair.pool.host, self._moved)

    def step(self) -> None:
        """One random operation; what is waited for, or short, more often."""
        self.pair.now += self._rng.choice((0.0, 0.01, 0.1))
        operation = self._swarm.pick()
        short, self._short = self._short, False
        crowded = len(self.pair.real.live_sequences()) > self._crowd
        if self.pair.pool.fetching and self._rng.random() < 0.5 * self._haste:
            operation = "copy_ends"
        elif (short or crowded) and self._rng.random() < 0.6:
            operation = "free"
        getattr(self, f"_{operation}")()
        self.events["host evict"] = self.pair.real.snapshot()["counters"]["evicted_pages"]

    def _moved(self, what: str, pages: int) -> None:
        """Runs move between the tiers; what surfaces without a copy had been computed anew."""
        if what == "surface":
            what = "loaded" if self._copy_ending else "raise"
        self.events[what] += pages > 0

    # -- drawing ------------------------------------------------------------------------------------------------

    def _session(self) -> int:
        if not self._sessions:
            self._open()
        return self._rng.choice(self._sessions) if self._sessions else 99

    def _ask(self, session: int, body: commands.Body, deadline: float = FAR) -> None:
        request = self.pair.request(session, body, deadline)
        outcome = self.pair.do(request)
        self._forget(outcome)
        self._short = isinstance(outcome.reply, commands.Failure) and outcome.reply.code == "out_of_pages"

    def _forget(self, outcome: commands.Outcome) -> None:
        """Sessions that the core has ended."""
        for session in outcome.ended:
            self._sessions.remove(session)
            self._ended.append(session)

    def _some(self) -> tuple[int, Sequence] | None:
        found = [(session, seq) for session in self._sessions for seq in self.pair.sequences(session).values()]
        return self._rng.choice(found) if found else None

    def _namespace(self) -> bytes:
        return self._rng.choice(NAMESPACES[:2] if self._rng.random() < 0.9 else NAMESPACES)

    def _new_seq(self) -> int:
        self._next_seq += 1
        return self._next_seq

    # -- requests -----------------------------------------------------------------------------------------------

    def _prompt(self) -> None:
        """One is reserved, mostly computed, mostly let go of at once."""
        if self._rng.random() < self._hurry:
            self._early()
            return
        seq = self._reserve()
        for session in [one for one in self._sessions if seq in self.pair.sequences(one)]:
            n = self.pair.sequences(session)[seq].length
            if self._rng.random() < 0.9:
                self._ask(session, commands.Step(commit=[commands.Commit(seq, n)]))
            if self._rng.random() < 0.8:
                self._ask(session, commands.Step(free=[commands.Free(seq)]))

    def _early(self) -> None:
        """As a prompt, but not waiting for its pages; mostly waited for, layer by layer or all, then computed."""
        seq = self._reserve(early=True)
        for session in [one for one in self._sessions if seq in self.pair.sequences(one)]:
            for layer in range(self.pair.config.pools[0].spec.layers):
                if self._rng.random() < 0.5:
                    self._ask(session, commands.WaitLoaded(seq, layer))
                if self._rng.random() < 0.5:
                    self._progress()
            if self._rng.random() < 0.5:
                self._ask(session, commands.WaitLoaded(seq))
            if self._rng.random() < 0.5 and seq in self.pair.sequences(session):
                n = self.pair.sequences(session)[seq].length
                self._ask(session, commands.Step(commit=[commands.Commit(seq, n)]))
            if self._rng.random() < 0.3:
                self._ask(session, commands.Step(free=[commands.Free(seq)]))

    def _reserve(self, early: bool = False) -> int:
        session, rng = self._session(), self._rng
        body = commands.Reserve(
            pool="a",
            seq=self._new_seq(),
            namespace=self._namespace(),
            tokens=pack_tokens(self._words.prompt()),
            headroom=rng.choice((0, 0, 0, 1, 3)),
            last_page=rng.choice(("copy", "keep", "keep", "drop")),
            wait_s=rng.choice((0.0, 0.0, 1.0, 30.0)),
            prefill_tokens_per_s=rng.choice((0.0, 0.0, 0.0, 1.0, 1e12)),
            early=early,
        )
        self._ask(session, body, FAR if rng.random() < 0.9 else self.pair.now + rng.choice((0.5, 3.0)))
        while self.pair.pool.fetching and self.pair.running and rng.random() < self._haste:
            self._copy_ends()
        return body.seq

    def _commit(self) -> None:
        if (found := self._some()) is not None:
            session, seq = found
            n = self._rng.choice((seq.length, self._rng.randint(seq.committed, seq.length)))
            self._ask(session, commands.Step(commit=[commands.Commit(seq.id, n)]))

    def _free(self) -> None:
        if (found := self._some()) is not None:
            session, seq = found
            self._ask(session, commands.Step(free=[commands.Free(seq.id, self._rng.choice((0, seq.length)))]))

    def _extend(self) -> None:
        if (found := self._some()) is not None:
            session, seq = found
            more = self._words.pages(self._rng.choice((0, 1, 2))) + self._words.tail()
            item = commands.Extend(seq.id, pack_tokens(more), self._rng.choice((0, 0, 2)))
            self._ask(session, commands.Step(extend=[item]))

    def _truncate(self) -> None:
        if (found := self._some()) is not None:
            session, seq = found
            self._ask(session, commands.Step(truncate=[commands.Truncate(seq.id, self._rng.randint(0, seq.length))]))

    def _share(self) -> None:
        if (found := self._some()) is not None:
            session, seq = found
            at = self._rng.choice((None, self._rng.randint(0, seq.committed)))
            self._ask(session, commands.Step(share=[commands.Share(seq.id, at, 1, self._new_seq())]))

    def _compact(self) -> None:
        if (found := self._some()) is not None:
            self._ask(found[0], commands.Compact(found[1].id))

    def _handoff(self) -> None:
        if (found := self._some()) is not None:
            self._tickets.append(self._rng.randbytes(16))
            self._ask(found[0], commands.Handoff(found[1].id, self._tickets[-1], self._rng.choice((1.0, 30.0))))

    def _adopt(self) -> None:
        if self._tickets:
            ticket = self._tickets.pop(self._rng.randrange(len(self._tickets)))
            self._ask(self._session(), commands.Adopt("a", ticket, self._new_seq()))

    def _prefetch(self) -> None:
        self._ask(self._session(), commands.Prefetch("a", self._namespace(), pack_tokens(self._words.prompt())))

    def _invalidate(self) -> None:
        self._ask(self._session(), commands.Invalidate("a", self._namespace()))

    def _cancel(self) -> None:
        waiting = [(one.session, one.request) for one in self.pair.pool.all_waiting()]
        if waiting:
            session, request = self._rng.choice(waiting)
            self._ask(session, commands.Cancel(request))

    # -- copies -------------------------------------------------------------------------------------------------

    def _wait_loaded(self) -> None:
        if (found := self._some()) is not None:
            layer = self._rng.choice((None, None, 0, 0, 1, 3))
            deadline = FAR if self._rng.random() < 0.8 else self.pair.now + 1.0
            self._ask(found[0], commands.WaitLoaded(found[1].id, layer), deadline)

    def _progress(self) -> None:
        """Some copy, mostly one that is done by layers, has come some layers further; or nobody knows which has."""
        rng, most = self._rng, self.pair.config.pools[0].spec.layers
        running = [copy for copy, one in self.pair.running.items() if not one.copy.to_host]
        copy = rng.choice(running) if running and rng.random() < 0.95 else rng.choice([*self._copies, 10**6])
        self._forget(self.pair.progress(copy, rng.randint(0, most)))

    def _fail_on(self) -> None:
        """The copier dies again and again: time passes, and nothing is copied."""
        for _ in range(self._rng.choice((2, 10))):
            self._copies_fail()
            self._forget(self.pair.tick(self._rng.choice((0.6, 1.0))))

    def _copy_ends(self) -> None:
        """Mostly the oldest, mostly well."""
        if running := list(self.pair.running):
            copy = running[0] if self._rng.random() < 0.7 else self._rng.choice(running)
            self._copy_done(copy, ok=self._rng.random() >= self._fails)
            if self._rng.random() < 0.05:
                self._copy_done(copy, ok=self._rng.random() < 0.5)

    def _copy_done(self, copy: int, ok: bool) -> None:
        self._copies = [*self._copies[-10:], copy]
        self._copy_ending = True
        self._forget(self.pair.do(commands.CopyDone(copy, ok, self._rng.choice((0.0, 1e-9, 1.0)))))
        self._copy_ending = False

    def _copies_fail(self) -> None:
        """The copier has died."""
        for copy in list(self.pair.running):
            self._copy_done(copy, ok=False)

    def _unknown_copy(self) -> None:
        self._copy_done(self._rng.choice([*self._copies, 10**6]), self._rng.random() < 0.5)

    # -- sessions and time --------------------------------------------------------------------------------------

    def _open(self) -> None:
        if len(self._sessions) < 3:
            session = self.pair.open()
            if any(one.id == session for one in self.pair.real.sessions.all()):
                self._sessions.append(session)

    def _end_session(self, session: int, mapped: bool) -> None:
        self._sessions.remove(session)
        self._ended.append(session)
        self.pair.do(commands.EndSession(session, mapped, "gone"))

    def _end(self) -> None:
        if self._sessions:
            self._end_session(self._rng.choice(self._sessions), self._rng.random() < 0.7)

    def _gone(self) -> None:
        self.pair.do(commands.MappingGone(self._rng.choice(self._ended)))

    def _time(self) -> None:
        self._forget(self.pair.tick(self._rng.choice((0.0, 0.1, 0.6, 2.0, 6.0))))

    def _scribble(self) -> None:
        """Workers, also dead ones, write wherever they may."""
        pages = [(page, 0) for page in self.pair.quarantined()]
        for session in self._sessions:
            for seq in self.pair.sequences(session).values():
                size = self.pair.pool.page_size
                own = range(seq.published, len(seq.pages))
                pages += [(seq.pages[at], min(size, max(0, seq.committed - at * size))) for at in own]
        for page, row in self._rng.sample(pages, min(3, len(pages))):
            self.pair.scribble(page, row)


def _count_moves(host: HostTier, moved: Callable[[str, int], None]) -> None:
    """Tell ``moved`` of what the host tier is asked to do, before it does it."""

    def watched(name: str) -> Callable[..., Any]:
        right = getattr(host, name)

        def watch(node: Any, *more: Any) -> Any:
            covered = len(node.host) if name == "uncover" and node.parent is not None else 1
            moved(name, covered)
            return right(node, *more)

        return watch

    for name in ("sink", "surface", "uncover", "drop_below"):
        setattr(host, name, watched(name))
