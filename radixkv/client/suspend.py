"""Preemption: a running sequence gives up its pages and comes back later, with a new page table.

What it has committed in full pages stays cached, on the device while there is room and in the host tier as it grows
cold. The rows of the page that it has begun are nobody's but this worker's: they wait in the worker's own memory.
Coming back is a reserve of all its tokens; if all full pages are still there, the rows go into the new page, and all is
complete that was. If not, ``committed_tokens`` says from where the engine has to compute again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from radixkv.client import asking, verbs
from radixkv.client.batch import FreeItem
from radixkv.client.core import Core
from radixkv.client.effects import Synchronize, Verb
from radixkv.client.namespace import Canonical
from radixkv.client.outbox import Event
from radixkv.client.sequence import SequenceState
from radixkv.errors import BadRequest, SessionLost, Timeout, Unavailable


class Suspension(NamedTuple):
    """``rows``: the page begun, in whatever form the memory takes it back; None if there is none, or no way to it."""

    committed_tokens: int
    headroom_tokens: int
    rows: Any


def suspend(core: Core, seq: SequenceState, after: Event | None) -> Verb[None]:
    """Waits for the event, and for what the sequence has on its way. Errors: StaleHandle, SessionLost, Unavailable."""
    session = yield from asking.whole(core, seq)
    if after is not None and not asking.done(after):
        yield Synchronize(after)
    yield from asking.drain(core, session, seq)
    committed, size = seq.committed_tokens, seq.memory.spec.page_size
    begun = committed // size
    rows = None
    if committed % size and not seq.copy_rows:
        rows = seq.memory.take_page(int(seq.page_table[begun]))
        if not seq.intact():  # looked at after the rows were read
            rows = None
    seq.suspended = Suspension(committed, seq.capacity_tokens - seq.length, rows)
    seq.closed = True
    with suppress(Unavailable, SessionLost, Timeout):  # then the pages go with the session, or by the outbox
        yield from asking.deliver(session, [FreeItem(seq)])


def resume(core: Core, seq: SequenceState, wait_s: float) -> Verb[None]:
    """Errors: BadRequest (it is not suspended); those of reserve, after which it still is."""
    if seq.suspended is None:
        raise BadRequest("only a suspended sequence is resumed", seq=seq.id)
    committed, headroom, rows = seq.suspended
    want = verbs.Want(Canonical(seq.namespace), seq.packed_tokens(), headroom, "keep", wait_s, copy=True)
    again = yield from verbs.reserve(core, seq.pool, want)
    size = again.memory.spec.page_size
    whole = again.writable_from_tokens >= committed // size * size
    try:
        if committed > again.committed_tokens and whole and (rows is not None or committed % size == 0):
            if rows is not None:
                again.memory.put_page(int(again.page_table[committed // size]), rows)
            yield from verbs.commit(core, again, committed, None)
    except BaseException:
        core.outbox.drop(again.session, again.id)
        again.given_up()
        raise
    seq.go_on_as(again)
