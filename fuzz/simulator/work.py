"""What workers do with their sequences: prompts come, are computed, committed, continued, forked, passed on, freed.

Each method of ``Work`` is one thing a thread may do next: a script over the client's own verbs, always legal. ``judge``
says which errors may come of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from fuzz.model.mismatch import Mismatch
from fuzz.simulator.client import Client
from fuzz.simulator.device import Job
from fuzz.simulator.sequence import Pool, Sequence
from fuzz.simulator.shell import Thread
from fuzz.simulator.stage import Stage
from radixkv import errors
from radixkv.client import asking, verbs
from radixkv.client import step as steps
from radixkv.client.batch import ShareItem, TruncateItem
from radixkv.client.effects import Verb
from radixkv.client.namespace import Namespace
from radixkv.client.tokens import pack
from radixkv.device.descriptors import PRIVATE

NAMESPACES = [Namespace("a"), Namespace("b", salt="x"), Namespace("c", lora="y")]
MOST_SEQUENCES = 8
ALWAYS = (errors.Timeout, errors.Unavailable, errors.SessionLost, errors.CopyFailed)
"""What any verb may end with while the network, daemons and copies fail."""
ALSO: dict[str, tuple[type[errors.RadixKVError], ...]] = {
    "reserve": (errors.OutOfPages, errors.LimitExceeded, errors.Draining),
    "extend": (errors.OutOfPages, errors.LimitExceeded),
    "truncate": (errors.OutOfPages,),
    "share": (errors.OutOfPages,),
    "step": (errors.OutOfPages, errors.LimitExceeded),
    "flush": (errors.OutOfPages,),
    "handoff": (errors.BadRequest, errors.OutOfPages),
    "adopt": (errors.OutOfPages, errors.StaleHandle, errors.LimitExceeded),
    "commit": (errors.OutOfPages,),
    "copied": (errors.OutOfPages,),
    "free": (errors.OutOfPages,),
    "compact": (errors.OutOfPages,),
    "lookup": (errors.LimitExceeded,),
}
"""And what may come of it although all is well. An earlier fenced truncate's OutOfPages comes with the next verb."""
ODDS = {
    "reserve": 6.0, "compute": 8.0, "read": 3.0, "commit": 6.0, "extend": 3.0, "truncate": 1.0, "share": 1.5,
    "copied": 0.5, "free": 2.0, "forget": 0.3, "handoff": 0.7, "adopt": 1.5, "compact": 0.5, "step": 1.0,
    "lookup": 0.1, "invalidate": 0.02, "stats": 0.02, "flush": 0.1,
}  # fmt: skip
WITHOUT_SEQUENCE = ("reserve", "adopt", "lookup", "invalidate", "stats", "flush", "step")
GIVES_UP = ("truncate", "compact", "handoff", "step")
TRIES = 3


Script = bool | tuple[Verb[Any], list["Sequence"]]
"""What to carry out and the sequences it is about; or whether something has been done at once."""


@dataclass
class Board:
    """Tickets that one worker tells another of, on ways that are none of radixkv's business."""

    tickets: list[tuple[str, bytes]] = field(default_factory=list)


class Work:
    """One worker's doings. ``pick``: draws the name of the next one."""

    def __init__(self, stage: Stage, client: Client, board: Board, pick: Callable[[], str]) -> None:
        self._stage = stage
        self._rng: random.Random = stage.rng
        self._client = client
        self._core = client.core
        self._board = board
        self._pick = pick

    def begin(self, thread: Thread) -> bool:
        """Let an idle thread do something. False: it found nothing to do."""
        return any(self._begin(thread, self._pick()) for _ in range(TRIES))

    def _begin(self, thread: Thread, name: str) -> bool:
        seq = None if name in WITHOUT_SEQUENCE else self._some()
        if seq is None and name not in WITHOUT_SEQUENCE:
            return False
        made: Script = getattr(self, f"_{name}")(*([] if seq is None else [seq]))
        if isinstance(made, bool):
            return made
        verb, involved = made
        for one in involved:
            one.busy = True
        self._stage.tell(name, f"{thread.name} {', '.join(f'seq {one.id}' for one in involved)}")
        doubt = any(one.unsettled or self._core.outbox.truncates(one) for one in involved)
        with patch("radixkv.client.verbs.os.urandom", self._rng.randbytes) if name == "handoff" else nullcontext():
            thread.begin(verb, lambda error: self._done(name, involved, error, doubt))
        return True

    def _done(self, name: str, involved: list[Sequence], error: errors.RadixKVError | None, doubt: bool) -> None:
        """``doubt``: when it began, a truncate was on its way, or some change had no answer in time."""
        for one in involved:
            one.busy = False
            one.doubtful = one.doubtful or (name in GIVES_UP and isinstance(error, errors.Unavailable))
        if error is not None and not (doubt and isinstance(error, errors.BadRequest | errors.StaleHandle)):
            self._judge(name, involved, error)
        for one in involved:
            if not one.closed:
                one.check()
        self.tidy()

    def tidy(self) -> None:
        """Let go of what is over: freed, handed off, or lost with its session."""
        for pool in self._client.pools:
            for seq in [
                seq for seq in pool.sequences if seq.closed or (not seq.busy and (seq.lost or seq.session.over))
            ]:
                if not seq.closed:
                    seq.check()
                pool.sequences.remove(seq)

    def _judge(self, name: str, involved: list[Sequence], error: errors.RadixKVError) -> None:
        self._stage.note(f"gets {error.code}", f"{self._client.name} {name}: {error}")
        if isinstance(error, (*ALWAYS, *ALSO.get(name, ()))):
            return
        if any(one.closed or one.broken is not None or one.session.over for one in involved):
            return
        raise Mismatch("I28", f"{name} of {[one.id for one in involved]} got {type(error).__name__}: {error}")

    # -- drawing --------------------------------------------------------------------------------------------------

    def _pool(self) -> Pool:
        return self._rng.choice(self._client.pools)

    def _all(self) -> list[Sequence]:
        return [seq for pool in self._client.pools for seq in pool.sequences if not (seq.busy or seq.closed)]

    def _some(self) -> Sequence | None:
        found = self._all()
        return self._rng.choice(found) if found else None

    def _words(self, pages: int, size: int) -> list[int]:
        """Whole pages of few different kinds, so that prompts meet."""
        habits = self._stage.habits
        return [token for _ in range(pages) for token in [self._rng.randrange(habits.alphabet)] * size]

    def _tail(self, size: int) -> list[int]:
        return [self._rng.randrange(2) for _ in range(self._rng.randrange(size))]

    # -- scripts --------------------------------------------------------------------------------------------------

    def _reserve(self) -> Script:
        pool, rng = self._pool(), self._rng
        if len(pool.sequences) >= MOST_SEQUENCES or pool.current is None:
            return False
        size = pool.page_size
        tokens = self._words(rng.randint(0, self._stage.habits.longest), size) + self._tail(size)
        want = verbs.Want(
            namespace=rng.choice(NAMESPACES[: self._stage.habits.namespaces]),
            tokens=pack(tokens),
            headroom=rng.choice((0, 0, 1, size, 2 * size)),
            last_page=rng.choice(("copy", "copy", "keep", "drop")),
            wait_s=rng.choice((0.0, 0.0, 1.0, 10.0)),
            copy=rng.random() < 0.7,
            early=bool(pool.memory.host_pages) and rng.random() < 0.6,
        )
        return self._prefill(pool, want), []

    def _prefill(self, pool: Pool, want: verbs.Want) -> Verb[None]:
        """Mostly what is not cached is computed and committed at once."""
        seq = yield from verbs.reserve(self._core, pool, want)
        assert isinstance(seq, Sequence)
        try:
            if seq.loading:
                self._stage.note("early", f"sequence {seq.id} of {self._client.name}, {seq.loading} are loading")
                yield from self._read_by_layer(seq)
            if self._rng.random() < 0.7:
                self._compute(seq)
                if seq.job is not None and self._rng.random() < 0.7:
                    seq.asked = seq.length
                    yield from verbs.commit(self._core, seq, seq.length, seq.job)
        finally:
            seq.busy = False

    def _read_by_layer(self, seq: Sequence) -> Verb[None]:
        """Some layers, or none: then a commit waits for all."""
        for layer in range(seq.memory.spec.layers):
            if self._rng.random() < 0.6:
                yield from asking.wait_loaded(self._core, seq, layer, self._rng.choice((None, None, 2.0)))
                seq.check()
        if self._rng.random() < 0.3:
            yield from asking.wait_loaded(self._core, seq, None, None)
            seq.check()

    def _compute(self, seq: Sequence) -> Script:
        """Begin to write all rows that are missing. Nothing travels."""
        start = max(seq.written, seq.writable_from_tokens)
        if seq.job or seq.broken or seq.unsettled or seq.doubtful or self._core.outbox.truncates(seq):
            return False  # what is cut off, or may have been, is not ours to write to
        seq.copy_now()
        rows, size = [], seq.memory.spec.page_size
        paths = seq.expected(seq.length)
        for at in range(start, seq.length):
            page = int(seq.page_table[at // size])
            rows.append((page, at % size, paths[at]))
            if seq.intact() and seq.memory.state(page) != PRIVATE and not self._core.outbox.behind(seq):
                raise Mismatch("I13", f"token {at} of sequence {seq.id} belongs into page {page}, which is shared")
        if not rows:
            seq.written = max(seq.written, seq.length)
            return False
        who = f"sequence {seq.id} of {self._client.name}"
        seq.job = Job(seq.memory.arena, rows, seq.length, who, seq)
        self._client.jobs.append(seq.job)
        return True

    def _read(self, seq: Sequence) -> Script:
        seq.check()
        return True

    def _commit(self, seq: Sequence) -> Script:
        """What is complete, or behind a fence what will be."""
        if seq.unsettled or seq.doubtful:
            return False  # perhaps it has been truncated
        seq.copy_now()
        job, least = seq.job, max(seq.asked, seq.committed_tokens)
        most = job.until if job else seq.written
        if most < least + (self._rng.random() < 0.8) or self._core.outbox.truncates(seq):
            return False
        seq.asked = self._rng.choice((most, self._rng.randint(least, most)))
        return verbs.commit(self._core, seq, seq.asked, job if seq.asked > seq.written else None), [seq]

    def _extend(self, seq: Sequence) -> Script:
        size = seq.memory.spec.page_size
        tokens = self._words(self._rng.choice((0, 0, 1)), size) + self._tail(size)
        if seq.length + len(tokens) > (self._stage.habits.longest + 2) * size:
            tokens = []
        headroom = self._rng.choice((0, 0, 1, size))
        return verbs.extend(self._core, seq, pack(tokens), headroom), [seq]

    def _truncate(self, seq: Sequence) -> Script:
        """Nobody may write any more to what is cut off: with a job running, behind its fence."""
        if self._core.outbox.truncates(seq):
            return False
        seq.copy_now()
        n = self._rng.choice((self._rng.randint(0, seq.length), seq.committed_tokens, seq.written))
        item = TruncateItem(seq, min(n, seq.length), self._rng.random() < 0.7)
        return verbs.truncate(self._core, item, seq.job), [seq]

    def _share(self, seq: Sequence) -> Script:
        if self._core.outbox.truncates(seq):
            return False
        at = self._rng.choice((None, self._rng.randint(0, seq.committed_tokens)))
        if len(seq.pool.sequences) + 2 > MOST_SEQUENCES:  # type: ignore[attr-defined]
            return False
        seq.copy_now()
        item = ShareItem(seq, at, self._rng.choice((1, 1, 2)), self._rng.random() < 0.7)

        def script() -> Verb[None]:
            for child in (yield from verbs.share(self._core, item)):
                child.busy = False  # type: ignore[attr-defined]

        return script(), [seq]

    def _copied(self, seq: Sequence) -> Script:
        if self._core.outbox.truncates(seq):
            return False  # whose rows nobody knows yet
        seq.copy_now()
        return verbs.copied(self._core, seq, None), [seq]

    def _free(self, seq: Sequence) -> Script:
        return verbs.free(self._core, seq, seq.job), [seq]

    def _forget(self, seq: Sequence) -> Script:
        """As if Python had collected it: freed with the next message. Only what no device writes to."""
        if seq.job is not None or self._core.outbox.behind(seq):
            return False
        seq.closed = True
        self._core.outbox.drop(seq.session, seq.id)
        self.tidy()
        return True

    def _compact(self, seq: Sequence) -> Script:
        return (verbs.compact(self._core, seq), [seq]) if seq.job is None else False

    def _handoff(self, seq: Sequence) -> Script:
        """With its pages goes what is committed; what is written beyond, the adopter computes again."""
        if self._core.outbox.truncates(seq):
            return False
        name, ttl = seq.pool.name, self._rng.choice((1.0, 10.0, 30.0))
        fence = seq.job
        seq.copy_now()

        def script() -> Verb[None]:
            ticket = yield from verbs.handoff(self._core, seq, ttl, fence)
            self._board.tickets.append((name, ticket))

        return script(), [seq]

    def _adopt(self) -> Script:
        if not self._board.tickets:
            return False
        name, ticket = self._board.tickets.pop(self._rng.randrange(len(self._board.tickets)))
        if self._rng.random() < 0.1:
            self._board.tickets.append((name, ticket))  # somebody else may try, too
        pool = next(pool for pool in self._client.pools if pool.name == name)
        if pool.current is None:
            return False
        copy = self._rng.random() < 0.7

        def script() -> Verb[None]:
            seq = yield from verbs.adopt(self._core, pool, ticket, copy)
            seq.busy = False  # type: ignore[attr-defined]

        return script(), []

    def _step(self) -> Script:
        """A batch over some sequences."""
        seqs = self._rng.sample(self._all(), min(len(self._all()), self._rng.randint(1, 4)))
        seqs = [seq for seq in seqs if not (seq.rows_to_copy() or seq.unsettled or seq.doubtful)]
        if not seqs:
            return False
        freed = [seq for seq in seqs if self._rng.random() < 0.2]
        steady = [seq for seq in seqs if not self._core.outbox.truncates(seq)]
        cut = [seq for seq in steady if self._rng.random() < 0.1 and seq not in freed]
        commit: dict[Sequence, Any] = {}
        for seq in steady:
            if seq not in cut and seq.written >= max(seq.asked, seq.committed_tokens):
                seq.asked = seq.job.until if seq.job else seq.written
                commit[seq] = (seq.asked, seq.job) if seq.job else seq.asked
        grown = [seq for seq in seqs if self._rng.random() < 0.3 and seq not in freed]
        plan = steps.Plan(
            free=[(seq, seq.job) for seq in freed],
            truncate={seq: (self._rng.randint(0, seq.length), seq.job) for seq in cut},
            commit=commit,
            extend={seq: (pack(self._tail(seq.memory.spec.page_size)), 1) for seq in grown},
        )
        return self._checked(plan), seqs

    def _checked(self, plan: steps.Plan) -> Verb[None]:
        result = yield from steps.step(self._core, plan)
        for error in result.errors:
            self._judge("step", plan.sequences(), error)  # type: ignore[arg-type]

    def _lookup(self) -> Script:
        pool = self._pool()
        if pool.current is None:
            return False
        prompts = [pack(self._words(self._rng.randint(0, 4), pool.page_size)) for _ in range(self._rng.randint(1, 3))]
        return verbs.lookup(pool, self._rng.choice(NAMESPACES[: self._stage.habits.namespaces]), prompts), []

    def _invalidate(self) -> Script:
        return verbs.invalidate(self._pool(), self._rng.choice(NAMESPACES[: self._stage.habits.namespaces])), []

    def _stats(self) -> Script:
        return verbs.stats(), []

    def _flush(self) -> Script:
        return verbs.flush(self._core, self._pool(), 5.0), []
