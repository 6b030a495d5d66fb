"""A worker process: the real client core, a few threads, a keeper, the mapped memory, and its end.

A process may be stopped (SIGSTOP): nothing of it runs but what its device has begun. It may have heirs, forked children
that hold its attach connection and its mapping beyond its death.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fuzz.simulator.attendance import Process
from fuzz.simulator.keeper import Keeper, ship
from fuzz.simulator.network import AttachPipe, Socket
from fuzz.simulator.sequence import Pool, Sequence
from fuzz.simulator.shell import Thread
from fuzz.simulator.stage import Stage
from fuzz.simulator.store import Store
from radixkv.client.core import Core
from radixkv.client.session import Pages, Session
from radixkv.commands import Bye, CopyRow, PoolMap
from radixkv.config import KVSpec
from radixkv.errors import RadixKVError

if TYPE_CHECKING:
    from fuzz.simulator.device import Job
    from fuzz.simulator.world import World

TIMEOUT_S = 5.0


class Connection:
    """A session's attach connection, as ``client/connection.py`` has it."""

    def __init__(self, pipe: AttachPipe, session: Session) -> None:
        self.pipe = pipe
        self.session = session
        self.epoch = session.epoch
        self.over = False

    def enter(self) -> None:
        """The session goes on here, in its present epoch."""
        self.epoch = self.session.epoch
        self.session.daemon_lives = self.stands

    def stands(self) -> bool:
        return not self.over and not self.pipe.hung_up

    def hang_up(self) -> None:
        if not self.over:
            self.over = True
            if self.session.daemon_lives == self.stands:
                self.session.daemon_lives = _never
            self.pipe.worker_end = False


def _never() -> bool:
    return False


class Mapped:
    """``client.session.Memory`` over the store's arena and table: one pool as one process has it mapped."""

    def __init__(self, client: Client, store: Store, pool: PoolMap) -> None:
        self._who = client.name
        self._copies = client.stage.habits.library_copies
        self._table = store.readers[pool.name]
        self.arena = store.arenas[pool.name]
        self.scopes = store.scopes
        self.spec = KVSpec(**pool.spec)
        self.pages = pool.pages
        self.host_pages = pool.host_pages

    def generations(self, pages: Pages) -> Any:
        return self._table.generations(pages)

    def knows(self, session: Session) -> bool:
        entry = self._table.session(session.welcome.slot)
        return entry.session == session.id and entry.epoch != 0

    def copy_rows(self, rows: Iterable[CopyRow]) -> bool:
        if self._copies:
            self.arena.copy_rows(rows, self._who)
        return self._copies

    def take_page(self, _page: int) -> None:
        return None

    def put_page(self, page: int, content: Any) -> None:
        raise AssertionError(f"nothing was taken to put into page {page}: {content!r}")

    def state(self, page: int) -> int:
        return int(self._table.records["state"][page])


class Client:
    def __init__(self, world: World, stage: Stage, threads: int) -> None:
        self._world = world
        self.stage = stage
        self.process = Process(stage.fresh())
        self.name = f"worker {self.process.number}"
        self.core = Core(TIMEOUT_S, lambda: stage.now)
        self.pools = [Pool(self.core, stage, pool.name) for pool in stage.config.pools]
        self.threads = [Thread(self, f"{self.name}.{letter}") for letter in "abcd"[:threads]]
        self.keeper = Keeper(self)
        self.connection: Connection | None = None
        self.jobs: list[Job] = []
        self._sockets: list[Socket] = []
        self.leaving = False
        """A bye is on its way: nothing is begun any more."""

    @property
    def now(self) -> float:
        return self.stage.now

    def note(self, event: str, text: str) -> None:
        self.stage.note(event, f"{self.name} {text}")

    # -- what threads ask for -------------------------------------------------------------------------------------

    def present(self) -> Connection | None:
        connection = self.connection
        if connection is None:
            return None
        session = connection.session
        return None if session.over or session.away or session.epoch != connection.epoch else connection

    def open_socket(self, owner: str) -> Socket:
        self._sockets = [one for one in self._sockets if not one.closed]
        self._sockets.append(self.stage.network.open_socket(owner))
        return self._sockets[-1]

    def writable(self, socket: Socket) -> bool:
        """Has a daemon accepted this socket? One that lives does so at once."""
        return self._world.daemon_lives

    def lose(self, connection: Connection) -> None:
        """The daemon went away, or ended the session."""
        session = connection.session
        known = session.over or session.away
        self.core.left(session, connection.epoch)
        if not known and (session.over or session.away):
            self.note("session away" if session.away else "session lost", f"session {session.id}")
        connection.hang_up()

    def open_pipe(self) -> AttachPipe:
        return self.stage.network.open_pipe(self.process.number)

    def connect(self, pipe: AttachPipe, session: Session) -> Connection:
        return Connection(pipe, session)

    def publish(self, connection: Connection) -> None:
        """From now on verbs work in its session."""
        self.core.opened(connection.session)
        self.connection = connection
        self.core.resumed(connection.session, connection.epoch)
        self.stage.events["connected"] += 1

    def map_pool(self, session: Session, answer: PoolMap) -> None:
        memory = Mapped(self, self._world.store_of(session.welcome.cache_id), answer)
        session.memories[answer.name] = memory
        next(pool for pool in self.pools if pool.name == answer.name).current = memory

    def settled_sequences(self) -> list[Sequence]:
        """Those of the present session about which nothing is on its way, and nothing in doubt."""
        if self.present() is None:
            return []
        behind = self.core.outbox.behind
        return [
            seq
            for pool in self.pools
            for seq in pool.sequences
            if seq.session is self.core.session
            and not (seq.busy or seq.closed or seq.broken or seq.unsettled or seq.doubtful or behind(seq))
        ]

    # -- the end --------------------------------------------------------------------------------------------------

    def may_say_bye(self) -> bool:
        """In good order: nothing runs, on the device neither, and nothing is left to be sent."""
        quiet = all(thread.idle for thread in [*self.threads, self.keeper.thread])
        rests = not self.jobs and not self.process.heirs and not len(self.core.outbox)
        return self.present() is not None and quiet and rests

    def say_bye(self) -> None:
        """Send it; what comes of it shows later. The process goes on, and may open another session."""
        connection = self.present()
        assert connection is not None
        self.leaving = True
        for pool in self.pools:  # to say bye is to promise not to touch them any more
            for seq in pool.sequences:
                seq.closed = True
            pool.sequences.clear()

        def gone(error: RadixKVError | None) -> None:
            self.leaving = False
            self.core.ended(connection.session)
            self.lose(connection)

        self.keeper.thread.begin(ship(connection.session, [Bye()]), gone)

    def die(self) -> None:
        """Any way of dying. What heirs inherit stays: connection and mapping."""
        self.process.alive = False
        for thread in [*self.threads, self.keeper.thread]:
            thread.end()
        for socket in self._sockets:
            socket.worker_died(self.stage.rng)
        for session in {id(one): one for one in self._sessions()}.values():
            session.over = True
        if not self.process.heirs:
            self.let_go()

    def let_go(self) -> None:
        """Nobody is left who has the connection or the mapping."""
        self.jobs.clear()
        for pipe in self.stage.network.pipes:
            if pipe.process == self.process.number:
                pipe.worker_end = False

    def _sessions(self) -> list[Session]:
        known = [seq.session for pool in self.pools for seq in pool.sequences]
        return known + ([self.connection.session] if self.connection else [])
