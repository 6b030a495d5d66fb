"""All that one daemon knows: pools, sessions, what is on its way. And the end of a session, which touches all of it."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from itertools import count, groupby
from typing import TypeVar, TypeVarTuple

from radixkv.commands import Copy, Granted, Reply, Retire, SessionRecord, Write, failure
from radixkv.config import Config
from radixkv.engine import early, life, plan
from radixkv.engine.plan import Worker
from radixkv.engine.pool import Pool
from radixkv.engine.sequence import Sequence
from radixkv.engine.tiering import Tiering
from radixkv.engine.transit import Transit
from radixkv.errors import BadRequest, LimitExceeded, OutOfPages, SessionLost, StaleHandle
from radixkv.sessions.registry import Registry

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SLICE_SEQUENCES = 256
"""How many sequences of ended sessions one command or tick closes: well under 10 ms."""

NOBODY = 0
"""Owner of what no session owns: sequences in transit, and what nobody may claim alone."""

COUNTERS = (
    "requests", "refused_requests", "repeated_requests", "granted_after_waiting", "revoked_sessions",
    "handoffs_expired", "unknown_copies", "joined", "lost_pools",
)  # fmt: skip


class State:
    def __init__(self, config: Config, boot_id: str, cache_id: str) -> None:
        self.config = config
        self.boot_id = boot_id
        self.cache_id = cache_id
        self.pools = {pool.name: Pool(pool) for pool in config.pools}
        self.sessions: Registry[Sequence, Reply] = Registry(
            config.limits.sessions, config.server.keep_replies, config.server.lease_s
        )
        self.transit = Transit()
        self.quarantine: dict[int, dict[str, list[int]]] = {}
        """By ended session: pages its process could still write to."""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.retaining: list[Pool] = []
        """Pools in which pages have priorities."""
        self.queued = 0
        """Requests that wait, in the lines of all pools."""
        self.draining = False
        self.resuming: set[int] = set()
        """Sessions of an earlier daemon's time that have not said yet what is theirs."""
        self.window_open = False
        """They are waited for: only free pages are handed out."""
        self.ending: deque[tuple[Sequence, int]] = deque()
        """Sequences of ended sessions still to be closed, and whose they were."""
        self.writes: list[Write] = []
        """Of the command being carried out, in the order in which they must reach the descriptor table."""
        self.refused: dict[int, dict[str, set[int]]] = {}
        """By session that is resuming and pool: its private pages in claims that could not be proven."""
        self.effects: list[Copy] = []
        """Copies that the command being carried out has begun."""
        self.granted: list[Granted] = []
        self.ended: list[int] = []
        for pool in self.pools.values():
            pool.writes = self.writes
            if pool.host is not None:
                pool.host.writes = self.writes
        copies = count(1)
        self.tiers = {
            name: Tiering(pool, pool.host, self.effects, copies)
            for name, pool in self.pools.items()
            if pool.host is not None
        }

    def open_session(self, identity: int, token: bytes, name: str) -> None:
        """Errors: LimitExceeded: as many as may are open, or no floor can be promised to one more."""
        for pool in self.pools.values():
            floor = pool.config.session_floor_pages
            if floor * (len(self.sessions) + 1) > pool.pages.size:
                raise LimitExceeded(
                    f"pool {pool.name!r} has no room for the floor of one more session",
                    sessions=len(self.sessions), session_floor_pages=floor, total_pages=pool.pages.size,
                )  # fmt: skip
        session = self.sessions.open(identity, token, name)
        self.writes.append(SessionRecord(session.slot, session.id, session.epoch, session.token))
        for pool in self.pools.values():
            pool.floors_missing += pool.config.session_floor_pages

    def end_session(self, identity: int, mapped: bool) -> None:
        """Everything of the session comes back: at once its place and its requests, in slices its sequences."""
        session = self.sessions.end(identity)
        if session is None:
            return
        self.writes.append(SessionRecord(session.slot, session.id, 0, b""))
        for pool in self.pools.values():
            pool.floors_missing -= plan.floor_missing(pool, session)
            pool.gained = True
        self._turn_away(session)
        if not mapped:
            self.mapping_gone(identity)
            self.refused.pop(identity, None)
        if mapped and session.sequences:
            self.quarantine.setdefault(identity, {})
        if identity in self.resuming:
            self._give_up_claims(identity, mapped)
        self.ending.extend((seq, identity) for seq in session.sequences.values())
        self.close_some(SLICE_SEQUENCES)

    # -- after a restart ------------------------------------------------------------------------------------------

    def begin_resuming(self, known: set[int]) -> None:
        """Wait for the claims of these sessions, of an earlier daemon's time."""
        self.resuming = set(known)
        self.window_open = True
        for pool in self.pools.values():
            pool.frozen = pool.namespaces.kept = True
        if not known:
            self._end_resuming()

    def rejoin(self, identity: int, token: bytes) -> None:
        """Errors: SessionLost."""
        session = self.sessions.rejoin(identity, token)
        self.writes.append(SessionRecord(session.slot, session.id, session.epoch, session.token))

    def join(self, identity: int, token: bytes, rank: int) -> None:
        """Errors: BadRequest, SessionLost."""
        ranks = max(pool.config.ranks for pool in self.pools.values())
        if not 0 < rank < ranks:
            raise BadRequest(f"the ranks that can join are 1 to {ranks - 1}", rank=rank, ranks=ranks)
        self.sessions.join(identity, token, rank)

    def settled(self, session: Worker) -> None:
        """The session has claimed all that it will: what is left of its pages is free, but for what it was refused."""
        if session.id in self.resuming:
            self._give_up_claims(session.id, mapped=False)

    def close_window(self) -> None:
        """Who is not back by now may still come, but is not waited for."""
        if not self.window_open:
            return
        self.window_open = False
        for pool in self.pools.values():
            pool.frozen = False
            pool.gained = True
            if pool.lineage is not None:
                private, shadows = pool.lineage.give_up(NOBODY)
                pool.clear(private + shadows)
        for session in self.sessions.all():
            if session.absent:
                session.seen_s = -math.inf

    def _give_up_claims(self, identity: int, mapped: bool) -> None:
        """The session is over or has claimed what it wanted. Shadows may be claimed by others while the window is open.

        ``mapped``: its process could still write to its private pages; to those in refused claims it could in any case.
        """
        refused = self.refused.pop(identity, {})
        for pool in self.pools.values():
            assert pool.lineage is not None
            private, shadows = pool.lineage.give_up(identity)
            written = {page for page in private if mapped or page in refused.get(pool.name, ())}
            if self.window_open:
                pool.lineage.now_of(NOBODY, shadows)
            else:
                pool.clear(shadows)
            pool.clear([page for page in private if page not in written])
            if written:
                self.quarantine.setdefault(identity, {}).setdefault(pool.name, []).extend(sorted(written))
                self.writes.append(Retire(pool.name, array("i", sorted(written)).tobytes(), True))
        self.resuming.discard(identity)
        if not self.resuming:
            self._end_resuming()

    def _end_resuming(self) -> None:
        self.close_window()
        for pool in self.pools.values():
            pool.lineage = None
            pool.namespaces.kept = False

    # -- sessions and what they hold ------------------------------------------------------------------------------

    def _turn_away(self, session: Worker) -> None:
        """Nobody will grant what the session still waits for; its process may live and be waiting for the answer."""
        over = failure(SessionLost("the session ended while this request waited; it was not executed"))
        for pool in self.pools.values():
            for request in [request for request, name in session.waiting.items() if name == pool.name]:
                pool.leave_lines(session.id, request)
                self.queued -= 1
                self.granted.append(Granted(session.id, request, over))

    def close_some(self, budget: int) -> None:
        """At most so many sequences, the oldest first; neighbours of one session and pool together."""
        some = [self.ending.popleft() for _ in range(min(budget, len(self.ending)))]
        for (name, identity), together in groupby(some, key=lambda entry: (entry[0].pool, entry[1])):
            quarantine = self.quarantine.get(identity)
            pages = None if quarantine is None else quarantine.setdefault(name, [])
            life.close_all(self.pools[name], [seq for seq, _ in together], pages)

    def awaits_mapping_gone(self, identity: int) -> bool:
        """Could pages of this session be in quarantine until nothing of it maps the arena any longer?"""
        return identity in self.quarantine

    def mapping_gone(self, identity: int) -> None:
        for name, pages in self.quarantine.pop(identity, {}).items():
            if pages:
                self.pools[name].clear(pages)

    def revoke_lapsed(self, asking: Worker) -> bool:
        """``asking`` is short of pages: end the other session that has been silent longest beyond its lease."""
        session = self.sessions.lapsed(besides=asking.id)
        if session is None:
            return False
        self.counters["revoked_sessions"] += 1
        self.ended.append(session.id)
        self.end_session(session.id, True)
        while self.ending:
            self.close_some(SLICE_SEQUENCES)
        return True

    def insist(self, asking: Worker, planner: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """A plan; before "no" is final, sessions that have lapsed give way. Errors: the planner's."""
        while True:
            try:
                return planner(*arguments)
            except OutOfPages as error:
                if error.never_fits or not self.revoke_lapsed(asking):
                    raise

    def charge(self, session: Worker, pool: Pool, pages: int) -> None:
        """The session's tables have grown (or shrunk) by so many pages of its own."""
        floor = pool.config.session_floor_pages
        if floor:
            before = session.charged[pool.name]
            pool.floors_missing += max(0, floor - before - pages) - max(0, floor - before)
        session.charged[pool.name] += pages
        if pages < 0:
            pool.gained = True

    def known(self, session: Worker, identity: int) -> tuple[Sequence, Pool]:
        """A sequence of this session and its pool. Errors: StaleHandle."""
        seq = session.sequences.get(identity)
        if seq is None:
            raise StaleHandle("this session has no such sequence", sequence=identity)
        return seq, self.pools[seq.pool]

    def find(self, session: Worker, identity: int) -> tuple[Sequence, Pool]:
        """The same, when all pages have to be there and what was committed has to be published.

        Errors: StaleHandle, BadRequest (pages are still loading), CopyFailed.
        """
        seq, pool = found = self.known(session, identity)
        if seq.load is not None or seq.lost:
            early.whole(seq)
        if pool.publishing:
            life.settle(pool, seq)
        return found

    def pool(self, name: str) -> Pool:
        pool = self.pools.get(name)
        if pool is None:
            raise BadRequest(f"there is no pool {name!r}; there are: {', '.join(self.pools)}")
        return pool

    def new_ids(self, session: Worker, first: int, count: int) -> None:
        taken, limit = session.sequences, self.config.limits.sequences_per_session
        if len(taken) + count > limit:
            raise LimitExceeded("too many sequences", sequences=len(taken) + count, limit=limit)
        if first in taken if count == 1 else not taken.keys().isdisjoint(range(first, first + count)):
            raise BadRequest("this sequence id is in use", sequence=first)

    def live_sequences(self) -> list[Sequence]:
        """All sequences that hold pages: of sessions, in transit, and still to be closed."""
        of_sessions = [seq for session in self.sessions.all() for seq in session.sequences.values()]
        return of_sessions + self.transit.sequences() + [seq for seq, _ in self.ending]
