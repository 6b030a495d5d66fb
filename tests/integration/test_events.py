"""The event stream of real daemons: whoever listens, or asks for what it missed, knows what a lookup knows."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import radixkv
from radixkv.ipc.event_feed import BOOT_SHIFT
from tests.conftest import wait_until
from tests.integration.listener import Listener
from tests.integration.tiered import NAMESPACE, answer, document, work

DYNAMO = Path(__file__).parents[2] / ".venv-dynamo" / "bin" / "python"


class Told:
    """A daemon that tells, a client of it, and a listener."""

    def __init__(self, daemon: Any) -> None:
        self.daemon = daemon
        self.client = radixkv.connect(daemon.endpoint, timeout=30.0)
        self.pool = self.client.pool()
        self.listeners: list[Listener] = []
        self.listener = self.listen()

    def listen(self, **how: int) -> Listener:
        events = self.daemon.config.events
        self.listeners.append(Listener(events.endpoint, events.replay_endpoint, **how))
        return self.listeners[-1]

    def hear(self, start: int | None = None, listener: Listener | None = None) -> list[int]:
        """A replay, when all is told that there is: that is done behind the replies, and copies end when they like."""
        wait_until(self._is_quiet, what="the end of all copies")
        return (listener or self.listener).replay(start)

    def _is_quiet(self) -> bool:
        stats = self.client.stats()
        return stats.pools["default"].copies == 0 and stats.events.backlog_bytes == 0

    def compare(self, listener: Listener | None = None) -> None:
        """About every document, all of it: is what the listener believes what a lookup finds?"""
        prompts = [document(number, 32) for number in range(8)]
        found = self.pool.lookup(prompts, namespace=NAMESPACE)
        believed = [(listener or self.listener).tokens(prompt) for prompt in prompts]
        assert believed == [(one.device_tokens, one.host_tokens) for one in found]

    def close(self) -> None:
        self.client.close()
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def told(daemon_factory: Any, tmp_path: Path) -> Iterator[Callable[..., Told]]:
    """Starts a daemon that tells; ``events`` are further keys of that section, all others go to ``daemon_factory``."""
    made: list[Told] = []

    def start(events: dict[str, Any] | None = None, **how: Any) -> Told:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        places = {"endpoint": f"ipc://{directory}/pub", "replay_endpoint": f"ipc://{directory}/replay"}
        made.append(Told(daemon_factory(events={**places, **(events or {})}, **how)))
        return made[-1]

    yield start
    for one in made:
        one.close()


# -- what is told ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [{}, {"format": "map", "hash": "bytes", "topic": "kv"}], ids=["array", "map"])
def test_who_listens_knows_what_a_lookup_finds(told: Any, events: dict[str, Any]) -> None:
    one = told(events, pools=[{"pages": 16, "host_pages": 24}])
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for turn in range(10):
        work(one.pool, seed + turn, 8)
        one.hear()
        one.compare()
    assert len(one.listener.blocks["CPU"]) > 4
    seen = one.client.stats().events
    last = one.listener.last
    assert (seen.pool, (seen.boot << BOOT_SHIFT) + seen.batches) == ("default", last + 1)
    assert (seen.replays, seen.replays_running, seen.snapshots, seen.backlog_bytes) == (10, 0, 0, 0)
    assert seen.replayed_batches == seen.batches == seen.ring_batches == (last & 2**BOOT_SHIFT - 1) + 1
    one.pool.invalidate(NAMESPACE)
    one.hear()
    assert one.listener.blocks == {"GPU": {}, "CPU": {}}


def test_what_is_published_has_no_holes(told: Any) -> None:
    """Live alone, from the moment on when it arrives: the first message says where that is."""
    one = told()
    for turn in range(50):
        answer(one.pool, document(turn, 16))
        if one.listener.listen(wait_ms=20):
            break
    first = one.listener.last
    for turn in range(50, 80):
        answer(one.pool, document(turn, 16))
    late = one.listen()
    late.replay(0)
    while one.listener.last < late.last:
        assert one.listener.listen()
    assert one.listener.holes == 1, "the first"
    assert late.last > first
    assert one.listener.blocks["GPU"].keys() <= late.blocks["GPU"].keys()


def test_a_huge_commit_is_told_in_pieces_and_other_work_goes_on(told: Any) -> None:
    one = told(pools=[{"pages": 12_000, "page_size": 16}], paranoid=False)
    tokens = list(range(160_000))
    with one.pool.reserve(tokens, namespace=NAMESPACE) as seq:
        seq.commit(len(tokens))
    assert one.pool.lookup(tokens, namespace=NAMESPACE).device_tokens == 160_000
    wait_until(lambda: len(one.listener.replay()) == 0 and len(one.listener.blocks["GPU"]) == 10_000)
    assert one.listener.tokens(tokens, 16) == (160_000, 0)


# -- holes, replays, restarts ---------------------------------------------------------------------------------------


def test_what_the_buffer_does_not_have_is_told_as_a_whole(told: Any) -> None:
    one = told({"buffer_batches": 3}, pools=[{"pages": 16, "host_pages": 24}])
    one.hear(0)
    begun = one.listener.last
    for turn in range(12):
        answer(one.pool, document(turn % 8, 32))
    came = one.hear()
    assert came[0] > begun + 3, "an explicit hole, then everything at once"
    assert one.listener.last == came[-1] and len(came) <= 4
    one.compare()
    assert one.hear() == []
    answer(one.pool, document(3, 32))
    assert one.hear(), "and it goes on from there"
    one.compare()
    late = one.listen()
    one.hear(0, late)
    one.compare(late)
    assert late.replay(late.last + 1000) == [late.last], "from the future: everything, too"


def test_a_warm_restart_tells_what_was_recovered(told: Any) -> None:
    one = told(pools=[{"pages": 16, "host_pages": 24}], supervised=True, resume_timeout_s=1.0)
    for number in range(4):
        answer(one.pool, document(number, 32))
    one.pool.invalidate(radixkv.Namespace("another"))
    one.hear(0)
    one.compare()
    boot, before = one.listener.last >> BOOT_SHIFT, one.listener.last
    one.daemon.kill_daemon()
    one.daemon.wait_ready()
    came = one.hear()
    assert came[0] > before and came[0] >> BOOT_SHIFT > boot, "another daemon, and a hole before its first batch"
    assert came[0] % 2**BOOT_SHIFT == 0
    one.compare()
    assert one.listener.blocks["GPU"]
    for number in range(3, 7):
        answer(one.pool, document(number, 32))
    one.hear()
    one.compare()


def test_after_a_cold_start_nothing_is_believed(told: Any, daemon_factory: Any) -> None:
    one = told()
    answer(one.pool, document(1, 32))
    one.listener.replay(0)
    assert one.listener.blocks["GPU"]
    one.daemon.kill()
    events = one.daemon.config.events
    again = {"endpoint": events.endpoint, "replay_endpoint": events.replay_endpoint}
    daemon_factory(events=again, endpoint=one.daemon.endpoint)
    before = one.listener.last
    assert one.listener.replay()[0] > before
    assert one.listener.blocks == {"GPU": {}, "CPU": {}}


# -- who does not behave --------------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def test_who_never_reads_blocks_nobody_and_takes_bounded_memory(told: Any) -> None:
    """Two subscribers and an asker that take nothing, while 60 MiB and more are told to those who do."""
    one = told({"hwm": 8, "buffer_batches": 8}, pools=[{"pages": 600, "page_size": 16}], paranoid=False)
    deaf = [one.listen(queue=1) for _ in range(2)]

    def turn(number: int) -> None:
        tokens = [number % 256, *range(8191)]
        with one.pool.reserve(tokens, namespace=NAMESPACE) as seq:
            seq.commit(8192)

    for number in range(20):
        turn(number)
    for listener in deaf:
        for _ in range(20):
            listener.ask(0)
    before = resident_bytes(one.daemon.pid)
    for number in range(20, 1000):
        turn(number)
        if number % 100 == 0:
            deaf[0].ask(0)
    grown = resident_bytes(one.daemon.pid) - before
    assert grown < 24 * 2**20, f"{grown / 2**20:.1f} MiB more"
    one.hear()
    assert one.listener.tokens([999 % 256, *range(8191)], 16) == (8192, 0)
    while one.listener.listen(wait_ms=0):
        pass
    assert one.daemon.process.poll() is None


def test_what_is_no_request_is_dropped(told: Any) -> None:
    one = told()
    context = zmq.Context()
    try:
        asker = context.socket(zmq.DEALER)
        asker.connect(one.daemon.config.events.replay_endpoint)
        strange: list[list[bytes]] = [
            [b""], [b"", b"short"], [b"", bytes(8), b"more"], [b"x", bytes(8)], [bytes(8)], [b"", bytes(1000)],
        ]  # fmt: skip
        for frames in strange:
            asker.send_multipart(frames)
        answer(one.pool, document(1, 16))
        assert one.listener.replay(0)
        one.compare()
        assert not asker.poll(0)
        assert one.client.stats().events.replays_malformed == 5, (
            "and the one that was too long took its connection along"
        )
    finally:
        context.destroy(linger=0)


# -- the daemon's start and end -------------------------------------------------------------------------------------


def test_sockets_are_private_and_go_with_the_daemon(told: Any) -> None:
    one = told()
    paths = [Path(place.removeprefix("ipc://")) for place in (
        one.daemon.config.events.endpoint, one.daemon.config.events.replay_endpoint)]  # fmt: skip
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in paths)
    assert one.daemon.stop() == 0
    assert not any(path.exists() for path in paths)


@pytest.mark.parametrize(
    ("address", "code", "words"),
    [
        ("ipc:///no/such/directory/x", 2, "events.endpoint = 'ipc:///no/such/directory/x' cannot be bound: No such"),
        ("ipc:///dev/null", 2, "events.endpoint = 'ipc:///dev/null' cannot be bound: something else is there"),
        ("tcp://256.0.0.1:1", 2, "events.endpoint = 'tcp://256.0.0.1:1' cannot be bound: "),
        ("tcp://127.0.0.1:99999", 2, "events.endpoint = 'tcp://127.0.0.1:99999' is not allowed; allowed: ipc:// and"),
        ("http://localhost", 2, "events.endpoint = 'http://localhost' is not allowed"),
        (None, 3, "somebody listens at"),
    ],
    ids=["no directory", "no socket", "no address", "no port", "no such kind", "in use"],
)
def test_an_address_that_cannot_be_is_refused(
    told: Any, serve_command: Any, tmp_path: Path, address: str | None, code: int, words: str
) -> None:
    if address is None:
        address = told().daemon.config.events.endpoint
    pool = "--pool=layers=1,kv_heads=1,head_dim=8,page_size=4,pages=8"
    command = serve_command(tmp_path, pool, f"--events.endpoint={address}")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code and words in ended.stderr, ended.stderr


def test_who_tells_nobody_does_not_load_any_of_this() -> None:
    code = "import sys, radixkv.daemon; sys.exit('radixkv.ipc.events' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- Dynamo ---------------------------------------------------------------------------------------------------------


class Indexer:
    """``python -m dynamo.indexer`` of the ai-dynamo wheels."""

    def __init__(self, port: int, log: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [str(DYNAMO), "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"],
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        wait_until(self._answers, timeout=60, what="the indexer's start")

    def _answers(self) -> bool:
        assert self.process.poll() is None, "it has ended: somebody else may have got the port"
        try:
            return bool(urllib.request.urlopen(f"{self._url}/health", timeout=1).status == 200)
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def register(self, endpoint: str, replay_endpoint: str) -> None:
        places = {"endpoint": endpoint, "replay_endpoint": replay_endpoint}
        self.post("/register", {"instance_id": 1, **places, "model_name": "m", "block_size": 4})

    def cached_tokens(self, prompt: list[int]) -> tuple[int, int]:
        """On the device; on the device and behind that in the host tier."""
        found = self.post("/query", {"token_ids": prompt, "model_name": "m"})["instances"].get("1", {})
        return found.get("gpu", 0), found.get("cpu", 0)


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    if not DYNAMO.exists():
        pytest.skip("ai-dynamo is not installed in .venv-dynamo: its indexer was not asked")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = Indexer(port, tmp_path / "indexer.log")
    yield started
    started.process.kill()
    started.process.wait()


@pytest.mark.parametrize("form", [{}, {"format": "map", "buffer_batches": 2}], ids=["array", "map, as a whole"])
def test_dynamos_indexer_answers_what_a_lookup_answers(told: Any, indexer: Indexer, form: dict[str, Any]) -> None:
    """Also what was cached before it came, whether the buffer has that or not, and after another daemon has come."""
    one = told(form, pools=[{"pages": 16, "host_pages": 24}], supervised=True, resume_timeout_s=0.5)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    prompts = [document(number, 32) for number in range(8)]

    seen: list[str] = []

    def agrees() -> bool:
        found = one.pool.lookup(prompts, namespace=NAMESPACE)
        wanted = [(each.device_tokens, each.device_tokens + each.host_tokens) for each in found]
        known = [indexer.cached_tokens(prompt) for prompt in prompts]
        seen[:] = [f"a lookup knows {wanted}, the indexer {known}"]
        return known == wanted

    def comes_to_agree(seed: int) -> None:
        """It hears nothing before its socket is connected, and asks for what it missed when it hears something.

        Each time there is something new: what it has heard of another daemon may agree by chance, and until it hears
        this one what is told is lost.
        """
        for turn in range(30):
            work(one.pool, seed + turn, 3)
            prompts.append(document(len(prompts), 12))
            answer(one.pool, prompts[-1])
            with contextlib.suppress(AssertionError):
                wait_until(agrees, timeout=2.0)
                return
        raise AssertionError(f"the indexer never knew what a lookup knows: {seen}")

    def knows_at_once() -> None:
        """Without anything happening any more."""
        try:
            wait_until(agrees, timeout=60)
        except AssertionError as error:
            raise AssertionError(str(seen)) from error

    work(one.pool, seed, 20)
    events = one.daemon.config.events
    indexer.register(events.endpoint, events.replay_endpoint)
    comes_to_agree(seed)
    for turn in range(5):
        work(one.pool, seed + turn, 10)
        knows_at_once()
    one.daemon.kill_daemon()
    one.daemon.wait_ready()
    comes_to_agree(seed)
    one.pool.invalidate(NAMESPACE)
    knows_at_once()
