"""The real engine with one worker's session, driven without a socket: what ``bench.index`` and ``bench.peers`` time.

Commands go in as the daemon's loop hands them over, replies come out; the descriptor writes that the engine asks for
are made as records and not stored (``bench.ipc`` measures a whole daemon, with them). What is timed gets its commands
made beforehand (``Core.admission``, ``Core.carry_out``), as the peers get their tokens in the type they like best.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench import workload
from radixkv.commands import Body, Commit, Free, OpenSession, Reply, Request, Reserve, Reserved, SessionRecord, Step
from radixkv.config import Config, KVSpec, Limits, PoolConfig
from radixkv.engine.engine import Engine
from radixkv.engine.pool import Pool
from radixkv.types import TOKEN_BYTES

POOL = "bench"
NAMESPACE = b"bench"
SPEC = KVSpec(layers=1, kv_heads=1, head_dim=64, dtype="float16", page_size=workload.PAGE_SIZE)
SESSION = 1
Admission = tuple[Request, ...]
"""One request's life as commands: reserve, commit, free; or the last two as one."""

NOW = 1.0
LATER = 1e9
LIMITS = Limits()


class Core:
    """An engine with one pool of ``pages`` pages and one open session."""

    def __init__(self, pages: int) -> None:
        config = Config(limits=LIMITS, pools=(PoolConfig(name=POOL, spec=SPEC, pages=pages),))
        self.engine = Engine(config, boot_id="bench", cache_id="bench")
        opened = self.engine.step(OpenSession(SESSION, bytes(16), "bench"), NOW)
        self.epoch = next(write.epoch for write in opened.writes if isinstance(write, SessionRecord))
        self._request = 0
        self._sequence = 0

    @property
    def pool(self) -> Pool:
        return self.engine.pools[POOL]

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def next_request(self) -> int:
        self._request += 1
        return self._request

    def ask(self, body: Body) -> Reply:
        """One command of the worker, to its end."""
        reply = self.engine.step(self.request(body), NOW).reply
        assert reply is not None
        return reply

    def reserve(self, seq: int, tokens: bytes) -> Reserved:
        reply = self.ask(Reserve(POOL, seq, NAMESPACE, tokens, 0, "keep"))
        if type(reply) is not Reserved:
            raise RuntimeError(f"a reserve of the workload should be granted, not answered {reply!r}")
        return reply

    def request(self, body: Body) -> Request:
        return Request(SESSION, self.epoch, self.next_request(), LATER, body)

    def admission(self, tokens: bytes) -> Admission:
        """One request's life as an engine sends it that ends a request: reserve; commit and free in one command.

        To be carried out in the order in which it was made.
        """
        seq = self.next_sequence()
        return (
            self.request(Reserve(POOL, seq, NAMESPACE, tokens, 0, "keep")),
            self.request(Step(free=[Free(seq, len(tokens) // TOKEN_BYTES)])),
        )

    def admission_in_three(self, tokens: bytes) -> Admission:
        """The same with a command for each verb."""
        seq = self.next_sequence()
        return (
            self.request(Reserve(POOL, seq, NAMESPACE, tokens, 0, "keep")),
            self.request(Step(commit=[Commit(seq, len(tokens) // TOKEN_BYTES)])),
            self.request(Step(free=[Free(seq)])),
        )

    def carry_out(self, commands: Admission) -> None:
        """What an admission costs. That it did what it should is for ``check`` to say, later."""
        step = self.engine.step
        for command in commands:
            step(command, NOW)

    def check(self, committed_before: int, pages: int) -> None:
        """Nothing was refused, nothing is held, and so many pages have been committed since."""
        committed = self.pool.counters["committed_pages"] - committed_before
        refused = self.engine.counters["refused_requests"]
        if (committed, refused, self.pool.sequences) != (pages, 0, 0):
            raise RuntimeError(
                f"{committed} pages committed, not {pages}; {refused} requests refused, "
                f"{self.pool.sequences} sequences left"
            )

    def admit(self, tokens: bytes) -> int:
        """One request's life: reserve, commit all, free. Returns the tokens that were cached."""
        seq = self.next_sequence()
        cached = self.reserve(seq, tokens).cached_tokens
        self.ask(Step(commit=[Commit(seq, len(tokens) // TOKEN_BYTES)]))
        self.ask(Step(free=[Free(seq)]))
        return cached

    def admit_all(self, sequences: Iterable[workload.Tokens]) -> None:
        for tokens in sequences:
            self.admit(tokens.tobytes())


def churning(work: workload.Churn) -> Core:
    """A core whose pool is full of the sequences of a churn."""
    core = Core(work.pool_pages)
    source = workload.stream(work)
    core.admit_all(next(source) for _ in range(work.fill))
    return core
