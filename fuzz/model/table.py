"""The descriptor table as a reader sees it: it knows only the writes that left the core, in their order.

After each command it must tell the same story as the model: what the writes say is all that a later daemon will know,
so states, owners, namespaces, tokens, what follows what and the order of eviction must all follow from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuzz.model.mismatch import expect, require
from fuzz.model.packing import pack_tokens, unpack_pages
from fuzz.model.pool import CACHED, FREE, PRIVATE, QUARANTINED, SHADOW, PoolModel
from fuzz.model.state import State
from radixkv import commands


@dataclass
class Record:
    """One page's record."""

    state: str = FREE
    generation: int = 0
    owner: int = 0
    namespace: int = -1
    epoch: int = 0
    published_in: int = 0
    stamp: int = 0
    tokens: bytes = b""
    serial: int = 0
    parent_serial: int = 0


class TableMirror:
    """One record a page and pool, one a namespace, one a session slot; built from writes alone."""

    def __init__(self, pools: dict[str, int]) -> None:
        """``pools``: how many records each has, those of the host tier behind the others."""
        self.pages = {name: [Record() for _ in range(pages)] for name, pages in pools.items()}
        self.namespaces: dict[tuple[str, int], tuple[int, bytes]] = {}
        """(pool, id) -> (epoch, canonical bytes)."""
        self.sessions: dict[int, tuple[int, int]] = {}
        """Slot -> (session, epoch)."""
        self.serials = dict.fromkeys(pools, 0)
        """Given last, by pool."""

    def write(self, write: commands.Write) -> None:
        """Store one write. Raises Mismatch if a page cannot go from where it is to what the write says."""
        match write:
            case commands.Assign():
                for record in self._move(write.pool, write.pages, (FREE, CACHED), PRIVATE):
                    record.generation += 1
                    record.stamp = 0
                    record.owner, record.namespace, record.epoch = write.owner, write.namespace, write.epoch
            case commands.Publish():
                self._publish(write)
            case commands.Copied():
                self._copy(write)
            case commands.Retire():
                new = QUARANTINED if write.quarantined else FREE
                old = (PRIVATE, SHADOW) if write.quarantined else (PRIVATE, SHADOW, CACHED, QUARANTINED)
                self._move(write.pool, write.pages, old, new)
            case commands.Stamp():
                for record in self._move(write.pool, write.pages, (CACHED,), CACHED):
                    require("I7", write.stamp >= record.stamp, f"a stamp went back to {write.stamp}")
                    record.stamp = write.stamp
            case commands.Own():
                for page in unpack_pages(write.pages):
                    record = self.pages[write.pool][page]
                    require("I15", record.state in (PRIVATE, SHADOW), f"new owner of page {page}, {record.state}")
                    record.owner = write.owner
            case commands.SessionRecord():
                self.sessions[write.slot] = (write.session, write.epoch)
            case commands.NamespaceRecord():
                self.namespaces[write.pool, write.namespace] = (write.epoch, write.canonical)

    def _move(self, pool: str, packed: bytes, allowed: tuple[str, ...], new: str) -> list[Record]:
        records = []
        for page in unpack_pages(packed):
            record = self.pages[pool][page]
            require("I3", record.state in allowed, f"a write turns page {page} of {pool} from {record.state} to {new}")
            record.state = new
            records.append(record)
        return records

    def _publish(self, write: commands.Publish) -> None:
        records = self._move(write.pool, write.pages, (PRIVATE,), SHADOW if write.shadow else CACHED)
        each = len(write.tokens) // len(records)
        expect("I5", "tokens of a publish", len(write.tokens), each * len(records))
        before = self.pages[write.pool][write.parent_page].serial if write.parent_page >= 0 else 0
        for index, record in enumerate(records):
            self.serials[write.pool] += 1
            record.parent_serial = before
            record.serial = before = self.serials[write.pool]
            record.published_in = record.epoch << 32 | record.namespace
            record.tokens = write.tokens[index * each : (index + 1) * each]

    def _copy(self, write: commands.Copied) -> None:
        """Out of a page that is in the tree, into one that nobody has."""
        sources = self._move(write.pool, write.sources, (CACHED,), CACHED)
        targets = self._move(write.pool, write.targets, (FREE, PRIVATE), CACHED)
        for source, target in zip(sources, targets, strict=True):
            for name in ("stamp", "namespace", "epoch", "published_in", "serial", "parent_serial", "tokens"):
                setattr(target, name, getattr(source, name))

    def roots(self, pool: str) -> Callable[[int], int]:
        """Epoch and namespace in which a page of this pool was published last, as one number, whenever asked: by then
        the same command may have given the page to somebody else."""
        records = self.pages[pool]
        return lambda page: records[page].published_in

    # -- against the model --------------------------------------------------------------------------------------

    def compare(self, state: State) -> None:
        """Raise Mismatch unless the table agrees with the model."""
        for pool in state.pools.values():
            records = self.pages[pool.name]
            expect("I1", f"states of {pool.name}", {p: r.state for p, r in enumerate(records)}, pool.state)
            for page in pool.key_of:
                self._compare_content(pool, page)
            self._compare_owners(state, pool)
            held = state.held(pool)
            idle = sorted(
                (pool.order.stamp[page], -len(key[2]), page) for page, key in pool.key_of.items() if page not in held
            )
            latest = self._latest_stamps(pool)
            stamps = [latest[page] for _, _, page in idle]
            expect("I7", f"stamps of {pool.name} in order of eviction", stamps, sorted(stamps))
        alive = sorted(session for session, epoch in self.sessions.values() if epoch)
        expect("I14", "sessions in the table", alive, sorted(state.sessions))

    def _latest_stamps(self, pool: PoolModel) -> dict[int, int]:
        """What the table says of each cached page: the latest stamp of it and of all pages that continue it."""
        latest = {page: self.pages[pool.name][page].stamp for page in pool.key_of}
        for page in sorted(pool.key_of, key=lambda page: -len(pool.key_of[page][2])):
            above = pool.parent(page)
            if above is not None:
                latest[above] = max(latest[above], latest[page])
        return latest

    def _compare_content(self, pool: PoolModel, page: int) -> None:
        record, (namespace, epoch, tokens) = self.pages[pool.name][page], pool.key_of[page]
        expect("I5", f"tokens of page {page}", record.tokens, pack_tokens(tokens[-pool.page_size :]))
        above = pool.parent(page)
        before = 0 if above is None else self.pages[pool.name][above].serial
        expect("I6", f"serial of the page before page {page}", record.parent_serial, before)
        self._compare_namespace(pool, page, namespace, epoch)

    def _compare_namespace(self, pool: PoolModel, page: int, namespace: bytes, epoch: int) -> None:
        record = self.pages[pool.name][page]
        current, canonical = self.namespaces[pool.name, record.namespace]
        expect("I6", f"namespace of page {page}", canonical, namespace)
        live = epoch == pool.epoch_of(namespace)
        expect("I6", f"page {page} is of its namespace's present epoch", record.epoch == current, live)

    def _compare_owners(self, state: State, pool: PoolModel) -> None:
        owners: dict[int, set[int]] = {}
        sequences = [
            (who, sequence) for who, session in state.sessions.items() for sequence in session.sequences.values()
        ]
        for who, sequence in [*sequences, *((0, transit.sequence) for transit in state.transit.values())]:
            if sequence.pool == pool.name:
                for page in sequence.pages:
                    if pool.state[page] == PRIVATE:  # of a shadow that forks in two sessions share, either is named
                        owners.setdefault(page, set()).add(who)
                    if pool.state[page] != CACHED:
                        self._compare_namespace(pool, page, sequence.namespace, sequence.epoch)
        for page, allowed in owners.items():
            owner = self.pages[pool.name][page].owner
            require("I15", owner in allowed, f"page {page} belongs to {owner} in the table, the model says {allowed}")
