"""The whole engine under everything that workers, time and death can do to it."""

from __future__ import annotations

import random

from fuzz.model.packing import pack_tokens
from fuzz.model.state import SessionModel, Slices
from fuzz.pairs.engine import FAR, EnginePair
from fuzz.registry import Swarm
from fuzz.targets.words import Words
from radixkv import commands
from radixkv.config import POLICIES, Config, KVSpec, Limits, PoolConfig, ServerConfig

NAMESPACES = [b"", b"\0", b"a", b"a\0", b"ab", b"a" * 1024, (1).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"a"]
ALWAYS = ("reserve", "commit", "free")
OPERATIONS = [
    "reserve", "commit", "free", "truncate", "extend", "share", "copied", "batch", "handoff", "adopt", "compact",
    "invalidate", "lookup", "stats", "cancel", "heartbeat", "repeat", "late", "stranger", "open", "bye", "end",
    "gone", "time", "copy_done",
]  # fmt: skip
ODDS = {
    "reserve": 8.0, "commit": 6.0, "extend": 2.0, "share": 2.0, "truncate": 2.0, "batch": 2.0, "free": 2.0,
    "handoff": 1.5, "late": 0.5, "time": 0.5, "lookup": 0.3, "cancel": 0.3, "repeat": 0.3, "heartbeat": 0.1,
    "stats": 0.1, "invalidate": 0.4, "gone": 0.1, "copy_done": 0.05, "stranger": 0.1, "open": 0.2,
    "end": 0.1, "bye": 0.05,
}  # fmt: skip


def random_config(rng: random.Random) -> Config:
    """One or two pools of 1 to 64 pages of 1 to 16 tokens, tight limits now and then."""

    def pool(name: str) -> PoolConfig:
        pages = rng.choice((rng.randint(1, 8), rng.randint(4, 12), rng.randint(8, 20), rng.randint(1, 64)))
        cap = rng.randint(1, pages) if rng.random() < 0.2 else 0
        policy = rng.choice(("lru", "lru", "lru", *POLICIES))
        floor = rng.randint(0, max(1, min(cap or pages, pages // 4))) if rng.random() < 0.3 else 0
        return PoolConfig(
            name=name,
            spec=KVSpec(layers=1, kv_heads=1, head_dim=1, page_size=rng.choice((1, 2, 3, 4, 4, 8, 16))),
            pages=pages,
            decode_reserve_pages=rng.randint(0, pages // 3) if rng.random() < 0.3 else 0,
            session_floor_pages=min(floor, cap or pages),
            session_cap_pages=cap,
            namespaces=rng.choice((1, 2, 3, 64)),
            policy=policy,
            pin_limit_pages=rng.choice((0, pages)),
            namespace_cap_pages=pages if policy == "lru" and rng.random() < 0.2 else 0,  # bounds nobody: as without
        )

    limits = Limits(
        sessions=rng.choice((3, 4, 64)),
        queued=rng.choice((0, 2, 100)),
        batch_items=rng.choice((4, 4096)),
        tokens=40 if rng.random() < 0.1 else 4096,
        sequences_per_session=5 if rng.random() < 0.1 else 4096,
    )
    server = ServerConfig(lease_s=20.0, keep_replies=rng.choice((1, 2, 64)))
    names = ["a", "b"] if rng.random() < 0.2 else ["a"]
    return Config(server=server, limits=limits, pools=tuple(pool(name) for name in names))


class EngineTarget:
    """``pair`` may be given to fuzz another engine class, or a certain configuration."""

    def __init__(self, rng: random.Random, pair: EnginePair | None = None) -> None:
        self._rng = rng
        slices = Slices(rng.randint(1, 3), rng.randint(1, 2)) if rng.random() < 0.3 else None
        self.pair = pair or EnginePair(random_config(rng), slices)
        self.events = self.pair.events
        self._pools = {
            pool.name: Words(rng, pool.spec.page_size, rng.randint(1, min(pool.pages + 1, 12)))
            for pool in self.pair.config.pools
        }
        self._namespaces = rng.sample(NAMESPACES, rng.randint(1, 3))
        self._swarm = Swarm(rng, OPERATIONS, ALWAYS, ODDS)
        self._waits = rng.random() < 0.7
        self._retains = rng.choice((0.0, 0.0, 0.0, 0.3, 0.9))
        """How often a prompt has priorities."""
        self._sent: list[commands.Request] = []
        self._tickets: list[bytes] = []
        self._next_seq = 0
        self._short = False
        self._crowd = rng.choice((3, 8, 20))
        self._steps_to_drain = rng.randint(200, 399) if rng.random() < 0.1 else -1
        self._ended: list[int] = []
        self.last: commands.Command | None = None
        for _ in range(rng.randint(1, 3)):
            self._open()

    def step(self) -> None:
        """One random operation; after a refusal for lack of pages more often one that gives some back."""
        self._steps_to_drain -= 1
        if self._steps_to_drain == 0:
            self._do(commands.Drain())
        short, self._short = self._short, False
        crowded = len(self.pair.model.state.sequences()) > self._crowd
        operation = "free" if (short or crowded) and self._rng.random() < 0.6 else self._swarm.pick()
        getattr(self, f"_{operation}")()

    # -- drawing ------------------------------------------------------------------------------------------------

    def _session(self) -> SessionModel:
        if not self.pair.model.state.sessions:
            self.pair.open()
        if not self.pair.model.state.sessions:  # draining
            return SessionModel(77)
        return self._rng.choice(list(self.pair.model.state.sessions.values()))

    def _ask(self, session: int, body: commands.Body, deadline: float = FAR) -> None:
        request = self.pair.request(session, body, deadline)
        self._sent = [*self._sent[-80:], request]
        self._do(request)

    def _do(self, command: commands.Command) -> None:
        self.last = command
        reply = self.pair.do(command).reply
        waits = reply is None and isinstance(command, commands.Request)
        self._short = waits or (isinstance(reply, commands.Failure) and reply.code == "out_of_pages")

    def _seq(self, session: SessionModel) -> int:
        """Mostly one that it has."""
        if session.sequences and self._rng.random() < 0.97:
            return self._rng.choice(list(session.sequences))
        return self._rng.choice((0, 1, self._next_seq, 2**63 - 1))

    def _some(self) -> tuple[SessionModel, int]:
        """A session, most likely one with sequences, and most likely one of these."""
        session = self._session()
        busy = [other for other in self.pair.model.state.sessions.values() if other.sequences]
        if busy and not session.sequences and self._rng.random() < 0.95:
            session = self._rng.choice(busy)
        return session, self._seq(session)

    def _new_seq(self, session: SessionModel) -> int:
        self._next_seq += 1
        if session.sequences and self._rng.random() < 0.02:
            return self._rng.choice(list(session.sequences))
        return self._next_seq

    def _pool(self) -> str:
        return self._rng.choice(list(self._pools)) if self._rng.random() < 0.99 else "nowhere"

    def _packed(self, tokens: list[int]) -> bytes:
        return pack_tokens(tokens) + (b"x" if self._rng.random() < 0.01 else b"")

    def _headroom(self) -> int:
        return self._rng.choice((0, 0, 0, 1, self._rng.randint(0, 20)))

    # -- requests -----------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        """A prompt comes; half of the time it is computed at once."""
        session = self._session()
        body = self._reserve_body(session)
        self._ask(session.id, body)
        made = session.sequences.get(body.seq)
        if made and self._rng.random() < 0.5:
            self._ask(session.id, commands.Step(commit=[commands.Commit(body.seq, len(made.tokens))]))

    def _reserve_body(self, session: SessionModel) -> commands.Reserve:
        pool = self._pool()
        words = self._pools.get(pool) or next(iter(self._pools.values()))
        return commands.Reserve(
            pool=pool,
            seq=self._new_seq(session),
            namespace=self._rng.choice(self._namespaces),
            tokens=self._packed(words.prompt()),
            headroom=self._headroom(),
            last_page=self._rng.choice(("copy", "copy", "keep", "drop")) if self._rng.random() < 0.99 else "lend",
            wait_s=self._rng.choice((0.0, 0.0, 1.0, 5.0, 100.0)) if self._waits else 0.0,
            retain=self._ranges() if self._rng.random() < self._retains else [],
        )

    def _ranges(self) -> list[commands.Retain]:
        """Mostly in order, mostly with what a pin needs."""
        rng = self._rng
        cuts = sorted(rng.randint(0, 40) for _ in range(rng.choice((1, 1, 2, 3))))
        made = []
        for start, end in zip([0, *cuts], [*cuts, None], strict=True):
            priority = rng.choice((0, 20, 50, 51, 80, 100))
            for_s = rng.choice((None, 0.0, 0.5, 1.0, 20.0)) if priority < 100 or rng.random() < 0.02 else 3.0
            if rng.random() < 0.7:
                made.append(commands.Retain(priority, for_s, start, end))
        if made and rng.random() < 0.03:
            made *= rng.choice((2, 70))
        return made

    def _items(self, kind: str, session: SessionModel, seq: int) -> object:
        """One item of a step for this sequence, now and then one that cannot be."""
        rng, sequence = self._rng, session.sequences.get(seq)
        length = len(sequence.tokens) if sequence else 3
        committed = sequence.committed if sequence else 0
        odd = rng.random() < 0.03
        match kind:
            case "free":
                return commands.Free(seq, rng.choice((0, committed, length, length + odd)))
            case "truncate":
                return commands.Truncate(seq, rng.choice((rng.randint(0, length), committed, length + odd)))
            case "commit":
                n = rng.choice((length, rng.randint(committed, max(committed, length))))
                return commands.Commit(seq, n if not odd else rng.choice((length + 1, max(0, committed - 1))))
            case "extend":
                words = self._pools[sequence.pool] if sequence else next(iter(self._pools.values()))
                more = words.pages(rng.choice((0, 0, 1, 2))) + words.tail()
                return commands.Extend(seq, self._packed(more), self._headroom())
            case "share":
                at = rng.choice((None, committed, rng.randint(0, committed), committed + odd))
                count = rng.choice((0, 1, 1, 1, 2))
                first = self._next_seq + 1 if rng.random() < 0.97 else seq
                self._next_seq += count
                return commands.Share(seq, at, count, first)
            case _:
                return seq

    def _one(self, kind: str) -> None:
        session, seq = self._some()
        if not session.sequences and self._rng.random() < 0.8:
            self._reserve()
            return
        self._ask(session.id, commands.Step(**{kind: [self._items(kind, session, seq)]}))  # type: ignore[arg-type]

    def _free(self) -> None:
        self._one("free")

    def _truncate(self) -> None:
        self._one("truncate")

    def _commit(self) -> None:
        self._one("commit")

    def _extend(self) -> None:
        self._one("extend")

    def _share(self) -> None:
        self._one("share")

    def _copied(self) -> None:
        self._one("copied")

    def _batch(self) -> None:
        """Several items of several kinds, also on one sequence."""
        session, _ = self._some()
        lists: dict[str, list[object]] = {}
        for _ in range(self._rng.randint(0, 6)):
            kind = self._rng.choice(("free", "truncate", "commit", "commit", "extend", "extend", "share", "copied"))
            lists.setdefault(kind, []).append(self._items(kind, session, self._seq(session)))
        self._ask(session.id, commands.Step(**lists))  # type: ignore[arg-type]

    def _handoff(self) -> None:
        session, seq = self._some()
        if session.sequences:
            ticket = self._rng.randbytes(16) if self._rng.random() < 0.97 or not self._tickets else self._tickets[-1]
            self._tickets = [*self._tickets[-10:], ticket]
            self._ask(session.id, commands.Handoff(seq, ticket, self._rng.choice((0.0, 1.0, 30.0))))
            if self._rng.random() < 0.3:
                self._adopt()

    def _adopt(self) -> None:
        session = self._session()
        if self._tickets:
            transit = list(self.pair.model.state.transit)
            ticket = self._rng.choice(transit if transit and self._rng.random() < 0.9 else self._tickets)
            self._ask(session.id, commands.Adopt(self._pool(), ticket, self._new_seq(session)))

    def _compact(self) -> None:
        session, seq = self._some()
        self._ask(session.id, commands.Compact(seq))

    def _invalidate(self) -> None:
        self._ask(self._session().id, commands.Invalidate(self._pool(), self._rng.choice(self._namespaces)))

    def _lookup(self) -> None:
        pool = self._pool()
        words = self._pools.get(pool) or next(iter(self._pools.values()))
        prompts = [self._packed(words.prompt()) for _ in range(self._rng.randint(0, 3))]
        who = self._session().id if self._rng.random() < 0.3 else 0
        self._ask(who, commands.Lookup(pool, self._rng.choice(NAMESPACES), prompts))

    def _stats(self) -> None:
        self._ask(0, commands.Stats())

    def _cancel(self) -> None:
        session = self._session()
        waiting = [w.request for q in self.pair.model.state.queue.values() for w in q if w.session == session.id]
        self._ask(session.id, commands.Cancel(self._rng.choice([*waiting, self._rng.randint(0, 50)])))

    def _heartbeat(self) -> None:
        self._ask(self._session().id, commands.Heartbeat())

    # -- requests that are wrong --------------------------------------------------------------------------------

    def _repeat(self) -> None:
        """The very same request again, from a second or an hour ago, perhaps after its deadline."""
        if self._sent:
            again = self._rng.choice(self._sent[-5:] if self._rng.random() < 0.7 else self._sent)
            deadline = self.pair.now - 1 if self._rng.random() < 0.2 else again.deadline
            self._do(commands.Request(again.session, again.epoch, again.id, deadline, again.body))

    def _late(self) -> None:
        """A request that comes after its deadline, or whose deadline comes while it waits."""
        session = self._session()
        deadline = self.pair.now + self._rng.choice((-1.0, 0.0, 0.5, 2.0))
        self._ask(session.id, self._reserve_body(session), deadline)

    def _stranger(self) -> None:
        """A session that is over or never was, or another epoch of one that is."""
        session = self._session()
        alive, now = session.id, session.epoch
        who, epoch = self._rng.choice(
            [(77, 1), (0, 0), (alive, now - 1), (alive, now + 1), (self._rng.choice([0, *self._ended]), 1)]
        )
        bodies: list[commands.Body] = [commands.Heartbeat(), commands.Bye(), commands.Stats()]
        body = self._rng.choice([*bodies, commands.Step([commands.Free(1)])])
        request = commands.Request(who, epoch, self._rng.randint(1, 9), FAR, body)
        if not (who == alive and epoch == now):
            self._do(request)

    # -- sessions and time --------------------------------------------------------------------------------------

    def _open(self) -> None:
        if len(self.pair.model.state.sessions) < 4 or self._rng.random() < 0.05:
            self.pair.open()

    def _bye(self) -> None:
        session = self._session()
        self._ended.append(session.id)
        self._ask(session.id, commands.Bye())

    def _end(self) -> None:
        """A process dies; now and then we hear of it twice."""
        session = self._session()
        self._ended.append(session.id)
        command = commands.EndSession(session.id, self._rng.random() < 0.7, "gone")
        self._do(command)
        if self._rng.random() < 0.2:
            self._do(command)

    def _gone(self) -> None:
        blamed = [who for pool in self.pair.model.state.pools.values() for who in pool.blamed.values()]
        self._do(commands.MappingGone(self._rng.choice([*blamed, 0, *self._ended])))

    def _time(self) -> None:
        self.last = commands.Tick(self.pair.running_s)
        self.pair.tick(self._rng.choice((0.0, 0.001, 0.5, 1.0, 3.0, 15.0, 25.0)))

    def _copy_done(self) -> None:
        self._do(commands.CopyDone(self._rng.randint(0, 9), self._rng.random() < 0.5))
