"""An engine without a model beside it, for what no model foretells: driven by ``Worker``s, recounted as it goes."""

from __future__ import annotations

from typing import Any

from fuzz.pairs.engine import FAR
from fuzz.pairs.worker import small_config
from radixkv import commands
from radixkv.engine.engine import Engine
from radixkv.engine.invariants import check


class Watched:
    """An engine, recounted after ``every`` steps; what is granted late is kept by session and request."""

    def __init__(self, pages: int = 32, every: int = 1, **settings: Any) -> None:
        self.every, self.steps = every, 0
        self.config = small_config(pages, **settings)
        self.engine = Engine(self.config, "boot", "cache")
        self.now = 100.0
        self.sessions = 0
        self.numbers: dict[int, int] = {}
        """Of each session the id of its latest request."""
        self.late: dict[tuple[int, int], commands.Reply] = {}
        self.copies: list[commands.Copy] = []
        """Begun and not ended."""

    def do(self, command: commands.Command) -> commands.Outcome:
        outcome = self.engine.step(command, self.now)
        self.late |= {(late.session, late.request): late.reply for late in outcome.granted}
        self.copies += outcome.effects
        self.steps += 1
        if self.steps % self.every == 0:
            check(self.engine)
        return outcome

    def open(self) -> int:
        self.sessions += 1
        self.do(commands.OpenSession(self.sessions, self.sessions.to_bytes(16, "little"), "worker"))
        return self.sessions

    def ask(self, session: int, body: commands.Body, deadline: float = FAR) -> commands.Reply | None:
        self.numbers[session] = self.numbers.get(session, 0) + 1
        return self.do(commands.Request(session, 1, self.numbers[session], deadline, body)).reply

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.do(commands.Tick(self.now - 100.0))

    def counter(self, name: str) -> int:
        return int(self.engine.snapshot()["counters"][name])

    def finish(self) -> None:
        """All copies end well."""
        while self.copies:
            self.do(commands.CopyDone(self.copies.pop(0).copy, True))
