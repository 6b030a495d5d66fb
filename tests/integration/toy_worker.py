"""A worker process that answers with the toy model from the daemon's pages, and recovers from what it loses.

Orders and reports go through a pipe::

    Order(kind, prompt, count, extra)   ->   ("cached", tokens) once its first pages are there
                                             ("page",) whenever a page of the answer is complete
                                             ("handed", ticket, tokens) at the end of "handoff"
                                             ("done", [(given, tokens), ...], Tally) at the end of all others

Each output is (what it was given, all tokens in the end), to be compared with ``toy.reference``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import radixkv
from tests.integration.toy import PagedRows, compute, next_token

NAMESPACE = radixkv.Namespace("toy")
TIMEOUT_S = 60.0
"""Longer than a daemon's death and its successor's start ever take: a call that ends with Unavailable is a failure."""
TICKET_S = 2.0
LOST = (radixkv.SessionLost, radixkv.StaleHandle)
KINDS = ("plain", "reject", "fork", "handoff")

Report = Callable[..., None]


@dataclass
class Tally:
    """resumed: sequences that were there when a daemon died and went on with another. lost: computed again."""

    resumed: int = 0
    lost: int = 0
    short: int = 0
    """Given up and begun again because pages were short."""


@dataclass
class Order:
    """extra: for "fork" the first token of the second branch, for "reject" that of the rejected ones, for "adopt" the
    ticket. stops: in the middle, by SIGSTOP; then it reads and writes without a word to the daemon first."""

    kind: str
    prompt: list[int]
    count: int
    extra: Any = 0
    stops: bool = False


class Answer:
    """Tokens, and pages in which their rows are. ``seq``: one that is there already."""

    def __init__(self, pool: Any, tokens: list[int], tally: Tally, seq: Any = None) -> None:
        self._pool = pool
        self.tokens = list(tokens)
        self._tally = tally
        self.seq = seq
        if seq is None:
            self._open()
        else:
            self._take_up()
        self.cached_tokens = self.seq.cached_tokens

    def decode(self, length: int, report: Report) -> None:
        """Go on until there are ``length`` tokens."""
        while len(self.tokens) < length:
            self.attempt(self._one_more)
            if len(self.tokens) % self._pool.page_size == 0:
                report("page")

    def attempt(self, act: Callable[[], Any]) -> Any:
        """Until it succeeds. What is lost is reserved again and computed as far as it is not cached."""
        while True:
            try:
                return act()
            except LOST:
                self._tally.lost += 1
                self._let_go()
            except radixkv.OutOfPages:
                self._tally.short += 1
                self.close()
            self._open()

    def close(self) -> None:
        if self.seq.session.epoch > self._epoch and self.seq.valid():
            self._tally.resumed += 1
        self._let_go()

    def publish(self) -> None:
        """All tokens are in the daemon, computed and committed, with room for a page more."""
        known = self.seq.length
        if known < len(self.tokens):
            self.seq.extend(self.tokens[known:], headroom_tokens=self._pool.page_size)
        self._compute()
        self.seq.commit(len(self.tokens))

    def reject(self, drafts: list[int]) -> None:
        """Append wrong tokens, compute them, take them back."""
        self.publish()
        n = len(self.tokens)
        self.seq.extend(drafts, headroom_tokens=1)
        compute(PagedRows(self.seq), self.tokens + drafts, n)
        self.seq.truncate(n)

    def fork(self, other: int) -> tuple[Answer, Answer]:
        """Two that go on from here, one of them with another token. This one is over."""
        self.publish()
        ours, theirs = self.seq.share(count=2)
        first = Answer(self._pool, self.tokens, self._tally, ours)
        second = Answer(self._pool, self.tokens, self._tally, theirs)
        second.tokens.append(other)
        self.close()
        return first, second

    def hand_off(self) -> bytes:
        self.publish()
        return bytes(self.seq.handoff(ttl=TICKET_S))

    def _let_go(self) -> None:
        with contextlib.suppress(*LOST):
            self.seq.free()

    def _open(self) -> None:
        self.seq = self._pool.reserve(
            self.tokens, namespace=NAMESPACE, headroom_tokens=self._pool.page_size, timeout=TIMEOUT_S
        )
        self._take_up()

    def _take_up(self) -> None:
        self._epoch = self.seq.session.epoch
        self._written = max(self.seq.cached_tokens, self.seq.committed_tokens)

    def _one_more(self) -> None:
        if len(self.tokens) >= self.seq.capacity_tokens:
            self.publish()
        self._compute()
        token = next_token(PagedRows(self.seq), len(self.tokens))
        if not self.seq.valid():  # asked after the rows were read, before the token is used
            raise radixkv.SessionLost("the pages are not ours any more")
        self.tokens.append(token)

    def _compute(self) -> None:
        compute(PagedRows(self.seq), self.tokens, self._written)
        self._written = len(self.tokens)


def carry_out(pool: Any, order: Order, report: Report) -> None:
    tally = Tally()
    answer = _begin(pool, order, tally)
    report("cached", answer.cached_tokens)
    goal = len(order.prompt) + order.count
    given = list(order.prompt)
    branches = [(given, answer, goal)]
    answer.decode(goal - order.count // 2, report)
    if order.stops:
        answer.attempt(answer.publish)
        answer.decode(len(answer.tokens) + 1, report)  # its row is yet to be written
        os.kill(os.getpid(), signal.SIGSTOP)
        answer.decode(len(answer.tokens) + 1, report)
    match order.kind:
        case "reject":
            answer.attempt(lambda: answer.reject([order.extra, order.extra + 1, order.extra + 2]))
        case "fork":
            first, second = answer.attempt(lambda: answer.fork(order.extra))
            branches = [(given, first, goal), (list(second.tokens), second, goal)]
        case "handoff":
            report("handed", answer.attempt(answer.hand_off), answer.tokens, dataclasses.asdict(tally))
            return
    outputs = []
    for known, branch, length in branches:
        branch.decode(length, report)
        branch.attempt(branch.publish)
        branch.close()
        outputs.append((known, branch.tokens))
    report("done", outputs, dataclasses.asdict(tally))


def _begin(pool: Any, order: Order, tally: Tally) -> Answer:
    if order.kind == "adopt":
        try:
            return Answer(pool, order.prompt, tally, pool.adopt(order.extra))
        except radixkv.StaleHandle:  # the daemon died, or its time was over
            tally.lost += 1
    return Answer(pool, order.prompt, tally)


def live(endpoint: str, pipe: Connection) -> None:
    """Until None or the end of orders comes."""
    with radixkv.connect(endpoint, timeout=TIMEOUT_S) as client:
        pool = client.pool()
        while True:
            try:
                order = pipe.recv()
            except EOFError:
                return
            if order is None:
                return
            carry_out(pool, order, lambda *what: pipe.send(what))
