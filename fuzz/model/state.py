"""All that the model remembers: pools, sessions with their sequences, what is in transit, who waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fuzz.model.mismatch import require
from fuzz.model.pool import CACHED, FREE, PRIVATE, PoolModel, Sequence
from radixkv import commands
from radixkv.config import Config

COUNTED = (
    "requests", "asked_tokens", "hit_tokens", "evicted_pages", "committed_pages", "shadow_pages", "forks", "truncates",
)  # fmt: skip


class Refused(Exception):
    """A request that is answered with an error. ``details`` only where the protocol promises them."""

    def __init__(self, code: str, **details: int | float | bool) -> None:
        super().__init__(code)
        self.code = code
        self.details = details


@dataclass
class SessionModel:
    id: int
    sequences: dict[int, Sequence] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    """Request ids that were taken in, ever."""
    answers: list[tuple[int, commands.Reply]] = field(default_factory=list)
    """All (request id, answer), in the order of answering."""
    seen_s: float = 0.0
    """Running time at the last sign of life."""
    epoch: int = 1
    """Grows each time the session goes on with another daemon."""


@dataclass
class Transit:
    sequence: Sequence
    deadline: float


@dataclass
class Waiting:
    session: int
    request: int
    body: commands.Reserve
    deadline: float
    since: float

    @property
    def until(self) -> float:
        """A request is not executed after its deadline, however long it wanted to wait."""
        return min(self.deadline, self.since + self.body.wait_s)


@dataclass(frozen=True)
class Slices:
    """How much of what takes long is done by one command or tick."""

    pages: int = 8192
    """Published by a commit."""
    sequences: int = 256
    """Closed of sessions that have ended."""


class State:
    """The model's memory and the questions about it that several verbs ask."""

    def __init__(self, config: Config, slices: Slices) -> None:
        self.config = config
        self.slices = slices
        self.publishing: list[tuple[Sequence, int]] = []
        """Sequences with pages of a commit still to be published, and how many in all; the last is gone on with."""
        self.ending: list[tuple[Sequence, int]] = []
        """Sequences of ended sessions still to be closed, and the session to blame (0: none)."""
        self.gone: set[int] = set()
        """Ended sessions that can no longer write to anything."""
        self.pools = {
            pool.name: PoolModel(pool.name, pool.pages, pool.spec.page_size, pool.policy) for pool in config.pools
        }
        self.pool_config = {pool.name: pool for pool in config.pools}
        self.sessions: dict[int, SessionModel] = {}
        self.running_s = 0.0
        self.transit: dict[bytes, Transit] = {}
        self.queue: dict[str, list[Waiting]] = {pool.name: [] for pool in config.pools}
        self.draining = False
        self.counters = dict.fromkeys(COUNTED, 0)

    def lapsed(self, but: SessionModel) -> SessionModel | None:
        """Whoever else has been silent longest, if that is longer than a lease."""
        limit = self.running_s - self.config.server.lease_s
        silent = [s for s in self.sessions.values() if s.seen_s < limit and s is not but]
        return min(silent, key=lambda session: session.seen_s, default=None)

    def sequences(self) -> list[Sequence]:
        owned = [sequence for session in self.sessions.values() for sequence in session.sequences.values()]
        owned += [transit.sequence for transit in self.transit.values()]
        return owned + [sequence for sequence, _ in self.ending]

    def held(self, pool: PoolModel, also: list[int] | None = None) -> set[int]:
        return pool.held(self.sequences(), also or [])

    @contextmanager
    def settled(self, blame: int | None = None) -> Iterator[None]:
        """Whatever the body lets go of is stamped or freed at its end, as one event."""
        before = {name: self._held_by_each(pool) for name, pool in self.pools.items()}
        said = {id(sequence): sequence.retain for sequence in self.sequences()}
        yield
        for name, pool in self.pools.items():
            pool.settle(before[name], self._held_by_each(pool), blame, said)

    def _held_by_each(self, pool: PoolModel) -> dict[int, set[int]]:
        return {id(sequence): pool.held([sequence]) for sequence in self.sequences() if sequence.pool == pool.name}

    # -- what is done in slices ---------------------------------------------------------------------------------

    def publish(self, sequence: Sequence, full: int) -> None:
        """The first ``full`` pages are complete: a slice at once, the rest later."""
        upto = min(full, sequence.published + self.slices.pages)
        self._publish(sequence, upto)
        if upto < full:
            self.publishing.append((sequence, full))

    def _publish(self, sequence: Sequence, upto: int) -> None:
        pool = self.pools[sequence.pool]
        for index in range(sequence.published, upto):
            counter = "committed_pages" if pool.publish(sequence, index) == CACHED else "shadow_pages"
            self.counters[counter] += 1
        sequence.published = max(sequence.published, upto)

    def publish_rest(self, sequence: Sequence) -> None:
        """All that is left of a commit, because something else happens to the sequence."""
        left = [full for waiting, full in self.publishing if waiting is sequence]
        self.publishing = [entry for entry in self.publishing if entry[0] is not sequence]
        for full in left:
            self._publish(sequence, full)

    def publish_some(self) -> None:
        """One slice a pool, of the commit that came last."""
        for name in self.pools:
            last = [entry for entry in self.publishing if entry[0].pool == name][-1:]
            for sequence, full in last:
                self.publishing = [entry for entry in self.publishing if entry[0] is not sequence]
                self.publish(sequence, full)

    def close_some(self, all_of_them: bool = False) -> None:
        """Let go of sequences of ended sessions, in the order in which these ended."""
        for _ in range(len(self.ending) if all_of_them else min(self.slices.sequences, len(self.ending))):
            sequence, blame = self.ending[0]
            self.publish_rest(sequence)
            with self.settled(blame=None if blame in self.gone else blame or None):
                self.ending.pop(0)

    # -- whose pages --------------------------------------------------------------------------------------------

    def charged(self, session: SessionModel, pool: str) -> int:
        return sum(sequence.charged for sequence in session.sequences.values() if sequence.pool == pool)

    def available(
        self, pool: PoolModel, session: SessionModel, pinned: list[int], *, decode: bool, coming: int = 0
    ) -> int:
        """Pages this session can get at once, with ``pinned`` held: under the others' floors and its own cap.

        Negative when others are already short of their floors.

        ``decode``: may use what reserves may not; ``coming``: so many more pages become free by the same command.
        """
        limits = self.pool_config[pool.name]
        others = [other for other in self.sessions.values() if other is not session]
        missing = sum(max(0, limits.session_floor_pages - self.charged(other, pool.name)) for other in others)
        room = coming + pool.free() + pool.evictable(self.held(pool, pinned)) - missing
        if not decode:
            room -= limits.decode_reserve_pages
        if limits.session_cap_pages:
            room = min(room, limits.session_cap_pages - self.charged(session, pool.name))
        return room

    def take(self, pool: PoolModel, pinned: list[int], wanted: int, granted: list[int]) -> list[int]:
        """Make ``wanted`` pages private: those that the real engine chose, if it was free to choose them."""
        require("I1", len(granted) == wanted, f"{len(granted)} new pages {granted}, the model says {wanted}")
        held = self.held(pool, pinned)
        while pool.free() < wanted:
            pool.evict(held)
            self.counters["evicted_pages"] += 1
        require("I3", len(set(granted)) == len(granted), f"a page was granted twice in {granted}")
        for page in granted:
            state = pool.state.get(page, "outside the pool")
            require("I1" if state != CACHED else "I7", state == FREE, f"page {page} was granted while {state}")
            pool.state[page] = PRIVATE
        return granted
