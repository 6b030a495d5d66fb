"""What must hold whenever a daemon lives, and what must be left when everything has ended.

The engine's own invariants by recount; the descriptor table says what the engine says; every page that could be served
holds what its tokens say; in the end nobody holds anything.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from fuzz.model.mismatch import Mismatch, expect, require
from fuzz.simulator.contents import Arena, Scope
from fuzz.simulator.sequence import Sequence
from fuzz.simulator.stage import Stage
from radixkv.allocator.page_states import State
from radixkv.device.descriptors import CACHED, TableReader, check_of
from radixkv.engine import invariants
from radixkv.engine.engine import Engine
from radixkv.engine.host import HostTier
from radixkv.engine.pool import IN_TREE, Pool
from radixkv.tree.node import Node


def check(stage: Stage, engine: Engine) -> None:
    invariants.check(engine)
    for pool in engine.pools.values():
        reader = stage.store.readers[pool.name]
        _same_states(pool, reader)
        _same_owners(engine, pool, reader)
        _servable(stage, pool, reader)
    _same_sessions(stage, engine)


def _same_states(pool: Pool, reader: TableReader) -> None:
    """Pages that wait for a claim are still in the table what they were."""
    records = reader.records
    states = records["state"]
    known = _device_states(pool)
    if pool.lineage is not None:
        waiting = [page for pages in pool.lineage.unclaimed.values() for page in pages]
        require("I2", bool((known[waiting] == State.QUARANTINED).all()), f"of {waiting} some wait for no claim")
        known[waiting] = pool.lineage.origins[waiting]
    if pool.host is not None:
        known = np.concatenate([known, _host_states(pool.host)])
    differ = np.nonzero(states != known)[0]
    if len(differ):
        page = int(differ[0])
        raise Mismatch("I1", f"page {page} is {State(int(known[page])).name}, in the table {int(states[page])}")
    unsound = np.nonzero((records["check"] != check_of(records)) & (states == CACHED))[0]
    require("I5", not len(unsound), f"cached pages {unsound.tolist()} have wrong checks")


def _device_states(pool: Pool) -> NDArray[np.uint8]:
    """What the next daemon has to find: a copy ends with the daemon that has begun it."""
    states = np.frombuffer(bytes(pool.pages.states), np.uint8).copy()
    states[states == State.SAVING] = State.CACHED
    states[states == State.LOADING] = State.PRIVATE
    return states


def _host_states(host: HostTier) -> NDArray[np.uint8]:
    """The same: what is complete, and what is of no worth."""
    states = np.frombuffer(bytes(host.pages.states), np.uint8)
    return np.where(np.isin(states, IN_TREE), np.uint8(State.CACHED), np.uint8(State.FREE))


def _same_owners(engine: Engine, pool: Pool, reader: TableReader) -> None:
    owners = reader.records["owner"]
    known = {session.id for session in engine.sessions.all()}
    for seq in engine.live_sequences():
        if seq.pool != pool.name or (seq.session and seq.session not in known):
            continue
        for page in seq.pages[seq.published :]:
            if page not in pool.pages.extra_holders:
                expect("I15", f"owner of page {page}", int(owners[page]), seq.session)


def _same_sessions(stage: Stage, engine: Engine) -> None:
    known = sorted((session.slot, session.id, session.epoch) for session in engine.sessions.all())
    for name, reader in stage.store.readers.items():
        expect("I14", f"sessions in the table of {name}", [entry[:3] for entry in reader.sessions()], known)


def _servable(stage: Stage, pool: Pool, reader: TableReader) -> None:
    """Every page in a namespace's present tree: its record and its rows are what a hit would promise."""
    scopes = stage.store.scopes
    for namespace in pool.namespaces.all():
        scope = scopes.current(pool.name, namespace.canonical)
        stack: list[tuple[Node, list[int]]] = [(child, []) for child in (namespace.root.children or {}).values()]
        while stack:
            node, before = stack.pop()
            tokens = before + memoryview(bytes(node.tokens)).cast("I").tolist()
            _node(stage, scope, (node, tokens), reader)
            stack += [(child, tokens) for child in (node.children or {}).values()]


def _node(stage: Stage, scope: Scope, content: tuple[Node, list[int]], reader: TableReader) -> None:
    node, tokens = content
    device = stage.store.arenas[scope[0]]
    host = stage.store.host_arenas[scope[0]]
    paths = stage.paths.of(scope, tokens)[-node.page_count * device.page_size :]
    for arena, packed, behind in ((device, node.pages, 0), (host, node.host, len(device.rows))):
        if packed:
            pages = np.frombuffer(bytes(packed), np.int32)
            _rows(arena, pages, paths)
            stored = reader.records["tokens"][behind + pages].ravel().tolist()
            expect("I6", f"tokens of pages {pages.tolist()} in the table", stored, tokens[-len(paths) :])


def _rows(arena: Arena, pages: NDArray[np.int32], paths: list[int]) -> None:
    expected = np.array(paths, np.int64).reshape(-1, arena.page_size)
    partly = arena.layers.keys() & set(pages.tolist())
    require("I5", not partly, f"cached pages {partly} have not all of their layers")
    wrong = np.nonzero((arena.rows[pages] != expected).any(axis=1))[0]
    if len(wrong):
        page = int(pages[wrong[0]])
        writers = [arena.writers.get((page, row), "nobody") for row in range(arena.page_size)]
        raise Mismatch("I5", f"cached page {page} does not hold its tokens; written by {writers}")


def agree(engine: Engine, seq: Sequence) -> None:
    """A sequence about which nothing is on its way: worker and daemon know the same of it, and it is valid."""
    session = next((one for one in engine.sessions.all() if one.id == seq.session.id), None)
    if session is None or session.absent or session.epoch != seq.session.epoch:
        return
    known = session.sequences.get(seq.id)
    what = f"sequence {seq.id} of session {session.id}"
    require("I14", known is not None, f"{what} is not known to the daemon any more")
    assert known is not None
    if known.lost:
        return  # its worker will hear of it when he asks for the pages
    expect("I4", f"pages of {what}", seq.page_table.tolist(), known.pages.tolist())
    expect("I12", f"tokens of {what}", seq.packed_tokens(), bytes(known.tokens))
    expect("I5", f"complete tokens of {what}", seq.committed_tokens, known.committed)
    require("I4", seq.intact(), f"{what} is not valid, and nothing has happened to it")


def idle(stage: Stage, engine: Engine) -> None:
    """Nobody is there any more: all pages are free or cached and evictable, nothing waits, nothing is held."""
    snapshot = engine.snapshot()
    expect("I14", "sessions", snapshot["sessions"], 0)
    expect("I10", "queued requests and sequences in transit", (snapshot["queued"], snapshot["in_transit"]), (0, 0))
    expect("I14", "sessions that are waited for", engine.quarantine, {})
    for name, pool in snapshot["pools"].items():
        states = Counter(pool["pages"])
        expect("I1", f"free and cached pages of {name}", states["free"] + states["cached"], pool["total_pages"])
        expect("I14", f"evictable pages of {name}", pool["evictable_pages"], states["cached"])
        expect("I14", f"sequences of {name}", pool["sequences"], 0)
    expect("I20", "entries in the store", stage.store.entries, {})
