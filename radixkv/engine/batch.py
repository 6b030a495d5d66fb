"""One message for a batch of sequences: copied, free, truncate, commit, extend, share, in this order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.structs import astuple

from radixkv.commands import (
    Commit,
    Extend,
    Failure,
    Free,
    Reply,
    Share,
    Shared,
    Step,
    Stepped,
    Truncate,
    Truncated,
    failure,
)
from radixkv.engine import commit, early, holding, life, plan
from radixkv.engine.plan import Worker
from radixkv.engine.pool import Pool
from radixkv.engine.sequence import Sequence
from radixkv.engine.state import State
from radixkv.errors import BadRequest, LimitExceeded, RadixKVError

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

NONE: list[Any] = []
"""The results of no items, in every reply that has none: replies are never changed."""


def step(state: State, session: Worker, body: Step) -> Reply:
    free, truncate, commits, extend, share, copied = astuple(body)
    items = len(free) + len(truncate) + len(commits) + len(extend) + len(share) + len(copied)
    if items > state.config.limits.batch_items:
        raise LimitExceeded("too many items in one step", items=items, limit=state.config.limits.batch_items)
    copies = _each(state, session, _copied, copied) if copied else NONE
    frees = _each(state, session, _free, free) if free else NONE
    cuts = _each(state, session, _truncate, truncate) if truncate else NONE
    return Stepped(
        frees,
        cuts,
        _commits(state, session, commits, _to_copy(truncate, cuts)) if commits else NONE,
        _each(state, session, _extend, extend) if extend else NONE,
        _each(state, session, _share, share) if share else NONE,
        copies,
    )


def _to_copy(truncates: list[Truncate], results: list[Truncated | Failure]) -> set[int]:
    """Sequences whose worker learns by this very message which rows he has to copy."""
    cut = zip(truncates, results, strict=True)
    return {item.seq for item, result in cut if isinstance(result, Truncated) and result.copy_rows}


def _commits(state: State, session: Worker, items: list[Commit], to_copy: set[int]) -> list[Failure | None]:
    """A commit says that rows have been copied, unless they were announced by a truncate of the same message."""

    def verb(state: State, session: Worker, item: Commit) -> None:
        (_check if item.seq in to_copy else _commit)(state, session, item)

    return _each(state, session, verb if to_copy else _commit, items)


def _each(state: State, session: Worker, verb: Callable[[State, Worker, I], R], items: list[I]) -> list[R | Failure]:
    """One result an item: each fails alone."""
    results: list[R | Failure] = []
    for item in items:
        try:
            results.append(verb(state, session, item))
        except RadixKVError as error:
            results.append(failure(error))
    return results


def _copied(state: State, session: Worker, identity: int) -> None:
    seq, pool = state.find(session, identity)
    holding.release_source(pool, seq)


def _free(state: State, session: Worker, item: Free) -> None:
    seq, pool = state.known(session, item.seq)
    try:
        if item.commit:
            _complete(session, pool, seq, item.commit)
    finally:  # a commit that is refused keeps nobody's pages
        del session.sequences[item.seq]
        state.charge(session, pool, seq.shared - len(seq.pages))
        life.close(pool, seq)


def _truncate(state: State, session: Worker, item: Truncate) -> Truncated:
    seq, pool = state.find(session, item.seq)
    planned = state.insist(session, plan.plan_truncate, pool, session, seq, item)
    before = seq.charged
    reply = commit.do_truncate(pool, seq, item, planned)
    state.charge(session, pool, seq.charged - before)
    pool.counters["truncates"] += 1
    return reply


def _commit(state: State, session: Worker, item: Commit) -> None:
    seq, pool = state.known(session, item.seq)
    _complete(session, pool, seq, item.n)


def _check(state: State, session: Worker, item: Commit) -> None:
    """What is left after a truncate is complete already: nothing can be added."""
    seq, _ = state.known(session, item.seq)
    plan.check_commit(seq, item.n)
    seq.committed = item.n


def _complete(session: Worker, pool: Pool, seq: Sequence, n: int) -> None:
    """The first ``n`` tokens are. Errors: BadRequest, CopyFailed."""
    if seq.load is not None or seq.lost:
        early.whole(seq)
    if pool.publishing:
        life.settle(pool, seq)
    if pool.config.ranks > len(session.ranks):
        raise BadRequest(
            "a commit speaks for all ranks, and not all have joined", ranks=pool.config.ranks, joined=len(session.ranks)
        )
    plan.check_commit(seq, n)
    commit.do_commit(pool, seq, n)


def _extend(state: State, session: Worker, item: Extend) -> bytes:
    seq, pool = state.known(session, item.seq)
    if seq.lost:
        early.whole(seq)
    new = plan.pages_to_add(pool, seq, item, state.config.limits)
    if new:
        state.insist(session, plan.plan_extend, pool, session, seq, new)
        state.charge(session, pool, new)
    return commit.do_extend(pool, seq, item.tokens, new)


def _share(state: State, session: Worker, item: Share) -> Shared:
    seq, pool = state.find(session, item.seq)
    limit = state.config.limits.batch_items
    if item.count > limit:
        raise LimitExceeded("too many forks at once", count=item.count, limit=limit)
    state.new_ids(session, item.first_child, item.count)
    planned = state.insist(session, plan.plan_share, pool, session, seq, item)
    children, reply = commit.do_share(pool, seq, item, planned)
    for child in children:
        child.since_s = state.sessions.running_s
        session.sequences[child.id] = child
        state.charge(session, pool, child.charged)
    pool.counters["forks"] += len(children)
    return reply
