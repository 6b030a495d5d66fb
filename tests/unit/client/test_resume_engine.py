"""The client's core beside the real engine on a real descriptor table, which dies at every possible place.

Two calls are in flight at a time; the engine has executed none, some or all of what was sent; replies come before the
end is noticed, in the middle of the resume, or never; it dies within the resume again. A second worker takes whatever
pages it can get and writes garbage into them. What a page holds is modelled, so that a wrong byte is seen.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fuzz.pairs.recovery import Tables
from radixkv import commands
from radixkv.allocator.page_states import State
from radixkv.client import verbs
from radixkv.client.batch import ShareItem, TruncateItem
from radixkv.client.core import Away, Core
from radixkv.client.effects import Ask, Linger, NeedQuiet, NeedSession, Synchronize
from radixkv.client.namespace import Namespace
from radixkv.client.pool import PoolState
from radixkv.client.resume import resume
from radixkv.client.sequence import SequenceState
from radixkv.client.session import Session
from radixkv.client.verbs import Want
from radixkv.config import Config, KVSpec, Limits, PoolConfig, ServerConfig
from radixkv.device.descriptors import TableReader
from radixkv.engine.engine import Engine
from radixkv.engine.invariants import check
from radixkv.engine.recover import recover
from radixkv.errors import OutOfPages, RadixKVError, SessionLost, StaleHandle, Unavailable

PAGES, PAGE = 24, 4
OTHER = 99
FAR = 1e12
KINDS = ("reserve", "extend", "commit") * 2 + ("truncate", "share", "free", "compact", "fenced")
SEEDS = 15
STEPS = 60


class Memory:
    """The table, and an arena in which each row holds one token."""

    def __init__(self, tables: Tables, spec: KVSpec) -> None:
        self._table = TableReader(os.dup(tables.writers["p"].fd))
        self.spec, self.pages, self.host_pages = spec, PAGES, 0
        self.rows = np.full((PAGES, PAGE), -1, np.int64)

    def generations(self, pages: Any) -> Any:
        return self._table.generations(pages)

    def knows(self, session: Session) -> bool:
        entry = self._table.session(session.welcome.slot)
        return entry.session == session.id and entry.epoch != 0

    def copy_rows(self, rows: Any) -> bool:
        for source, target, n in rows:
            self.rows[target, :n] = self.rows[source, :n]
        return True

    def close(self) -> None:
        self._table.close()


class Call:
    """A verb in flight: its messages have left, ``replies`` are what the daemon made of some of them."""

    def __init__(self, verb: Any, effect: Ask, outgoing: list[Any], done: Callable[[Any], None]) -> None:
        self.verb, self.effect, self.outgoing, self.done = verb, effect, outgoing, done
        self.replies: dict[int, commands.Reply] = {}


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        spec = KVSpec(layers=1, kv_heads=1, head_dim=1, page_size=PAGE)
        self.config = Config(ServerConfig(), Limits(sessions=4), (PoolConfig("p", spec, PAGES),))
        self.tables = Tables(self.config)
        self.engine = Engine(self.config, "boot", "cache")
        self.memory = Memory(self.tables, spec)
        self.core = Core(5.0, lambda: 100.0)
        self.pool = PoolState(self.core, "p")
        self.lives = True
        self.events: Counter[str] = Counter()
        self.live: list[SequenceState] = []
        self.late: list[tuple[int, commands.Reply]] = []
        self.calls: list[Call] = []
        self.promised: dict[SequenceState, int] = {}
        """Commits that may not have gone out yet."""
        self.others: dict[int, int] = {}
        self.other_ids = iter(range(1, 10**9))
        self.us = 0
        self.pool.current = self.memory
        self.hello()
        self.other_epoch = 1
        self.open(OTHER)

    def close(self) -> None:
        self.session.over = True
        self.memory.close()

    # -- the daemon ----------------------------------------------------------------------------------------------

    def do(self, command: commands.Command) -> commands.Outcome:
        outcome = self.engine.step(command, 100.0)
        for write in outcome.writes:
            self.tables.apply(write)
        check(self.engine)
        return outcome

    def open(self, session: int) -> int:
        outcome = self.do(commands.OpenSession(session, bytes([session]) * 16, ""))
        return next(write.slot for write in outcome.writes if isinstance(write, commands.SessionRecord))

    def hello(self) -> None:
        """A session, or another one."""
        self.us += 1
        slot = self.open(self.us)
        self.session = Session(self.welcome(slot, 1), {"p": self.memory})
        self.core.opened(self.session)
        self.enter()

    def bye(self) -> None:
        """What a refused claim named comes back when nobody can write to it any more."""
        self.begin(verbs._ask_anyone(commands.Bye()), lambda _: None)
        self.complete()
        self.core.ended(self.session)
        self.live.clear()
        self.promised.clear()

    def welcome(self, slot: int, epoch: int) -> commands.Welcome:
        token = bytes([self.us]) * 16
        return commands.Welcome(1, self.us, epoch, slot, token, "boot", "cache", ["p"], 5.0, 60.0, 0, True)

    def enter(self) -> None:
        self.epoch, self.lives = self.session.epoch, True
        self.session.daemon_lives = lambda: self.lives

    def die(self) -> None:
        """Killed; the next one has read the table when this returns, and the second worker has come back to it."""
        self.events["death"] += 1
        self.lives = False
        self.engine, writes = recover(
            self.config, ("next", "cache"), self.tables.found(self.tables.raw(), {self.us, OTHER})
        )
        for write in writes:
            self.tables.apply(write)
        check(self.engine)
        self.others.clear()
        self.do(commands.RejoinSession(OTHER, bytes([OTHER]) * 16))
        self.other_epoch += 1
        self.ask_other(commands.Resume([], True))

    def ask_other(self, body: commands.Body) -> Any:
        return self.do(commands.Request(OTHER, self.other_epoch, next(self.other_ids), FAR, body)).reply

    def take_pages(self) -> None:
        """The second worker reserves what there is, and scribbles over it; a few pages it gives back."""
        for seq in [seq for seq in self.others if self.rng.random() < 0.5]:
            self.ask_other(commands.Step(free=[commands.Free(seq)]))
            del self.others[seq]
        seq = next(self.other_ids)
        tokens = np.array([self.rng.randrange(2**31) for _ in range(self.rng.randrange(1, 20))], np.uint32).tobytes()
        reply = self.ask_other(commands.Reserve("p", seq, b"other", tokens))
        if isinstance(reply, commands.Reserved):
            self.memory.rows[np.frombuffer(reply.page_table, np.int32)] = -7
            self.others[seq] = len(tokens) // 4
            if self.rng.random() < 0.5:
                self.ask_other(commands.Step(commit=[commands.Commit(seq, len(tokens) // 4)]))

    # -- the client ----------------------------------------------------------------------------------------------

    def begin(self, verb: Any, done: Callable[[Any], None]) -> None:
        """Run a verb until its message has left; it stays in flight."""
        self._run(verb, lambda: next(verb), done)

    def _run(self, verb: Any, step: Callable[[], Any], done: Callable[[Any], None]) -> None:
        while True:
            try:
                effect = step()
            except StopIteration as end:
                done(end.value)
                return
            except (OutOfPages, SessionLost, StaleHandle) as error:
                self.events[type(error).__name__] += 1
                return
            match effect:
                case NeedSession():
                    if self.session.away:
                        self.resume()
                    step = lambda: verb.send(self.session)  # noqa: E731
                case Ask():
                    outgoing = self.core.envelop(effect, FAR, self.epoch)
                    self.calls.append(Call(verb, effect, outgoing, done))
                    return
                case Synchronize() | Linger():
                    step = lambda: verb.send(None)  # noqa: E731
                case NeedQuiet():
                    raise AssertionError("only one call a sequence at a time here")

    def execute(self, call: Call, count: int) -> None:
        """The daemon carries out up to so many of its messages."""
        for out in [out for out in call.outgoing if out.request.id not in call.replies][:count]:
            reply = self.do(out.request).reply
            assert reply is not None
            call.replies[out.request.id] = reply

    def deliver(self, call: Call) -> None:
        for request, reply in call.replies.items():
            self.core.receive(request, reply, self.session)

    def finish(self, call: Call) -> None:
        """The thread looks at what it has: all answers, or the end of the connection."""
        self.calls.remove(call)
        if all(out.reply is not None for out in call.outgoing):
            self._run(call.verb, lambda: call.verb.send(call.effect.answers()), call.done)
        else:
            self.core.left(self.session, self.epoch) if not self.lives else None
            self.core.abandon(call.outgoing, self.session, Unavailable("ended"))
            self._run(call.verb, lambda: call.verb.throw(Away("ended")), call.done)

    def complete(self) -> None:
        """All calls come to their end, with daemons that live."""
        while self.calls:
            call = self.calls[0]
            if self.lives and self.epoch == call.outgoing[0].request.epoch if call.outgoing else self.lives:
                self.execute(call, len(call.outgoing))
                self.deliver(call)
            self.finish(call)

    def resume(self) -> None:
        """Rejoin and claim, in which the daemon may die again; replies of earlier ones come whenever they like."""
        while True:
            self.core.left(self.session, self.epoch)
            slot = self.session.welcome.slot
            outcome = self.do(commands.RejoinSession(self.us, bytes([self.us]) * 16))
            (record,) = (write for write in outcome.writes if isinstance(write, commands.SessionRecord))
            if self.rng.random() < 0.15:
                self.die()  # the welcome never arrives
                continue
            claimed = self.core.rejoined(self.session, self.welcome(slot, record.epoch))
            self.enter()
            if self.claim(resume(self.core, self.session, claimed)):
                self.core.resumed(self.session, self.epoch)
                self.events["resume"] += 1
                return

    def claim(self, asks: Iterator[Ask]) -> bool:
        for ask in asks:
            (out,) = self.core.envelop(ask, FAR, self.epoch)
            self.say_something_late()
            if self.rng.random() < 0.1:
                self.die()  # before it, or with nobody hearing the answer
                self.core.abandon([out], self.session, Unavailable("ended"))
                return False
            reply = self.do(out.request).reply
            if self.rng.random() < 0.1:
                self.late.append((out.request.id, reply))
                self.die()
                self.core.left(self.session, self.epoch)
                self.core.abandon([out], self.session, Unavailable("ended"))
                return False
            self.core.receive(out.request.id, reply, self.session)
        return True

    def say_something_late(self) -> None:
        for call in self.calls:
            self.late += call.replies.items()
        before = {seq.id: (seq.facts[2:], seq.facts.page_table.tolist()) for seq in self.live}
        for request, reply in self.rng.sample(self.late, min(3, len(self.late))):
            self.core.receive(request, reply, self.session)
        assert before == {seq.id: (seq.facts[2:], seq.facts.page_table.tolist()) for seq in self.live}

    # -- what is tried -------------------------------------------------------------------------------------------

    def free_sequences(self) -> list[SequenceState]:
        busy = {item.seq for call in self.calls for out in call.outgoing if out.batch for item in out.batch.items}
        return [seq for seq in self.live if seq not in busy]

    def something(self) -> None:
        idle = self.free_sequences()
        kind = self.rng.choice(KINDS)
        if kind == "reserve" or not idle:
            want = Want(
                Namespace("m"), self.prompt(), self.rng.randrange(6), self.rng.choice(["copy", "drop"]), 0.0, True
            )
            self.begin(verbs.reserve(self.core, self.pool, want), self.made)
            return
        seq = self.rng.choice(idle)
        if kind == "truncate" and self.core.outbox.behind(seq):
            kind = "fenced"  # what is committed behind it would have to fit
        n = self.rng.randrange(max(seq.committed_tokens, self.promised.get(seq, 0)), seq.length + 1)
        if kind in ("commit", "fenced"):
            self.promised[seq] = n
        elif kind == "truncate":
            self.promised.pop(seq, None)
        match kind:
            case "extend":
                tokens = np.array([self.rng.randrange(3) for _ in range(self.rng.randrange(6))], np.uint32).tobytes()
                self.begin(verbs.extend(self.core, seq, tokens, self.rng.randrange(5)), lambda _: self.write(seq))
            case "commit":
                self.begin(verbs.commit(self.core, seq, n, None), lambda _: None)
            case "fenced":
                self.begin(verbs.commit(self.core, seq, n, _Done(self.rng.random() < 0.5)), lambda _: None)
            case "truncate":
                item = TruncateItem(seq, self.rng.randrange(seq.length + 1))
                self.begin(verbs.truncate(self.core, item, None), lambda _: None)
            case "share":
                at = self.rng.randrange(seq.committed_tokens + 1)
                self.begin(verbs.share(self.core, ShareItem(seq, at, self.rng.randrange(3))), self.forked)
            case "compact":
                self.begin(verbs.compact(self.core, seq), lambda _: None)
            case "free":
                self.live.remove(seq)
                self.begin(verbs.free(self.core, seq, None), lambda _: None)

    def prompt(self) -> bytes:
        return np.array([self.rng.randrange(2) for _ in range(self.rng.randrange(1, 18))], np.uint32).tobytes()

    def made(self, seq: SequenceState) -> None:
        self.live.append(seq)
        self.same(seq, seq.cached_tokens)
        self.write(seq)

    def forked(self, children: list[SequenceState]) -> None:
        for child in children:
            self.live.append(child)
            self.same(child, child.length)

    def write(self, seq: SequenceState) -> None:
        """Compute: every row that may be written holds its token afterwards."""
        for i in range(max(seq.writable_from_tokens, seq.committed_tokens), seq.length):
            self.memory.rows[seq.page_table[i // PAGE], i % PAGE] = seq.tokens[i]

    def same(self, seq: SequenceState, n: int) -> None:
        found = [int(self.memory.rows[seq.page_table[i // PAGE], i % PAGE]) for i in range(n)]
        assert found == seq.tokens[:n].tolist(), f"{seq!r} holds other tokens than it says"

    # -- what must hold ------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Nothing is in flight: client and daemon say the same of every sequence, and nothing else is held."""
        self.complete()
        while self.session.away or not self.lives:
            self.resume()
        self.begin(verbs.heartbeat(), lambda _: None)  # takes along what the outbox has
        self.complete()
        held = self.engine.sessions.find_quietly(self.us).sequences
        self.live = [seq for seq in self.live if not (seq.lost or seq.closed)]
        assert sorted(held) == sorted(seq.id for seq in self.live) == sorted(seq.id for seq in self.session.sequences)
        for seq in self.live:
            theirs = held[seq.id]
            assert seq.page_table.tolist() == theirs.pages.tolist()
            assert seq.packed_tokens() == bytes(theirs.tokens)
            assert (seq.committed_tokens, seq.facts.cached) == (theirs.committed, theirs.cached)
            assert seq.intact()
            self.same(seq, seq.committed_tokens)
        everybodys = [*held.values(), *self.engine.sessions.find_quietly(OTHER).sequences.values()]
        states = self.engine.pools["p"].pages.states
        kept = {page for theirs in everybodys for page in [*theirs.pages, theirs.source] if page >= 0}
        assert {page for page in range(PAGES) if states[page] == State.PRIVATE} <= kept
        quarantined = self.engine.snapshot()["pools"]["p"]["pages"]["quarantined"]
        assert quarantined == 0 or self.events["SessionLost"]
        if quarantined > PAGES // 4:
            self.bye()
            assert self.engine.snapshot()["pools"]["p"]["pages"]["quarantined"] == 0
            self.hello()
            self.events["bye"] += 1

    def step(self) -> None:
        self.something()
        if self.rng.random() < 0.4:
            self.something()
        for call in self.calls:
            if call.outgoing and self.epoch == call.outgoing[0].request.epoch:
                self.execute(call, self.rng.choice([0, 1, 9]))
                if self.rng.random() < 0.5:
                    self.deliver(call)
        if self.rng.random() < 0.4:
            self.die()
            if self.rng.random() < 0.5:
                self.take_pages()
            for call in self.calls:
                if self.rng.random() < 0.3:
                    self.deliver(call)  # a dead daemon's last words
        elif self.rng.random() < 0.5:
            self.take_pages()
        self.agree()


class _Done:
    def __init__(self, done: bool) -> None:
        self._done = done

    def query(self) -> bool:
        before, self._done = self._done, True
        return before

    def synchronize(self) -> None:
        self._done = True


def live_through(seed: int, steps: int) -> Counter[str]:
    world = World(seed)
    try:
        for _ in range(steps):
            world.step()
    except (AssertionError, RadixKVError) as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        world.close()
    return world.events


@pytest.mark.parametrize("seed", range(SEEDS))
def test_client_and_engine_agree_after_every_death(seed: int) -> None:
    assert live_through(seed, STEPS)["resume"] > 3


def test_a_seed_that_nobody_chose() -> None:
    live_through(random.randrange(2**32), STEPS)
