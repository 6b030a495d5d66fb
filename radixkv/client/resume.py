"""After a daemon's death: the session goes on with the next one, its sequences with the page tables they have.

::

    daemon dies          attach connection ends: the session is *away*. Calls wait, ``valid()`` goes on answering.
    daemon comes         rejoin, with the session's token: the same session, a new epoch (``Core.rejoined``). From here
                         on the former daemon's answers are nothing to us, so what is known of a sequence stands still.
    Resume               claims of all sequences that the former daemon held for us: pages, generations, tokens.
    Resumed              each is kept, or lost if a page cannot be proven to be ours any more: ``SessionLost`` from it.
    Resume, last         what was not claimed goes back.
    resumed              calls go on: what was not answered is sent again (``asking.persist``, ``Outbox.recall``).

If the daemon dies in the middle, all of it begins anew with the next one: a claim says what is known here, and that has
changed only where a daemon confirmed or refused it.

What the former daemon executed and did not answer is not claimed, so it has not happened: reserve, extend and share
bring other pages when they are asked again; a commit that had been executed shows in the claim's result. Only where
pages were given up or passed on (truncate, compact, free, handoff) the claim cannot be proven: that sequence is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from radixkv.client.batch import Part, as_error
from radixkv.client.core import Core
from radixkv.client.effects import Ask
from radixkv.client.sequence import SequenceState
from radixkv.client.session import Session
from radixkv.commands import Body, Claim, Failure, Kept, Reply, Resume, Resumed
from radixkv.errors import LimitExceeded, RadixKVError, SessionLost, VersionMismatch
from radixkv.types import PAGE_ID_BYTES

CLAIMS_A_MESSAGE = 64
BYTES_A_MESSAGE = 1024 * 1024
"""Of claims, roughly; a larger one travels alone. Others are served between our messages."""
GENERATION_BYTES = 8


def resume(core: Core, session: Session, claimed: Iterable[SequenceState]) -> Iterator[Ask]:
    """After ``core.rejoined``: what to send, one Ask after the other. Then comes ``core.resumed``.

    Errors: SessionLost when the daemon takes no claims: the session is over.
    """
    groups = deque(_groups(claimed, session))
    while groups:
        claims = _Claims(groups.popleft())
        yield Ask(session, [claims], alone=True)
        groups.extendleft(claims.halves)
        _check(core, session, claims.error)
    rest = _Claims([], last=True)
    yield Ask(session, [rest], alone=True)
    _check(core, session, rest.error)


def _check(core: Core, session: Session, error: RadixKVError | None) -> None:
    if error is not None:
        core.ended(session)
        raise SessionLost(f"the session could not be resumed: {error}") from error


class _Claims(Part):
    """Some of the session's sequences. ``halves``: they were too many for one message."""

    def __init__(self, sequences: list[SequenceState], last: bool = False) -> None:
        self._sequences = sequences
        self._last = last
        self.halves: list[list[SequenceState]] = []
        self.error: RadixKVError | None = None

    def body(self) -> Body:
        return Resume([claim(seq) for seq in self._sequences], self._last)

    def settle(self, reply: Reply) -> None:
        if isinstance(reply, Resumed) and len(reply.results) == len(self._sequences):
            for seq, result in zip(self._sequences, reply.results, strict=True):
                if isinstance(result, Kept):
                    seq.kept(result)
                else:
                    seq.lose(f"the sequence did not outlive the daemon: {result.message}")
        elif isinstance(reply, Failure) and reply.code == LimitExceeded.code and self._sequences:
            self._too_large(reply)
        elif isinstance(reply, Failure):
            self.error = as_error(reply)
        else:
            self.error = VersionMismatch(f"the daemon answered {type(reply).__name__} to {len(self._sequences)} claims")

    def _too_large(self, reply: Failure) -> None:
        if len(self._sequences) == 1:
            self._sequences[0].lose(f"the sequence did not outlive the daemon: its claim is refused: {reply.message}")
            return
        middle = len(self._sequences) // 2
        self.halves = [self._sequences[middle:], self._sequences[:middle]]


def claim(seq: SequenceState) -> Claim:
    facts = seq.facts
    return Claim(
        pool=seq.pool.name,
        seq=seq.id,
        namespace=seq.namespace,
        tokens=seq.packed_tokens(),
        page_table=facts.page_table.tobytes(),
        generations=facts.generations.astype("<u8").tobytes(),
        committed=facts.committed,
        cached=min(facts.cached, facts.committed),
        copy_rows=seq.rows_to_claim(),
    )


def _groups(sequences: Iterable[SequenceState], session: Session) -> Iterator[list[SequenceState]]:
    """In the given order, so that the source of a fork's rows is claimed before the fork."""
    room = min(BYTES_A_MESSAGE, session.welcome.message_bytes // 2 or BYTES_A_MESSAGE)
    group: list[SequenceState] = []
    size = 0
    for seq in sequences:
        more = 4 * seq.length + (PAGE_ID_BYTES + GENERATION_BYTES) * len(seq.page_table) + len(seq.namespace) + 100
        if group and (size + more > room or len(group) == CLAIMS_A_MESSAGE):
            yield group
            group, size = [], 0
        group.append(seq)
        size += more
    if group:
        yield group
