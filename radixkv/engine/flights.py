"""Prompts that are being computed right now, and the requests that wait for that instead of computing the same.

A flight is a running sequence whose next page is not complete and whose tokens are known. It is found by the end of its
path in the tree and that page's tokens: where a match ends and its prompt goes on in the same way, somebody is
computing what comes next. (Single flight: one computes, all others wait for him; the name is that of Go's package.)

Whoever waits is woken whenever the sequence he waits for publishes, changes its shape or is over, looks again, and goes
on as usual if nobody computes for him any longer. He holds nothing. But the worker who asks may be computing something
else, which he would not finish while he waits: so nobody waits for a session that waits, itself or through others, for
his own (``would_be_waited_for``), and of any number of sessions that wait for one another there is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import islice

from radixkv.engine.sequence import Sequence
from radixkv.tree.node import Node
from radixkv.tree.walk import Match

Start = tuple[Node, bytes]
"""The end of a path, and the tokens of the page behind it."""
Key = tuple[int, int]
"""Session and request id of one who waits."""

LOOKED_AT = 16
"""Of sequences that compute the same page."""


class Flights:
    def __init__(self, page_token_bytes: int, running: Iterable[Sequence]) -> None:
        self._size = page_token_bytes
        self.starts: dict[Sequence, Start] = {}
        self._by_start: dict[Start, dict[Sequence, None]] = {}
        self.waits_for: dict[Key, Sequence] = {}
        self._waiters: dict[Sequence, dict[Key, None]] = {}
        self.woken: dict[Key, None] = {}
        for seq in running:
            self.note(seq)

    def start_of(self, seq: Sequence) -> Start | None:
        """None: it computes no page that it could publish, or does not know all of its tokens yet."""
        begin = seq.published * self._size
        full = len(seq.tokens) >= begin + self._size
        if not full or seq.depth != seq.published:
            return None
        return seq.node, bytes(seq.tokens[begin : begin + self._size])

    def note(self, seq: Sequence) -> None:
        """The sequence is new, or has changed."""
        start = self.start_of(seq)
        if start != self.starts.get(seq):
            self._forget(seq)
            if start is not None:
                self.starts[seq] = start
                self._by_start.setdefault(start, {})[seq] = None
        self._wake(seq)

    def over(self, seq: Sequence) -> None:
        """The sequence is."""
        self._forget(seq)
        self._wake(seq)

    def wake_all(self) -> None:
        for seq in list(self._waiters):
            self._wake(seq)

    def find(self, match: Match, tokens: bytes, asking: int) -> Sequence | None:
        """Who, of other sessions than the asking one, computes what comes behind a match."""
        begin = match.pages * self._size
        if match.inside is not None or len(tokens) < begin + self._size:
            return None
        there = self._by_start.get((match.node, tokens[begin : begin + self._size]), {})
        return next((seq for seq in islice(there, LOOKED_AT) if seq.session not in (0, asking)), None)

    # -- who waits ------------------------------------------------------------------------------------------------

    def wait(self, key: Key, seq: Sequence) -> None:
        self.waits_for[key] = seq
        self._waiters.setdefault(seq, {})[key] = None

    def leave(self, key: Key) -> None:
        """Waits no longer; nothing to do for one who did not."""
        self.woken.pop(key, None)
        seq = self.waits_for.pop(key, None)
        if seq is not None:
            waiters = self._waiters[seq]
            del waiters[key]
            if not waiters:
                del self._waiters[seq]

    def _wake(self, seq: Sequence) -> None:
        for key in self._waiters.pop(seq, ()):
            del self.waits_for[key]
            self.woken[key] = None

    def _forget(self, seq: Sequence) -> None:
        start = self.starts.pop(seq, None)
        if start is not None:
            there = self._by_start[start]
            del there[seq]
            if not there:
                del self._by_start[start]


def would_be_waited_for(asking: int, writer: int, flights: Iterable[Flights]) -> bool:
    """Does session ``writer`` wait for session ``asking``, itself or through others?"""
    waits: dict[int, set[int]] = defaultdict(set)
    for each in flights:
        for (session, _), seq in each.waits_for.items():
            waits[session].add(seq.session)
    seen, ahead = set(), [writer]
    while ahead:
        session = ahead.pop()
        if session == asking:
            return True
        if session not in seen:
            seen.add(session)
            ahead += waits[session]
    return False
