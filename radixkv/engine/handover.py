"""A sequence goes from one session to another: no bytes move. In between it belongs to nobody and has a deadline."""

from __future__ import annotations

from radixkv.commands import Adopt, Adopted, CopyRow, Done, Handoff, Own, Reply
from radixkv.engine import holding
from radixkv.engine.plan import Worker
from radixkv.engine.pool import Pool
from radixkv.engine.sequence import Sequence
from radixkv.engine.state import State
from radixkv.errors import BadRequest, LimitExceeded, OutOfPages, StaleHandle


def handoff(state: State, session: Worker, body: Handoff, now: float) -> Reply:
    seq, pool = state.find(session, body.seq)
    if body.ticket in state.transit:
        raise BadRequest("this ticket is in use")
    limit = state.config.limits.sequences_per_session
    if len(state.transit) >= limit:
        raise LimitExceeded("too many sequences are in transit", in_transit=len(state.transit), limit=limit)
    if holding.counts_hold_of(pool, seq):
        raise BadRequest("rows are still to be copied from or to this sequence's private pages: say copied first")
    del session.sequences[body.seq]
    state.charge(session, pool, -seq.charged)
    seq.session = 0
    if pool.flights is not None:
        pool.flights.note(seq)
    _own(state, pool, seq)
    state.transit.put(body.ticket, seq, now + body.ttl_s)
    return Done()


def adopt(state: State, session: Worker, body: Adopt) -> Reply:
    pool = state.pool(body.pool)
    state.new_ids(session, body.seq, 1)
    seq = state.transit.peek(body.ticket)
    if seq is None or seq.pool != pool.name:
        raise StaleHandle("no sequence is in transit under this ticket in this pool")
    cap = pool.config.session_cap_pages
    charged = session.charged.get(pool.name, 0)
    if cap and charged + seq.charged > cap:
        raise OutOfPages(need=seq.charged, available=max(0, cap - charged), never_fits=seq.charged > cap)
    state.transit.take(body.ticket)
    seq.id, seq.session = body.seq, session.id
    if pool.flights is not None:
        pool.flights.note(seq)
    session.sequences[body.seq] = seq
    state.charge(session, pool, seq.charged)
    pool.gained = True  # a floor may lack fewer pages now
    _own(state, pool, seq)
    rows: list[CopyRow] = []
    if seq.source >= 0:
        rows.append((seq.source, seq.pages[seq.published], seq.committed % pool.page_size))
    writable = seq.published * pool.page_size
    name = pool.namespaces.of(seq.root).canonical
    return Adopted(bytes(seq.tokens), seq.pages.tobytes(), seq.committed, seq.cached, writable, rows, name)


def _own(state: State, pool: Pool, seq: Sequence) -> None:
    """The pages that are the sequence's own have a new owner in the table."""
    own = seq.pages[seq.published :]
    own.extend(seq.shadows)
    if own:
        state.writes.append(Own(pool.name, own.tobytes(), seq.session))
