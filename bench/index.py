"""``python -m bench.index``: what the engine costs, without sockets and mapped memory. See docs/performance.md."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import islice

from bench import scale, workload
from bench.core import LATER, LIMITS, NAMESPACE, NOW, SESSION, Admission, Core, churning
from bench.rows import Row, report, row
from bench.stopwatch import quiet, summarize, time_each
from radixkv.commands import Commit, Extend, Request, Step, Stepped
from radixkv.ipc import wire
from radixkv.tree.node import Node
from radixkv.types import TOKEN_BYTES

Maker = Callable[[Core, bytes], Admission]

EDGES = (1, 16, 64)
ROUNDS = 40
ADMISSIONS = 400
SMALL_ADMISSIONS = 2_000
WARM = 20

STEP_SEQUENCES = 256
STEP_BAR_US = 500.0
MATCH_BAR_PER_MEMCMP = 5.0
MATCH_BAR_US_PER_EDGE = 0.7


def main() -> None:
    report(rows(), sys.argv[1:])


def rows() -> Iterator[Row]:
    yield from match_rows()
    yield admission_row()
    yield churn_row("index.churn_us", workload.W4, ADMISSIONS)
    yield churn_row("index.churn_small_us", workload.W4B, SMALL_ADMISSIONS)
    yield churn_row("index.churn_small_in_three_us", workload.W4B, SMALL_ADMISSIONS, Core.admission_in_three)
    yield step_row()
    yield from scale.rows()


# -- match --------------------------------------------------------------------------------------------------------


def match_rows() -> Iterator[Row]:
    """Match of 32,768 cached tokens with page ids, over paths of 1, 16 and 64 edges, beside a memcmp of the same bytes.

    Both go over the same eight prompts of 128 KiB in the same order, a round each in turns.
    """
    core, prompts = match_tree()
    root = core.pool.namespaces.open(NAMESPACE)[0].root
    tree = core.pool.tree

    def match(tokens: bytes) -> bytes:
        return b"".join(tree.match(root, tokens).parts)

    for edges, sequences in prompts.items():
        copies = [bytes(bytearray(tokens)) for tokens in sequences]
        pairs = list(zip(sequences, copies, strict=True))
        if {edges_of(core, root, tokens) for tokens in sequences} != {edges}:
            raise RuntimeError(f"the paths should be {edges} edges long")
        matched, compared = [], []
        with quiet():
            for _ in range(ROUNDS):
                matched += time_each(match, sequences)
                compared += time_each(_equal, pairs)
        memcmp = summarize(compared).scaled(1e-3)
        bar = MATCH_BAR_PER_MEMCMP * memcmp.p50 + MATCH_BAR_US_PER_EDGE * edges
        yield row(f"index.match_32768_us_e{edges}", "us", summarize(matched).scaled(1e-3), bar, memcmp.p50)
        if edges == EDGES[0]:
            yield row("index.memcmp_us", "us", memcmp)


def match_tree() -> tuple[Core, dict[int, list[bytes]]]:
    """1,000 sequences; by number of edges, the eight of 32,768 tokens whose path has so many."""
    core = Core(workload.TREE_POOL_PAGES)
    source = workload.generator(5)
    tree = workload.tree()
    core.admit_all(tree.conversations[: -len(EDGES) * workload.LONG_SEQUENCES + workload.LONG_SEQUENCES])
    prompts: dict[int, list[bytes]] = {}
    for edges in EDGES:
        prompts[edges] = []
        for _ in range(workload.LONG_SEQUENCES):
            tokens = workload.fresh(source, workload.LONG_TOKENS)
            core.admit(tokens.tobytes())
            core.admit_all(workload.forks(tokens, edges, source))
            prompts[edges].append(tokens.tobytes())
    return core, prompts


def edges_of(core: Core, root: Node, tokens: bytes) -> int:
    return len(core.pool.tree.match(root, tokens).parts)


def _equal(pair: tuple[bytes, bytes]) -> bool:
    return pair[0] == pair[1]


# -- admissions ---------------------------------------------------------------------------------------------------


def admission_row() -> Row:
    """W3: 4,096 tokens, half of them cached, into the tree of 1,000 sequences."""
    tree = workload.tree()
    core = Core(workload.TREE_POOL_PAGES)
    core.admit_all(tree.admissions())
    new_pages = (workload.CONVERSATION_TOKENS - workload.W3_CACHED_TOKENS) // workload.PAGE_SIZE
    requests = islice(tree.half_cached(), WARM + ADMISSIONS)
    return _admissions(
        "index.admit_4096_us", core, [core.admission(tokens.tobytes()) for tokens in requests], new_pages
    )


def churn_row(name: str, work: workload.Churn, count: int, made_by: Maker = Core.admission) -> Row:
    """W4, W4b: the same into a full pool, where each admission evicts what it needs."""
    core = churning(work)
    evicted = core.pool.counters["evicted_pages"]
    requests = islice(workload.stream(work), work.fill, work.fill + WARM + count)
    made = _admissions(name, core, [made_by(core, tokens.tobytes()) for tokens in requests], work.new_pages)
    if core.pool.counters["evicted_pages"] - evicted < count * work.new_pages:
        raise RuntimeError("every admission into a full pool should evict")
    return made


def _admissions(name: str, core: Core, admissions: list[Admission], new_pages: int) -> Row:
    committed = core.pool.counters["committed_pages"]
    with quiet():
        time_each(core.carry_out, admissions[:WARM])
        measured = time_each(core.carry_out, admissions[WARM:])
    core.check(committed, len(admissions) * new_pages)
    return row(name, "us", summarize(measured).scaled(1e-3))


# -- one decode step ----------------------------------------------------------------------------------------------


def step_row() -> Row:
    """A decode step of 256 sequences: the message's bytes in, the reply's bytes out.

    Each is extended by a token. One sixteenth of them begin a page: those commit the full page before it first.
    """
    core = Core(100_000)
    lengths = {core.next_sequence(): 1024 + i % workload.PAGE_SIZE for i in range(STEP_SEQUENCES)}
    source = workload.generator(6)
    for seq, length in lengths.items():
        core.reserve(seq, workload.fresh(source, length).tobytes())
        core.ask(Step(commit=[Commit(seq, length)]))
    frames = list(_step_frames(core, lengths, WARM + ADMISSIONS))

    def step(frame: bytes) -> bytes:
        request = wire.decode_request(frame, LIMITS)
        reply = core.engine.step(request, NOW).reply
        assert reply is not None
        return wire.encode_reply(request.id, reply)

    _check_step(step(frames[0]))
    with quiet():
        time_each(step, frames[1:WARM])
        measured = time_each(step, frames[WARM:])
    return row("index.step_256_us", "us", summarize(measured).scaled(1e-3), STEP_BAR_US)


def _step_frames(core: Core, lengths: dict[int, int], count: int) -> Iterator[bytes]:
    token = bytes(TOKEN_BYTES)
    for _ in range(count):
        full = [Commit(seq, length) for seq, length in lengths.items() if length % workload.PAGE_SIZE == 0]
        body = Step(commit=full, extend=[Extend(seq, token) for seq in lengths])
        yield wire.encode_request(Request(SESSION, core.epoch, core.next_request(), LATER, body))
        for seq in lengths:
            lengths[seq] += 1


def _check_step(frame: bytes) -> None:
    """The work is what the row's name says: 16 pages committed, 16 appended, nothing refused."""
    _, reply = wire.decode_reply(frame)
    assert type(reply) is Stepped
    pages = [new for new in reply.extend if isinstance(new, bytes)]
    appended = sum(1 for new in pages if new)
    if (len(pages), appended, reply.commit) != (STEP_SEQUENCES, 16, [None] * 16):
        raise RuntimeError(f"a step of {len(pages)} extends appended {appended} pages, committed {len(reply.commit)}")


if __name__ == "__main__":
    main()
