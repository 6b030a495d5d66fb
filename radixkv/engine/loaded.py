"""WaitLoaded: the worker waits until pages that it was given early are there, all of them or layer by layer.

It waits in a line of its own (``Pool.arriving``) and is looked at when a copy has got further or ended, and when a
sequence that was loading is over.
"""

from __future__ import annotations

from radixkv.commands import Loaded, Reply, Request, WaitLoaded, failure
from radixkv.engine import early, reserving
from radixkv.engine.plan import Worker
from radixkv.engine.pool import Pool
from radixkv.engine.sequence import Sequence
from radixkv.engine.state import State
from radixkv.engine.waiting import Waiting
from radixkv.errors import BadRequest, RadixKVError, Timeout


def wait_loaded(state: State, session: Worker, request: Request, body: WaitLoaded, now: float) -> Reply | None:
    """None: it waits. Errors: StaleHandle, BadRequest (no such layer), CopyFailed, LimitExceeded."""
    seq, pool = state.known(session, body.seq)
    reply = _there(pool, seq, body)
    if reply is None:
        until = request.deadline
        waiting = Waiting(session.id, request.id, body, now, until, until)
        reserving.wait(state, session, pool, pool.arriving, waiting)
    return reply


def _there(pool: Pool, seq: Sequence, body: WaitLoaded) -> Loaded | None:
    """None: not yet. Errors: BadRequest, CopyFailed."""
    layers = pool.config.spec.layers
    if body.layer is not None and body.layer >= layers:
        raise BadRequest("there is no such layer", layer=body.layer, layers=layers)
    if seq.lost:
        early.whole(seq)
    if seq.load is None:
        return Loaded(layers)
    if body.layer is not None and body.layer < seq.load.layers:
        return Loaded(seq.load.layers, early.range_of(seq))
    return None


def serve(state: State, now: float) -> None:
    """Answer those whose pages are there, never will be, or are not in time."""
    for name in state.tiers:
        pool = state.pools[name]
        if pool.arriving.news:
            pool.arriving.news = False
            for waiting in pool.arriving.all():
                _serve_one(state, pool, waiting)
        for waiting in pool.arriving.overdue(now):
            reserving.answer_waiting(state, pool, waiting, failure(Timeout("not loaded in time")))


def _serve_one(state: State, pool: Pool, waiting: Waiting) -> None:
    body = waiting.body
    assert type(body) is WaitLoaded
    reply: Reply | None
    try:
        seq, _ = state.known(state.sessions.find_quietly(waiting.session), body.seq)
        reply = _there(pool, seq, body)
    except RadixKVError as error:
        reply = failure(error)
    if reply is not None:
        reserving.answer_waiting(state, pool, waiting, reply)
