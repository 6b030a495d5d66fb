"""Single flight: who would compute what another worker is computing waits for that, holding nothing."""

import random

import pytest

from fuzz.pairs.watched import Watched
from fuzz.pairs.worker import Held, Worker, code
from radixkv import commands
from radixkv.config import Limits

A, B, C, D = ([token] * 4 for token in (1, 2, 3, 4))


def watched(count, pages=32, **settings):
    pair = Watched(pages, **settings)
    return (pair, *[Worker(pair) for _ in range(count)])


def join(worker, prompt, join_s=9.0, **options):
    """Ask, and be told to wait. Returns what it is known by."""
    assert worker.try_reserve(prompt, join_s=join_s, **options) is None
    return worker.session, worker.pair.numbers[worker.session]


def answer(pair, key):
    return pair.late.pop(key)


def test_the_second_waits_for_the_commit_of_the_first_and_shares_its_pages():
    pair, one, two = watched(2)
    first = one.reserve([*A, *B, *C, 9])
    waits = join(two, [*A, *B, *C, *D])
    assert pair.engine.snapshot()["queued"] == 1
    assert pair.engine.snapshot()["pools"]["a"]["pages"]["private"] == 4
    one.commit(first, 8)  # the third page is still being computed
    assert not pair.late
    one.commit(first, 12)
    granted = answer(pair, waits)
    assert granted.cached_tokens == 12
    assert pair.counter("joined") == 1


def test_who_does_not_ask_for_it_computes_by_itself():
    _, one, two = watched(2)
    one.reserve([*A, *B])
    assert two.reserve([*A, *B]).cached == 0


@pytest.mark.parametrize("how", ["free", "death", "truncate", "handoff", "bye", "invalidate"])
def test_the_writer_is_gone(how):
    """Whoever waits is woken at once, and computes it itself."""
    pair, one, two = watched(2)
    first = one.reserve([*A, *B])
    waits = join(two, [*A, *B, 7])
    match how:
        case "free":
            one.free(first)
        case "death":
            pair.do(commands.EndSession(one.session, mapped=True, reason="killed"))
        case "truncate":
            one.truncate(first, 2)
        case "handoff":
            one.ask(commands.Handoff(first.seq, b"t" * 16, 100.0))
        case "bye":
            one.ask(commands.Bye())
        case "invalidate":
            two.invalidate()
    assert answer(pair, waits).cached_tokens == 0


def test_of_those_who_waited_for_a_dead_writer_one_computes_and_the_others_wait_for_him():
    pair, one, two, three = watched(3)
    first = one.reserve([*A, *B])
    waits = [join(two, [*A, *B, 7]), join(three, [*A, *B, 8])]
    one.free(first)
    assert list(pair.late) == waits[:1]
    heir = Held(1, answer(pair, waits[0]))
    two.commit(heir, 8)
    assert answer(pair, waits[1]).cached_tokens == 8


def test_the_deadline_ends_the_wait():
    pair, one, two = watched(2)
    one.reserve([*A, *B])
    waits = join(two, [*A, *B], join_s=3.0)
    assert pair.engine.next_deadline() == pair.now + 3.0
    pair.tick(2.9)
    assert not pair.late
    pair.tick(0.1)
    assert answer(pair, waits).cached_tokens == 0


def test_afterwards_it_may_have_to_wait_for_pages_and_is_told_how_long():
    pair, one, two = watched(2, pages=4)
    first = one.reserve([*A, *B])
    one.reserve([*C, *D])
    waits = join(two, [*A, 9], join_s=3.0, wait_s=5.0)
    pair.tick(3.0)
    assert not pair.late
    pair.tick(5.0)
    assert code(answer(pair, waits)) == "out_of_pages"
    waits = join(two, [*A, 9], join_s=3.0)
    one.commit(first, 8)
    refused = answer(pair, waits)
    assert code(refused) == "out_of_pages"


def test_what_can_never_be_is_refused_at_once():
    _, one, two = watched(2, pages=4)
    one.reserve([*A, *B])
    assert code(two.try_reserve([*A, *range(100, 120)], join_s=9.0)) == "out_of_pages"
    assert code(two.try_reserve(A, join_s=9.0, last_page="lend")) == "bad_request"


def test_nobody_waits_for_himself_nor_in_another_namespace_nor_behind_other_tokens():
    _, one, two = watched(2)
    one.reserve([*A, *B])
    assert one.reserve([*A, *B], join_s=9.0).cached == 0
    assert two.reserve([*A, *B], b"other", join_s=9.0).cached == 0
    assert two.reserve([*C, *B], join_s=9.0).cached == 0
    assert two.reserve([1, 1, 1], join_s=9.0).cached == 0
    assert two.reserve([1, 1, 1, 2, 5], join_s=9.0).cached == 0


def test_behind_his_own_one_may_wait_for_who_computes_the_same():
    pair, one, two = watched(2)
    one.reserve([*A, *B])
    first = two.reserve([*A, *B])
    waits = join(one, [*A, *B, 7])
    two.commit(first, 8)
    assert answer(pair, waits).cached_tokens == 8


def test_what_is_cached_is_not_waited_for():
    pair, one, two = watched(2)
    first = one.compute([*A, *B])
    one.extend(first, [*C, *D])
    assert two.reserve([*A, *B, 7], join_s=9.0).cached == 8
    waits = join(two, [*A, *B, *C])
    one.commit(first, 16)
    assert answer(pair, waits).cached_tokens == 11


def test_sessions_never_wait_for_one_another():
    """Each computes what the other one asks for next: the second is not made to wait."""
    _, one, two, three = watched(3)
    one.reserve(A)
    two.reserve(B)
    three.reserve(C)
    join(one, [*B, 9])
    join(two, [*C, 9])
    assert three.reserve([*A, 9], join_s=9.0).cached == 0


def test_a_cancelled_one_and_a_dead_one_wait_no_longer():
    pair, one, two, three = watched(3)
    one.reserve(A)
    cancelled, dead = join(two, [*A, 8]), join(three, [*A, 9])
    two.ask(commands.Cancel(cancelled[1]))
    assert code(answer(pair, cancelled)) == "timeout"
    pair.do(commands.EndSession(three.session, mapped=False, reason="killed"))
    assert code(answer(pair, dead)) == "session_lost"
    assert pair.engine.snapshot()["queued"] == 0


def test_a_full_line_and_a_drain():
    pair, one, two = watched(2, limits=Limits(queued=1))
    one.reserve(A)
    waits = join(two, [*A, 8])
    assert two.reserve([*A, 9], join_s=9.0).cached == 0
    pair.do(commands.Drain())
    assert code(answer(pair, waits)) == "draining"


def test_an_adopter_is_waited_for():
    pair, one, two, three = watched(3)
    first = one.reserve([*A, *B])
    one.ask(commands.Handoff(first.seq, b"t" * 16, 100.0))
    two.ask(commands.Adopt("a", b"t" * 16, 77))
    waits = join(three, [*A, *B, 5])
    two.step(commit=[commands.Commit(77, 8)])
    assert answer(pair, waits).cached_tokens == 8


def test_what_the_host_tier_has_is_loaded_not_waited_for():
    pair, one, two = watched(2, pages=4, host_pages=8, reclaim_pages=0)
    one.cache([*A, *B])
    assert one.try_reserve(range(100, 116)) is None
    pair.finish()
    one.free(Held(one.next_seq - 1, answer(pair, (one.session, pair.numbers[one.session]))))
    one.reserve(A[:2])
    assert two.try_reserve([*A, *B, 7], join_s=9.0) is None
    assert pair.counter("joined") == 0


@pytest.mark.parametrize("seed", range(2))
def test_rk_035_fifty_clients_never_all_wait(seed):
    """50 clients with one thread each, that hold what they compute while they ask for more: somebody always goes on."""
    rng = random.Random(seed)
    pair = Watched(800, every=10, limits=Limits(queued=1000))
    clients = [Client(pair, rng) for _ in range(50)]
    for _ in range(3000):
        for key, reply in pair.late.items():
            clients[key[0] - 1].answered(reply)
        pair.late.clear()
        ready = [client for client in clients if client.waits_for is None]
        assert ready, f"all wait: {[client.waits_for for client in clients]}"
        rng.choice(ready[:3] if rng.random() < 0.5 else ready).act()
    assert pair.counter("joined") > 50


class Client:
    """Computes several prompts at a time, and stands still while one of its requests waits. Its waits have no end."""

    def __init__(self, pair, rng):
        self.rng, self.worker = rng, Worker(pair)
        self.held, self.waits_for = {}, None

    def act(self):
        if len(self.held) < 4 and self.rng.random() < 0.7:
            prompt = [token for _ in range(self.rng.randint(1, 3)) for token in [self.rng.randrange(40)] * 4]
            seq = self.worker.next_seq
            self.waits_for = (seq, len(prompt))
            reply = self.worker.try_reserve(prompt, join_s=80000.0)
            if reply is not None:
                self.answered(reply)
        elif self.held:
            seq, length = self.rng.choice(list(self.held.items()))
            if self.rng.random() < 0.2:
                del self.held[seq]
                self.worker.step(free=[commands.Free(seq)])
            else:
                self.worker.step(commit=[commands.Commit(seq, length)])

    def answered(self, reply):
        assert isinstance(reply, commands.Reserved)
        seq, length = self.waits_for
        self.held[seq], self.waits_for = length, None


def test_rk_035_who_waits_for_pages_holds_none_and_all_waits_end():
    """Two hold two of four pages and want three more: the waits are bounded, and somebody goes on within them."""
    pair, one, two, three = watched(3, pages=4)
    one.reserve([*A, *B])
    two.reserve([*C, *D])
    for worker in (one, two):
        assert worker.try_reserve(range(100, 112), wait_s=5.0) is None
    assert three.try_reserve([1], wait_s=5.0) is None
    pair.tick(5.0)
    refused = [code(reply) for reply in pair.late.values()]
    assert refused == ["out_of_pages"] * 3
