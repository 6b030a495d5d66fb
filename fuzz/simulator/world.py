"""One simulated world: workers, the network, the daemon and the store, and what may happen next.

``step`` lets one thing happen, drawn by the world's odds: somebody's next slice, a message's arrival, time, or a fault.
``wind_down`` lets everything end and looks for what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from fuzz.simulator import checks
from fuzz.simulator.attendance import Process
from fuzz.simulator.client import Client
from fuzz.simulator.cuts import Killed
from fuzz.simulator.device import strays, work_on
from fuzz.simulator.odds import Odds
from fuzz.simulator.shell import Thread
from fuzz.simulator.stage import Setup, make_stage
from fuzz.simulator.store import Store
from fuzz.simulator.supervisor import Supervisor
from fuzz.simulator.work import ODDS, Board, Work
from radixkv.device import writer

CHECK_EVERY = 8
DRAWS = 16
"""How many things are tried in one step until one of them can happen."""
MOST_HEIRS = 2
WITH_TIERS = {"reserve": 3.0, "free": 8.0}
"""Where there is a host tier, prompts come and go more often: only what nobody holds moves."""

T = TypeVar("T")


class World:
    """Methods named like an action return False if it is nothing that could happen now."""

    def __init__(self, setup: Setup) -> None:
        self.stage = make_stage(setup)
        self._rng = self.stage.rng
        draw = setup.source("swarm")
        keeps = draw.random() < 0.8
        self._odds = Odds(draw, setup.off, any(pool.host_pages for pool in self.stage.config.pools))
        self._work_odds = {name: odds * 10 ** draw.uniform(-0.7, 0.7) for name, odds in ODDS.items()}
        drawn = draw.randint(1, 4)
        if any(pool.host_pages for pool in self.stage.config.pools):
            self._work_odds = {name: odds * WITH_TIERS.get(name, 1.0) for name, odds in self._work_odds.items()}
        self._most = setup.workers or drawn
        self._threads = draw.randint(1, 4)
        self._board = Board()
        self._processes: dict[int, Process] = {}
        self._work: dict[int, Work] = {}
        self.clients: dict[int, Client] = {}
        self._supervisor = Supervisor(self.stage, self._processes, keeps)
        self._steps = 0
        self._supervisor.start()
        for _ in range(self._most):
            self._spawn()

    @property
    def daemon_lives(self) -> bool:
        return self._supervisor.daemon is not None

    def store_of(self, cache_id: str) -> Store:
        return self._supervisor.stores[cache_id]

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        usual, writer._FEW_PAGES = writer._FEW_PAGES, self.stage.habits.few_pages
        try:
            for _ in range(DRAWS):
                if self._try(self._odds.pick(self._rng)):
                    break
        finally:
            writer._FEW_PAGES = usual
        self._steps += 1
        if self._steps % CHECK_EVERY == 0:
            self.check()

    def _try(self, action: str) -> bool:
        try:
            return bool(getattr(self, f"_{action}")())
        except Killed:
            self._supervisor.died()
            return True

    def check(self) -> None:
        daemon = self._supervisor.daemon
        if daemon is None:
            return
        checks.check(self.stage, daemon.engine)
        for client in self.clients.values():
            for seq in client.settled_sequences() if client.process.alive else ():
                checks.agree(daemon.engine, seq)

    # -- workers --------------------------------------------------------------------------------------------------

    def _thread(self) -> bool:
        """Some thread that can go on does, or one that is idle begins something."""
        for client in self._shuffled(self._running()):
            for thread in self._shuffled(client.threads):
                if not thread.idle:
                    if thread.go():
                        self._more(thread)
                        return True
                elif not client.leaving and self._work[client.process.number].begin(thread):
                    return True
        return False

    def _more(self, thread: Thread) -> None:
        """Mostly nobody comes in between."""
        for _ in range(self._rng.choice((0, 1, 3, 9))):
            if not thread.go():
                return

    def _keeper(self) -> bool:
        return any(client.keeper.go() for client in self._shuffled(self._running()))

    def _device(self) -> bool:
        client = self._some(client for client in self.clients.values() if client.jobs)
        if client is None:
            return False
        work_on(client.jobs, self._rng)
        return True

    def _spawn(self) -> bool:
        if sum(client.process.alive for client in self.clients.values()) >= self._most:
            return False
        client = Client(self, self.stage, self._threads)
        number = client.process.number
        self.clients[number] = client
        self._processes[number] = client.process
        names, weights = list(self._work_odds), list(self._work_odds.values())
        self._work[number] = Work(self.stage, client, self._board, lambda: self._rng.choices(names, weights)[0])
        return self._note("spawn", client.name)

    def _running(self) -> list[Client]:
        return [client for client in self.clients.values() if client.process.alive and not client.process.stopped]

    def _some(self, clients: Iterable[Client]) -> Client | None:
        found = list(clients)
        return self._rng.choice(found) if found else None

    def _shuffled(self, these: list[T]) -> list[T]:
        return self._rng.sample(these, len(these)) if len(these) > 1 else these

    def _note(self, event: str, text: str) -> bool:
        self.stage.note(event, text)
        return True

    # -- what workers suffer --------------------------------------------------------------------------------------

    def _stop(self) -> bool:
        client = self._some(self._running())
        if client is None:
            return False
        client.process.stopped = True
        return self._note("stop", client.name)

    def _wake(self) -> bool:
        client = self._some(one for one in self.clients.values() if one.process.stopped and one.process.alive)
        if client is None:
            return False
        client.process.stopped = False
        return self._note("wake", client.name)

    def _fork(self) -> bool:
        client = self._some(client for client in self._running() if client.process.heirs < MOST_HEIRS)
        if client is None:
            return False
        client.process.heirs += 1
        return self._note("fork", client.name)

    def _heir_ends(self) -> bool:
        client = self._some(client for client in self.clients.values() if client.process.heirs)
        if client is None:
            return False
        client.process.heirs -= 1
        if not client.process.heirs and not client.process.alive:
            client.let_go()
        return self._note("heir ends", client.name)

    def _kill_worker(self) -> bool:
        """A device's job dies with its process; heirs go on with it, and write where else they could."""
        client = self._some(client for client in self.clients.values() if client.process.alive)
        if client is None:
            return False
        busy = sum(not thread.idle for thread in client.threads)
        client.jobs += strays(client) if client.process.heirs else []
        client.die()
        return self._note("worker dies", f"{client.name}, {busy} calls running, {client.process.heirs} heirs")

    def _bye(self) -> bool:
        client = self._some(client for client in self._running() if client.may_say_bye())
        if client is None:
            return False
        client.say_bye()
        return self._note("bye", client.name)

    def _break(self) -> bool:
        """One ZeroMQ connection breaks: what was on it is lost both ways. Not a keeper's: a unix socket between two
        processes that live does not break, and who resumes waits for as long as that is so."""
        sockets = self.stage.network.sockets
        carrying = [one for one in sockets if not one.closed and not one.keeps and (one.requests or one.replies)]
        if not carrying:
            return False
        socket = self._rng.choice(carrying)
        socket.requests.clear()
        socket.replies.clear()
        return self._note("break", socket.owner)

    # -- the daemon -----------------------------------------------------------------------------------------------

    def _serve(self) -> bool:
        daemon = self._supervisor.daemon
        self.stage.network.tidy()
        waiting = [socket for socket in self.stage.network.sockets if socket.requests]
        if daemon is None or not waiting:
            return False
        daemon.serve(self._rng.choice(waiting))
        return True

    def _attend(self) -> bool:
        """A connection, an attach packet, an end, or a tick that is due."""
        daemon = self._supervisor.daemon
        if daemon is None:
            return False
        chores: list[Callable[[], None]] = [partial(daemon.notice, what, who) for what, who in daemon.ends()]
        for pipe in self.stage.network.pipes:
            if pipe.accepted_by is None and pipe.daemon_end:
                chores.append(partial(daemon.accept, pipe))
            elif pipe.accepted_by == daemon.boot_id and pipe.packets and pipe.daemon_end:
                chores.append(partial(daemon.answer, pipe))
        if daemon.tick_is_due():
            chores.append(daemon.tick)
        if not chores:
            return False
        self._rng.choice(chores)()
        return True

    def _unknown_copy(self) -> bool:
        daemon = self._supervisor.daemon
        if daemon is None:
            return False
        daemon.carry_out(daemon.copier.unknown_end())
        return True

    def _copier(self) -> bool:
        daemon = self._supervisor.daemon
        if daemon is None or not daemon.copier:
            return False
        for end in daemon.copier.go_on():
            daemon.carry_out(end)
        return True

    def _doom(self) -> bool:
        """It will die in its next command."""
        daemon = self._supervisor.daemon
        if daemon is None or daemon.doomed:
            return False
        daemon.doomed = True
        return True

    def _kill_daemon(self) -> bool:
        """Between two commands."""
        if self._supervisor.daemon is None:
            return False
        self._supervisor.died()
        return True

    def _start(self) -> bool:
        if self._supervisor.daemon is not None:
            return False
        self._supervisor.start()
        self.check()
        return True

    # -- time -----------------------------------------------------------------------------------------------------

    def _time(self) -> bool:
        self.stage.now += self._rng.choice((0.001, 0.01, 0.1, 0.5))
        return True

    def _lapse(self) -> bool:
        """Longer than most wait for; the daemon sees a tick at most in between."""
        self.stage.now += self._rng.choice((1.0, 3.0, 6.0))
        return True

    # -- the end --------------------------------------------------------------------------------------------------

    def wind_down(self) -> None:
        """All workers die, everything that is on its way arrives: then nothing may be left."""
        for client in self.clients.values():
            client.process.heirs = 0
            if client.process.alive:
                client.die()
            client.let_go()
        while self._supervisor.daemon is None:
            self._supervisor.start()
        daemon = self._supervisor.daemon
        daemon.doomed = False
        while self._finish_one():
            pass
        self.check()
        checks.idle(self.stage, daemon.engine)
        daemon.count()
        self.stage.events["wound down"] += 1

    def _finish_one(self) -> bool:
        """One more thing that has to come to its end. False: there is none."""
        daemon = self._supervisor.daemon
        assert daemon is not None
        waiting = [socket for socket in self.stage.network.sockets if socket.requests]
        if waiting:
            daemon.serve(waiting[0])
        elif ends := daemon.ends():
            daemon.notice(*ends[0])
        elif daemon.copier:
            for end in daemon.copier.go_on():
                daemon.carry_out(end)
        elif daemon.engine.has_work() or daemon.engine.next_deadline() is not None:
            self.stage.now += 1.0
            daemon.tick()
        else:
            return False
        return True
