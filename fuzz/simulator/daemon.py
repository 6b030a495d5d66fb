"""One simulated daemon process: the real engine, codec and table writer, with the duties of ``radixkv/daemon``.

A command is carried out to its end: engine, descriptor stores, then the reply. If the daemon is ``doomed``, it is
killed between two of these stores (or before the first, or after the last but before the reply).
"""

from __future__ import annotations

from collections.abc import Mapping

from fuzz.model.mismatch import Mismatch
from fuzz.simulator.attendance import Attendance, Member, Process
from fuzz.simulator.copier import Copier
from fuzz.simulator.cuts import Killed, kill_during
from fuzz.simulator.network import AttachPipe, Socket
from fuzz.simulator.stage import Stage
from radixkv import commands
from radixkv.config import Layout
from radixkv.device.writer import apply_all
from radixkv.engine.engine import Engine
from radixkv.engine.recover import Found, recover
from radixkv.errors import BadRequest, RadixKVError, SessionLost
from radixkv.ipc import wire

TICK_S = 5.0
COUNTED = (
    "hit_tokens", "committed_pages", "shadow_pages", "evicted_pages", "forks", "truncates", "handoffs_expired",
    "saved_pages", "loaded_pages",
)  # fmt: skip


class Daemon:
    """``engine``: fresh, or what recovery made of the store."""

    def __init__(self, stage: Stage, engine: Engine, alive: Mapping[int, Process], supervised: bool) -> None:
        """``alive``: processes by number, with ``alive`` and ``heirs``, as pidfds and lifelines show them."""
        self._stage = stage
        self._processes = alive
        self._supervised = supervised
        self.engine = engine
        self.boot_id = engine.boot_id
        self.doomed = False
        self.alive = True
        self.attendance = Attendance(self._report, self._forget_entry, supervised)
        self.copier = Copier(stage)
        self._routes: dict[tuple[int, int], tuple[Socket, commands.Request]] = {}
        self._last = stage.now
        self._running_s = 0.0
        self._next_tick = stage.now

    def count(self) -> None:
        """At its end: what the engine has counted."""
        counters = self.engine.snapshot()["counters"]
        self._stage.events.update({name: counters[name] for name in COUNTED})

    def adopt(self) -> None:
        """Watch what the store has of an earlier daemon's members."""
        for session, process in self._stage.store.entries.items():
            self.attendance.seat_ghost(session, process)
        for one in self.engine.sessions.all():
            if one.id not in self._stage.store.entries:
                raise Mismatch("I14", f"session {one.id} is in the table, but nothing in the store to watch it by")

    # -- commands -------------------------------------------------------------------------------------------------

    def carry_out(self, command: commands.Command, socket: Socket | None = None) -> commands.Outcome:
        """``socket``: where the reply goes. Raises Killed if this was the last command; it is stored in part then."""
        self._advance()
        outcome = self.engine.step(command, self._stage.now)
        for act in self.ORDER:
            act(self, command, outcome, socket)
        return outcome

    def _store(self, command: commands.Command, outcome: commands.Outcome, socket: Socket | None) -> None:
        stage, tables = self._stage, self._stage.store.tables
        if not self.doomed:
            apply_all(tables, outcome.writes)
            return
        cut = kill_during(stage.rng, tables, lambda: apply_all(tables, outcome.writes))
        stage.note("torn" if outcome.writes else "killed", f"{_name(command)}: {cut}")
        raise Killed

    def _answer(self, command: commands.Command, outcome: commands.Outcome, socket: Socket | None) -> None:
        """What leaves the daemon because of a command."""
        stage = self._stage
        if isinstance(command, commands.Request) and socket is not None:
            if outcome.reply is None:
                self._routes.pop((command.session, command.id), None)
                self._routes[command.session, command.id] = (socket, command)
                stage.events["queued"] += 1
            else:
                stage.store.scopes.learn(command, outcome.reply)
                self._count(command, outcome.reply)
                self._send(socket, command.id, outcome.reply)
        for granted in outcome.granted:
            self._grant(granted)
        for session in outcome.ended:
            stage.note("revoked", f"session {session}")
            self.attendance.ended(session, self.engine.awaits_mapping_gone(session))
            self._forget_routes(session)
        for effect in outcome.effects:
            self.copier.take(effect)

    ORDER = (_store, _answer)
    """What is done about an outcome, one after the other: a page that a worker knows of is in the table."""

    def _advance(self) -> None:
        """As the real daemon counts its running time: a pause is one tick at most."""
        self._running_s += min(self._stage.now - self._last, TICK_S)
        self._last = self._stage.now

    def tick(self) -> None:
        self._advance()
        self.carry_out(commands.Tick(self._running_s))
        self._next_tick = self._stage.now + TICK_S

    def tick_is_due(self) -> bool:
        deadline = self.engine.next_deadline()
        due = self._next_tick if deadline is None else min(deadline, self._next_tick)
        if self.engine.window_open:
            due = min(due, self._last + self._stage.config.server.resume_timeout_s - self._running_s)
        return self.engine.has_work() or self._stage.now >= due

    # -- requests -------------------------------------------------------------------------------------------------

    def serve(self, socket: Socket) -> None:
        """The next request of a socket."""
        stage = self._stage
        socket.served_by = self.boot_id
        frame = socket.requests.popleft()
        if stage.rng.random() < stage.habits.twice:
            socket.requests.appendleft(frame)
            stage.note("twice", socket.owner)
        try:
            request = wire.decode_request(frame, stage.config.limits)
        except RadixKVError as error:
            request_id = int(error.details.get("request", wire.UNREADABLE))
            self._send(socket, request_id, commands.Failure(error.code, error.message))
            return
        stage.note("request", f"{socket.owner} {request.session}.{request.epoch} #{request.id} {_name(request)}")
        outcome = self.carry_out(request, socket)
        if isinstance(request.body, commands.Bye) and isinstance(outcome.reply, commands.Done):
            self.attendance.ended(request.session, mapped=False)
            self._forget_routes(request.session)

    def _count(self, request: commands.Request, reply: commands.Reply) -> None:
        body = request.body
        if isinstance(reply, commands.Adopted):
            self._stage.events["adopted"] += 1
        if isinstance(reply, commands.Failure) and isinstance(body, commands.Step) and body.commit:
            self._stage.events["late commit"] += reply.code == SessionLost.code

    def _send(self, socket: Socket, request: int, reply: commands.Reply) -> None:
        stage = self._stage
        frame = wire.encode_reply(request, reply)
        if isinstance(reply, commands.Failure):
            stage.note(f"says {reply.code}", f"{socket.owner} #{request}: {reply.message}")
        if socket.closed or socket.served_by != self.boot_id:
            stage.note("peer gone", socket.owner)
        elif socket.full or self._is_full(socket, reply):
            socket.full = True
            stage.note("reply dropped", f"{socket.owner} #{request}")
        else:
            socket.replies.append(frame)

    def _is_full(self, socket: Socket, reply: commands.Reply) -> bool:
        """Nobody can be so slow while he resumes: he has asked for nothing else."""
        return not isinstance(reply, commands.Resumed) and self._stage.rng.random() < self._stage.habits.drops_replies

    def _grant(self, granted: commands.Granted) -> None:
        route = self._routes.pop((granted.session, granted.request), None)
        if route is None:
            return
        socket, request = route
        self._stage.store.scopes.learn(request, granted.reply)
        self._stage.note("granted" if isinstance(granted.reply, commands.Reserved) else "in vain", socket.owner)
        self._send(socket, granted.request, granted.reply)

    def _forget_routes(self, session: int) -> None:
        for key in [key for key in self._routes if key[0] == session]:
            del self._routes[key]

    # -- the attach socket ----------------------------------------------------------------------------------------

    def accept(self, pipe: AttachPipe) -> None:
        pipe.accepted_by = self.boot_id

    def answer(self, pipe: AttachPipe) -> None:
        packet = pipe.packets.popleft()
        try:
            answer = self._meet(pipe, wire.decode_attach_request(packet))
        except RadixKVError as error:
            answer = commands.failure(error)
        pipe.answers.append(wire.encode_attach(answer))

    def _meet(self, pipe: AttachPipe, request: commands.AttachRequest) -> commands.AttachReply:
        match request:
            case commands.Hello():
                return self._hello(pipe)
            case commands.Rejoin():
                return self._rejoin(pipe, request)
            case commands.MapPool():
                return self._map_pool(request)
        raise BadRequest("not a question for an attach socket")

    def _hello(self, pipe: AttachPipe) -> commands.AttachReply:
        stage = self._stage
        session, token = stage.fresh(), stage.rng.randbytes(16)
        if self._supervised:
            stage.store.entries[session] = pipe.process
        outcome = self.carry_out(commands.OpenSession(session, token, "worker"))
        if isinstance(outcome.reply, commands.Failure):
            stage.store.entries.pop(session, None)
            return outcome.reply
        (record,) = (write for write in outcome.writes if isinstance(write, commands.SessionRecord))
        self.attendance.seat(session, pipe)
        stage.note("hello", f"process {pipe.process} is session {session}")
        return self._welcome(record)

    def _rejoin(self, pipe: AttachPipe, request: commands.Rejoin) -> commands.AttachReply:
        ghost = self.attendance.of(request.session)
        if ghost is None or ghost.over or ghost.pipe is not None or ghost.process != pipe.process:
            raise SessionLost("there is no session to go on with")
        outcome = self.carry_out(commands.RejoinSession(request.session, request.token))
        if isinstance(outcome.reply, commands.Failure):
            return outcome.reply
        (record,) = (write for write in outcome.writes if isinstance(write, commands.SessionRecord))
        self.attendance.come_back(request.session, pipe)
        self._stage.note("rejoin", f"process {pipe.process}, session {record.session}, epoch {record.epoch}")
        return self._welcome(record)

    def _welcome(self, record: commands.SessionRecord) -> commands.Welcome:
        server = self._stage.config.server
        return commands.Welcome(
            version=commands.PROTOCOL_VERSION,
            session=record.session,
            epoch=record.epoch,
            slot=record.slot,
            token=record.token,
            boot_id=self.boot_id,
            cache_id=self._stage.store.cache_id,
            pools=[pool.name for pool in self._stage.config.pools],
            heartbeat_s=server.heartbeat_s,
            lease_s=server.lease_s,
            message_bytes=self._stage.config.limits.message_bytes,
            resumes=self._supervised,
        )

    def _map_pool(self, request: commands.MapPool) -> commands.AttachReply:
        pool = next((pool for pool in self._stage.config.pools if pool.name == request.pool), None)
        if pool is None:
            raise BadRequest(f"there is no pool {request.pool!r}")
        size = pool.spec.page_size
        return commands.PoolMap(
            name=pool.name,
            pages=pool.pages,
            arena_bytes=pool.arena_bytes,
            table_bytes=0,
            spec={"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": "float32", "page_size": size},
            layout=Layout.of(pool.spec).as_dict(),
            host_pages=pool.host_pages,
        )

    # -- the ends of workers --------------------------------------------------------------------------------------

    def _report(self, command: commands.EndSession | commands.MappingGone) -> bool:
        self.carry_out(command)
        self._stage.note(type(command).__name__, f"session {command.session}")
        self._forget_routes(command.session)
        return self.engine.awaits_mapping_gone(command.session)

    def _forget_entry(self, session: int) -> None:
        self._stage.store.entries.pop(session, None)

    def ends(self) -> list[tuple[str, Member]]:
        """What could be noticed now: (which descriptor, whose)."""
        found = []
        for member in self.attendance.members:
            process = self._processes[member.process]
            if not member.closed and member.pipe is not None and not member.pipe.worker_end:
                found.append(("disconnected", member))
            if not member.dead and not process.alive:
                found.append(("died", member))
            if not member.released and not process.alive and not process.heirs:
                found.append(("let_go", member))
        return found

    def notice(self, what: str, member: Member) -> None:
        getattr(self.attendance, what)(member)


def recovered(stage: Stage, boot_id: str, killed: bool) -> Engine | None:
    """What ``radixkv/daemon/starting.py`` does with the memory in the store. None: it was killed while it wrote."""
    store = stage.store
    images = {name: reader.image() for name, reader in store.readers.items()}
    sessions = [reader.sessions() for reader in store.readers.values()]
    found = Found(images, sessions, list(store.entries))

    def write() -> None:
        for table in store.tables.values():
            table.repair()
        apply_all(store.tables, writes)

    engine, writes = recover(stage.config, (boot_id, store.cache_id), found)
    if killed:
        stage.note("killed recovering", kill_during(stage.rng, store.tables, write))
        return None
    write()
    return engine


def _name(command: commands.Command) -> str:
    return type(command.body if isinstance(command, commands.Request) else command).__name__
