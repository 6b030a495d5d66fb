"""``sessions.Registry`` and its reply windows beside dicts that forget nothing."""

from __future__ import annotations

from fuzz.model.mismatch import expect, require
from fuzz.model.sessions import Opened, SessionsModel
from radixkv.errors import BadRequest, LimitExceeded, SessionLost
from radixkv.sessions.registry import Registry


class SessionsPair:
    def __init__(self, limit: int, keep: int, lease_s: float) -> None:
        self.real: Registry[object, str] = Registry(limit, keep, lease_s)
        self.model = SessionsModel(limit, keep, lease_s)
        self._next_answer = 0

    def open(self, who: int) -> None:
        try:
            session = self.real.open(who, b"token", "worker")
        except LimitExceeded:
            require("I19", not self.model.may_open(), "a session was refused though there is room")
            return
        require("I19", self.model.may_open(), "a session was opened over the limit")
        taken = {other.slot for other in self.model.open.values()}
        free_slot = session.slot not in taken and 0 <= session.slot < self.model.limit
        require("I14", free_slot, f"slot {session.slot} is in use or outside the table")
        self.model.open[who] = Opened(session.slot, self.model.running_s)

    def find(self, who: int, epoch: int) -> None:
        try:
            session = self.real.find(who, epoch)
        except SessionLost:
            require("I15", who not in self.model.open or epoch != 1, f"session {who} was not found")
            return
        require("I15", who in self.model.open and epoch == 1, f"session {who} was found though it is over")
        expect("I15", "identity", session.id, who)
        self.model.open[who].seen_s = self.model.running_s

    def end(self, who: int) -> None:
        ended = self.real.end(who)
        expect("I14", f"session {who} was there to end", ended is not None, who in self.model.open)
        self.model.open.pop(who, None)

    def ask(self, who: int, request: int) -> None:
        """A request comes in; a new one is answered at once."""
        window = self.real.find(who, 1).window
        self.model.open[who].seen_s = self.model.running_s
        try:
            got = window.admit(request) or "new"
        except BadRequest:
            got = "old"
        expect("I18", f"request {request} of session {who}", got, self.model.admit(who, request))
        if got == "new":
            self._next_answer += 1
            answer = f"answer {self._next_answer}"
            window.keep(request, answer)
            self.model.open[who].answers.append((request, answer))

    def pass_time(self, seconds: float) -> None:
        self.real.running_s += seconds
        self.model.running_s += seconds

    def check(self) -> None:
        expect("I14", "open sessions", sorted(s.id for s in self.real.all()), sorted(self.model.open))
        expect("I24", "number of sessions", len(self.real), len(self.model.open))
        for besides in [0, *self.model.open]:
            lapsed = self.real.lapsed(besides)
            expect("I14", "longest silent session", lapsed.id if lapsed else None, self.model.lapsed(besides))
        for session in self.real.all():
            kept = min(self.model.keep, len(self.model.open[session.id].answers))
            expect("I19", "answers kept", len(session.window), kept)
